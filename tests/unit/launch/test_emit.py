"""What `p2pavg launch --to docker` and `--to sky` write."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from p2pavg.credentials import Credentials
from p2pavg.errors import ConfigurationError
from p2pavg.launch.emit import Emission, start
from p2pavg.launch.swarm_file import load
from p2pavg.launch.yaml import render

yaml = pytest.importorskip("yaml")
SWARM = """
run = "Rented"
wheel = "p2pavg-0.1.0-cp312-abi3-linux_x86_64.whl"
packages = ["torch==2.13.0"]
setup = ["pip install datasets"]
directory = "code"
{more}
[[machine]]
name = "us"
arguments = ["--region", "us east"]
[machine.resources]
use_spot = true
any_of = [{{infra = "aws/us-east-1", accelerators = "L4:1"}}, {{infra = "gcp/us-east4"}}]

[[machine]]
name = "eu"
[machine.environment]
NO = "no"
[machine.resources]
infra = "azure/westeurope"
accelerators = "T4:1"
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def emission(tmp_path: Path, more: str = "") -> Emission:
    """With a wheel, and code of which a part stays here."""
    (tmp_path / "p2pavg-0.1.0-cp312-abi3-linux_x86_64.whl").write_bytes(b"wheel")
    (tmp_path / "code" / ".git").mkdir(parents=True)
    (tmp_path / "code" / "src").mkdir()
    (tmp_path / "code" / "src" / "train.py").write_text("print('hello')\n")
    file = tmp_path / "swarm.toml"
    file.write_text(SWARM.format(more=more))
    return Emission(load(file), tmp_path / "code" / "src" / "train.py", ["--lr", "0.1"], tmp_path / "out")


def private(path: Path) -> bool:
    return path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "value",
    [
        {"a": ["x", {"b": [], "c": {}}], "yes": "no", "n": 1.5, "none": None},
        {"run": "set -e\n# a comment: with a colon\nexec python x\n", "mode": 0o400, "on": True},
        {
            "texts": [
                "",
                " a",
                "a ",
                "1",
                "1.0",
                "~",
                "a: b",
                "- a",
                "#",
                "ä",
                'q"q',
                "0x1f",
                "2026-01-01",
                "12:30",
                ".5",
                ".inf",
                "./x",
            ]
        },
        [[1, [2]], "x\ty"],
        {"a": "two\n\nlines\n\n", "b": "blank \nend\n", "c": "no end\nhere"},
    ],
)
def test_yaml_is_read_as_what_was_written(value: Any) -> None:
    """As PyYAML reads it."""
    assert yaml.safe_load(render(value)) == value


