"""Starting, looking at and stopping a swarm on machines, and what can go wrong there, each one sentence."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pavg import cli
from p2pavg.credentials import Authority
from p2pavg.errors import ConfigurationError
from p2pavg.launch import deployment
from p2pavg.launch.deployment import Deployment
from p2pavg.launch.record import Record
from tests.unit.launch.fleet import World, package

# Values that a shell would take apart.
STRANGE = "a b\n'c' \"d\" $(touch hacked) `touch hacked` \\ | & ; @PYTHON@ @FOLDER@ 100% ä"
TELLS = """
import json, os, sys, time
with open("told.json.new", "w") as file:
    json.dump({"arguments": sys.argv[1:], "environment": dict(os.environ)}, file)
os.rename("told.json.new", "told.json")
time.sleep(600)
"""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(deployment, "TABLE_S", 0.0)  # the scripts are no peers
    made = World(tmp_path, monkeypatch)
    yield made
    if made.file.exists():
        Deployment(made.fleet()).stop([])


def launch(world: World, *words: str) -> int:
    return cli.main(["launch", "--swarm", str(world.file), *words])


def test_what_the_script_gets_is_what_the_file_says(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Arguments and variables arrive as written, whatever signs they have; secrets are on no command line,
    and in nothing that is printed or logged.
    """
    home = world.machine("one")
    world.script.write_text(TELLS)
    more = f'checkpoints = "/data"\n[environment]\nSTRANGE = {json.dumps(STRANGE)}\n'
    each = f'region = "eu west"\narguments = ["--of", {json.dumps(STRANGE)}]'
    world.swarm("one", more=more, each=each)
    assert launch(world, str(world.script), "--") == 1  # it is no peer, and so not in the table
    told = home / ".p2pavg" / "r" / "one" / "code" / "told.json"
    wait_for(told)
    found = json.loads(told.read_text())
    assert found["arguments"] == ["--of", STRANGE]
    assert found["environment"]["STRANGE"] == STRANGE
    assert found["environment"]["P2PAVG_REGION"] == "eu west"
    assert found["environment"]["P2PAVG_NAME"] == "one"
    assert found["environment"]["P2PAVG_CHECKPOINTS"] == "/data"
    credentials = Path(found["environment"]["P2PAVG_CREDENTIALS"])
    assert credentials == told.parents[1] / "credentials"
    assert credentials.stat().st_mode & 0o077 == 0
    assert not list(world.folder.rglob("hacked"))
    record = Record.load("r")
    assert record.authority is not None
    assert record.watcher is not None
    secrets = [credentials.read_text(), record.authority, record.watcher]
    shown = capsys.readouterr()
    logs = [path.read_text() for path in home.rglob("*.log")]
    for text in (world.commands(), shown.out, shown.err, *logs):
        assert not any(secret in text for secret in secrets)


def wait_for(path: Path) -> None:
    """Until a file is there."""
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


NO_PASSWORD = "me@x: Permission denied (publickey,password)."
OTHER_KEY = "@@@@@\n@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed."
NOWHERE = "ssh: Could not resolve hostname x: Name or service not known"


@pytest.mark.parametrize(
    ("ssh_says", "sentence"),
    [
        (NO_PASSWORD, r"x cannot be reached \(me@x: Permission denied .*ssh-copy-id.*until 'ssh x' asks"),
        (
            OTHER_KEY,
            r"x cannot be reached \(Host key verification failed\.\); 'ssh x' shows that machine's key",
        ),
        (NOWHERE, r"x cannot be reached \(ssh: Could not resolve hostname x: .* known\); try 'ssh x'"),
    ],
)
def test_a_machine_that_ssh_does_not_get_into(
    world: World, capsys: pytest.CaptureFixture[str], ssh_says: str, sentence: str
) -> None:
    """One sentence says why and what to do; the other machine's peer runs, and stopping tells of it once."""
    world.machine("one")
    world.says("x", ssh_says)
    world.swarm("one", "x", more="closed = false")
    assert launch(world, str(world.script)) == 1
    said = capsys.readouterr().out
    assert len(re.findall(f"^{sentence}", said, re.M)) == 1, said
    assert said.count("x cannot be reached") == 1
    assert "one: started" in said
    assert "0 peers of 2 in the table" in said
    assert launch(world, "stop") == 1
    said = capsys.readouterr().out
    assert said.count("x cannot be reached") == 1, said
    assert "one: left" in said
    assert not any(state["alive"] for state in world.fleet().states(without=["x"]).values())