def test_a_compose_file_has_a_service_per_peer(tmp_path: Path) -> None:
    """Each has credentials of its own, which only its owner reads, SIGTERM's way, and time to leave."""
    commands = emission(tmp_path).docker()
    out = tmp_path / "out"
    document = yaml.safe_load((out / "compose.yaml").read_text())
    assert list(document["services"]) == ["bootstrap", "us", "eu"]
    us = document["services"]["us"]
    assert us["command"] == ["src/train.py", "--lr", "0.1", "--region", "us east"]
    assert us["environment"]["P2PAVG_INITIAL_PEERS"] == "bootstrap:31329"
    assert us["stop_grace_period"] == "60s"
    assert document["services"]["eu"]["environment"]["NO"] == "no"
    lines = {Credentials.load(out / f"{name}.credentials").identity.peer_id for name in document["services"]}
    assert len(lines) == 3
    assert all(private(path) for path in out.glob("*.credentials"))
    text = (out / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["python"]' in text
    assert "pip install --no-cache-dir torch==2.13.0 /tmp/p2pavg" in text
    assert (out / "code" / "src" / "train.py").exists()
    assert not (out / "code" / ".git").exists()
    assert commands == [["docker", "compose", "up", "--build", "--detach"]]  # in the folder


def test_commands_run_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative folder is the one that they find their files in."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "here").touch()
    monkeypatch.chdir(tmp_path)
    assert start(Path("sub"), [["ls", "here"]], only_show=False) == 0
    assert start(Path("sub"), [["ls", "nowhere"]], only_show=False) != 0


def linted(tmp_path: Path) -> Path:
    """The folder of an image with all that can be in one."""
    (tmp_path / "limits.txt").write_text("numpy < 3\n")
    more = 'constraints = "limits.txt"\ncheckpoints = "kept"\n[pip]\nextra-index-url = "https://a.example"'
    emission(tmp_path, more).docker()
    return tmp_path / "out"


def test_hadolint_has_nothing_against_the_image(tmp_path: Path) -> None:
    """Of what it calls a warning or worse."""
    programs = [shutil.which("hadolint"), str(Path(sys.executable).parent / "hadolint")]
    program = next((one for one in programs if one and Path(one).exists()), None)
    if program is None:
        pytest.skip("hadolint is not installed")
    command = [program, "--failure-threshold", "warning", linted(tmp_path) / "Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_compose_file_fits_its_specification(tmp_path: Path) -> None:
    """Its fields, and the secrets and volumes that its services name."""
    spec = pytest.importorskip("compose_spec", reason="compose-spec is not installed")
    text = (linted(tmp_path) / "compose.yaml").read_text()
    read = spec.PyCompose.from_yaml(text)
    read.validate()
    assert read.service_names() == ["bootstrap", "us", "eu"]
    for right, wrong in (("source: us", "source: nobody"), ('"60s"', '"soon"')):
        with pytest.raises(Exception, match=r"secret|soon|duration|valid"):
            spec.PyCompose.from_yaml(text.replace(right, wrong)).validate()


def test_docker_understands_the_compose_file(tmp_path: Path) -> None:
    """Its client checks the file, without a daemon."""
    asked = ["docker", "compose", "version"]
    if shutil.which("docker") is None or subprocess.run(asked, capture_output=True, check=False).returncode:
        pytest.skip("needs Docker's client with compose")
    emission(tmp_path).docker()
    command = ["docker", "compose", "config", "--quiet"]
    done = subprocess.run(command, cwd=tmp_path / "out", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_sky_gets_a_job_per_peer(tmp_path: Path) -> None:
    """Resources as the file says, a spot job that recovers, and a secret that stands in no YAML."""
    commands = emission(tmp_path, 'bootstrap = "203.0.113.7:31329"').sky()
    out = tmp_path / "out"
    us, eu = (yaml.safe_load((out / f"{name}.yaml").read_text()) for name in ("us", "eu"))
    assert us["resources"]["use_spot"] is True
    assert [offer["infra"] for offer in us["resources"]["any_of"]] == ["aws/us-east-1", "gcp/us-east4"]
    assert eu["resources"]["infra"] == "azure/westeurope"
    assert us["resources"]["ports"] == [31330]
    assert us["envs"] == {"P2PAVG_INITIAL_PEERS": "203.0.113.7:31329", "P2PAVG_NAME": "us"}
    assert us["secrets"] == {"P2PAVG_CREDENTIALS": None}
    assert us["run"].startswith("exec python src/train.py --lr 0.1 --region 'us east'\n")
    assert "pip install torch==2.13.0 ~/p2pavg" in us["setup"]
    secret = (out / "us.secret").read_text().strip().partition("=")[2].strip("'")
    assert Credentials.load(secret).run_id == "Rented"
    assert private(out / "us.secret")
    assert commands[0][-2:] == ["--secret-file", "us.secret"]


READS = """
import json, sys
import dotenv, sky, yaml
found = {}
for name in sys.argv[1:]:
    sky.Task.from_yaml(f"{name}.yaml")
    secret = dotenv.dotenv_values(f"{name}.secret")  # as --secret-file is read
    with open(f"{name}.yaml") as file:
        task = sky.Task.from_yaml_config(yaml.safe_load(file), None, list(secret.items()))
    secrets = {key: value.get_secret_value() for key, value in task.secrets.items()}
    found[name] = [task.name, secrets, task.envs, [str(offer) for offer in task.resources]]
json.dump(found, open("read.json", "w"))
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_sky_itself_reads_the_jobs(tmp_path: Path) -> None:
    """The real package, which is installed for that, builds a task of each, for three clouds, without one of
    them; the secrets arrive as they are.
    """
    python, more = Path(sys.executable), 'bootstrap = "203.0.113.7:31329"\n'
    if importlib.util.find_spec("sky") is None:
        python = tmp_path / "venv" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "skypilot"], check=True)
    password = "https://me:p'a\\\\ss@wheels.example/cpu"
    more += f'constraints = "limits.txt"\ncheckpoints = "s3://b"\n[pip]\nextra-index-url = "{password}"'
    (tmp_path / "limits.txt").write_text("numpy < 3\n")
    emission(tmp_path, more).sky()
    out = tmp_path / "out"
    subprocess.run([python, "-c", READS, "us", "eu"], cwd=out, check=True)
    read = json.loads((out / "read.json").read_text())
    for name, (job, secrets, environment, offers) in read.items():
        assert job == f"Rented-{name}"
        assert Credentials.load(secrets["P2PAVG_CREDENTIALS"]).run_id == "Rented"
        assert secrets["PIP_EXTRA_INDEX_URL"] == password.replace("\\\\", "\\")
        assert environment["P2PAVG_NAME"] == name
        clouds = ("aws", "gcp") if name == "us" else ("azure",)
        assert all(any(cloud in offer.lower() for offer in offers) for cloud in clouds)


def test_rented_machines_need_somebody_to_find(tmp_path: Path) -> None:
    """Without a bootstrap node the sentence says what to run."""
    with pytest.raises(ConfigurationError, match="bootstrap = HOST:PORT is missing"):
        emission(tmp_path).sky()


def test_a_script_outside_of_the_code(tmp_path: Path) -> None:
    """It would not be there."""
    made = emission(tmp_path)
    made._script = tmp_path / "other.py"
    with pytest.raises(ConfigurationError, match="is not in the directory"):
        made.docker()


def test_only_showing_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands stand there as a person types them."""
    assert start(tmp_path, [["false", "a b"]], only_show=True) == 0
    assert capsys.readouterr().out == f"cd {tmp_path} && false 'a b'\n"


def test_options_of_pip_are_there_while_an_image_is_built_alone(tmp_path: Path) -> None:
    """They may hold a password: a secret of the build, which no layer keeps; and of a task."""
    more = '[pip]\nextra-index-url = "https://me:secret@wheels.example/cpu"\n'
    emission(tmp_path, more).docker()
    out = tmp_path / "out"
    assert private(out / "pip.conf")
    assert "secret@wheels.example" in (out / "pip.conf").read_text()
    assert "pip.conf" in (out / ".dockerignore").read_text().split()
    image = (out / "Dockerfile").read_text()
    assert "wheels.example" not in image
    assert (
        image.count("RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf ") == image.count("RUN ") == 2
    )
    compose = yaml.safe_load((out / "compose.yaml").read_text())
    assert compose["services"]["us"]["build"] == {"context": ".", "secrets": ["pip.conf"]}
    assert compose["secrets"]["pip.conf"] == {"file": "./pip.conf"}
    shutil.rmtree(tmp_path / "code")
    emission(tmp_path, 'bootstrap = "203.0.113.7:31329"\n' + more).sky()
    assert "wheels.example" not in (out / "us.yaml").read_text()
    task = yaml.safe_load((out / "us.yaml").read_text())
    assert set(task["secrets"]) == {"P2PAVG_CREDENTIALS", "PIP_EXTRA_INDEX_URL"}
    assert "PIP_EXTRA_INDEX_URL='https://me:secret@wheels.example/cpu'\n" in (out / "us.secret").read_text()
    assert private(out / "us.secret")


def test_checkpoints_and_constraints_are_where_the_peers_are(tmp_path: Path) -> None:
    """A volume per container, a bucket for rented machines, and pip's constraints in both."""
    (tmp_path / "limits.txt").write_text("numpy < 3\n")
    limits = 'constraints = "limits.txt"\n'
    emission(tmp_path, limits + 'checkpoints = "kept"').docker()
    out = tmp_path / "out"
    compose = yaml.safe_load((out / "compose.yaml").read_text())
    assert compose["services"]["us"]["volumes"] == ["us:/code/kept"]
    assert set(compose["volumes"]) == {"us", "eu"}
    assert compose["services"]["us"]["environment"]["P2PAVG_CHECKPOINTS"] == "/code/kept"
    assert "volumes" not in compose["services"]["bootstrap"]
    image = (out / "Dockerfile").read_text()
    assert "COPY p2pavg-0.1.0-cp312-abi3-linux_x86_64.whl constraints.txt /tmp/\n" in image
    assert "pip install --no-cache-dir -c /tmp/constraints.txt torch==2.13.0 /tmp/p2pavg" in image
    assert (out / "constraints.txt").read_text() == "numpy < 3\n"
    shutil.rmtree(tmp_path / "code")
    bucket = 'bootstrap = "203.0.113.7:31329"\ncheckpoints = "s3://my-bucket"\n'
    emission(tmp_path, limits + bucket).sky()
    task = yaml.safe_load((out / "us.yaml").read_text())
    assert task["file_mounts"]["/checkpoints"] == {"source": "s3://my-bucket", "mode": "MOUNT"}
    assert task["file_mounts"]["~/constraints.txt"] == "./constraints.txt"
    assert task["envs"]["P2PAVG_CHECKPOINTS"] == "/checkpoints/us"
    assert "pip install -c ~/constraints.txt torch==2.13.0 ~/p2pavg" in task["setup"]
    shutil.rmtree(tmp_path / "code")
    with pytest.raises(ConfigurationError, match="is a bucket"):
        emission(tmp_path, bucket).docker()


def test_names_that_docker_takes(tmp_path: Path) -> None:
    """Images and projects have fewer signs than runs."""
    made = emission(tmp_path)
    object.__setattr__(made._swarm, "run", "My..run__1-")
    made.docker()
    document = yaml.safe_load((tmp_path / "out" / "compose.yaml").read_text())
    assert document["name"] == "my-run-1"
    assert document["services"]["us"]["image"] == "my-run-1-peer"