OLD = "#!/bin/sh\necho '3.8 linux x86_64'\n"
TWO = "#!/bin/sh\necho '2.7 linux2 x86_64'\n"
NO_PYTHON = "#!/bin/sh\necho 'what?'\n"
OF_RISC = "#!/bin/sh\necho '3.12 linux riscv64'\n"
NO_VENV = """#!/bin/sh
case "$*" in
*venv*) echo "ensurepip is not available."; exit 1 ;;
*) echo "3.12 linux x86_64" ;;
esac
"""


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (None, "one: there is no python3.x on that machine; name another one with python="),
        (
            OLD,
            "one: python3.x there is Python 3.8, and p2pavg needs 3.11 or newer: name another",
        ),
        (
            TWO,
            "one: python3.x there is Python 2.7, and p2pavg needs 3.11 or newer: name another",
        ),
        (NO_PYTHON, "one: python3.x there is no Python (it says 'what?'); name one with python="),
        (OF_RISC, "one: no wheel fits its Python (3.12 linux riscv64): 'make wheel' makes more; name their"),
        (
            NO_VENV,
            "one: python3.x there makes no virtual environment: install its module venv (Debian, Ubuntu:",
        ),
    ],
)
def test_a_python_that_does_not_do(
    world: World, capsys: pytest.CaptureFixture[str], program: str | None, sentence: str
) -> None:
    """Missing, too old, of another processor, without venv, or no Python: each is one sentence."""
    world.machine("one")
    if program is not None:
        world.program("one", "python3.x", program)
    package(world.folder, "p2pavg", "0.1", "cp312-abi3-linux_x86_64")
    world.swarm("one", more=f'python = "python3.x"\nwheel = "{world.folder}"\nclosed = false', install=True)
    assert launch(world, str(world.script)) == 1
    said = capsys.readouterr()
    assert f"\n{sentence}" in f"\n{said.out}", said.out
    assert "Traceback" not in said.err


def test_a_machine_without_the_package(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """install = false says that it is there; where it is not, that is said at once."""
    world.machine("one")
    world.program("one", "bare", f'#!/bin/sh\nexec env -u PYTHONPATH {sys.executable} -I -S "$@"\n')
    world.swarm("one", more='python = "bare"\nclosed = false')
    assert launch(world, str(world.script)) == 1
    assert "one: bare there has no p2pavg: leave install = false out" in capsys.readouterr().out


def test_a_full_disk(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """What the machine's tar says is the sentence, and not the line after it."""
    world.machine("one")
    full = ["tar: ./train.py: Cannot write: No space left on device"]
    full.append("tar: Exiting with failure status due to previous errors")
    printed = "".join(f"echo '{line}' >&2\n" for line in full)
    world.program("one", "tar", f"#!/bin/sh\ncat > /dev/null\n{printed}exit 2\n")
    world.swarm("one", more="closed = false")
    assert launch(world, str(world.script)) == 1
    assert "one: tar: ./train.py: Cannot write: No space left on device\n" in capsys.readouterr().out


def test_a_login_shell_that_says_something(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """What ~/.bashrc prints is not taken for an answer."""
    world.machine("one")
    (world.folder / "noise").write_text("alive\nWelcome!\n")
    world.swarm("one", more="closed = false")
    assert launch(world, "status") == 1
    assert "was not launched from here" in capsys.readouterr().err
    assert launch(world, str(world.script)) == 1
    assert "one: started" in capsys.readouterr().out
    wait_for(world.folder / "one" / ".p2pavg" / "r" / "one" / "peer.log")
    assert launch(world, "logs") == 0
    assert capsys.readouterr().out == "up\n"


def test_logs_of_a_peer_that_never_started(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, also with --follow, which does not wait for a log that nobody writes."""
    world.machine("one")
    world.swarm("one")
    assert launch(world, "logs") == 1
    assert capsys.readouterr().out == "one: one was never started there\n"
    assert launch(world, "logs", "one", "--follow") == 1
    assert "one: one was never started there" in capsys.readouterr().err


def test_a_launch_that_is_interrupted_can_be_stopped_and_made_again(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the bootstrap node was started: a sentence says what ends it, that ends it, and a launch
    that comes instead begins with a node of its own.
    """
    home = world.machine("one")
    world.swarm("one")
    node = home / ".p2pavg" / "r" / "bootstrap" / "state.json"

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Deployment, "_start", interrupted)
        assert launch(world, str(world.script)) == 130
        assert f"'p2pavg launch stop --swarm {world.file}' lets them leave" in capsys.readouterr().out
        first = json.loads(node.read_text())
        assert first["state"] == "running"
        assert launch(world, str(world.script)) == 130
        second = json.loads(node.read_text())
        assert second["state"] == "running"
        assert second["peer"] != first["peer"]
        assert not Path(f"/proc/{first['peer']}").exists()
    assert launch(world, "stop") == 0
    assert json.loads(node.read_text())["state"] == "left"


@pytest.mark.parametrize("code", [0, 1])
def test_a_script_that_ends_is_not_waited_for(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A peer that ends, or crashes again and again, is told with its last words as soon as that is seen."""
    monkeypatch.setattr(deployment, "TABLE_S", 3600.0)
    monkeypatch.setattr(deployment, "LOOK_S", 0.0)
    world.machine("one")
    world.script.write_text(f"print('no such\\x1b[2J module')\nraise SystemExit({code})\n")
    world.swarm("one", more="closed = false")
    assert launch(world, str(world.script)) == 1
    said = capsys.readouterr().out
    how = "ended" if code == 0 else r"crashed \(ended with exit code 1\), restarted [0-9]+ times?"
    assert re.search(rf"^one: {how}; its last words: no such \[2J module$", said, re.M), said


def test_two_launches_of_one_run_at_once(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """The second one ends with a sentence before it touches a machine."""
    world.machine("one")
    world.swarm("one")
    with Record.locked("r"):
        assert launch(world, str(world.script)) == 1
        assert launch(world, "add") == 1
    assert capsys.readouterr().err.count("another 'p2pavg launch' starts peers of run 'r' right now") == 2
    assert world.commands() == ""


def test_a_dry_run_looks_and_changes_nothing(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """A line per machine tells its Python and what would be installed; nothing is there afterwards."""
    home = world.machine("one")
    package(world.folder, "p2pavg", "0.1")
    more = f'wheel = "{world.folder}"\npackages = ["torch==2.13.0"]'
    world.swarm("one", "gone", more=more, install=True)
    assert launch(world, str(world.script), "--dry-run", "--") == 1  # one is missing
    said = capsys.readouterr().out
    assert "gone cannot be reached" in said
    assert "free; would install p2pavg-0.1-py3-none-any.whl, torch==2.13.0" in said
    assert "one: would run 'python train.py'" in said
    assert said.endswith("nothing was started or installed\n")
    assert [path.name for path in home.iterdir()] == ["bin"]
    assert not Record.path("r").exists()


def test_the_page_of_a_launched_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """`launch watch` becomes the monitor: credentials are in its environment, and not on its command line."""
    world.machine("one")
    world.swarm("one")
    authority = Authority.new("r")
    watcher = authority.member().to_text()
    Record("r", str(world.script), [], "127.0.0.1:31329", authority.to_text(), watcher).save()
    calls: list[tuple[list[str], dict[str, str]]] = []

    class BecomesAnother(Exception):
        pass

    def execve(program: str, command: list[str], environment: dict[str, str]) -> None:
        calls.append((command, environment))
        raise BecomesAnother

    monkeypatch.setattr(deployment.os, "execve", execve)
    with pytest.raises(BecomesAnother):
        launch(world, "watch")
    ((command, environment),) = calls
    assert command[1:5] == ["-m", "p2pavg", "monitor", "r"]
    assert command[command.index("--web") + 1] == "127.0.0.1:8033"
    assert command[command.index("--initial-peers") + 1] == "127.0.0.1:31329"
    assert environment["P2PAVG_CREDENTIALS"] == watcher
    assert watcher not in " ".join(command)


def test_buckets_are_for_rented_machines(world: World) -> None:
    """Over ssh, checkpoints need a folder."""
    world.machine("one")
    world.swarm("one", more='checkpoints = "s3://bucket"')
    with pytest.raises(ConfigurationError, match="is a bucket, which --to sky mounts"):
        world.fleet()
    world.file.unlink()
