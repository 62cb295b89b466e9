"""Every command in README.md and docs runs as it stands there, on loopback instead of the addresses."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from p2pavg.forecast.inventory import EXAMPLE
from tests.forecast.swarms import reports
from tests.ports import free_port
from tests.swarm.scripts import LM, ROOT, Script, Terminal, write_shards

pytestmark = pytest.mark.timeout(300)  # several processes import PyTorch, each for seconds

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"(?:<!-- (test|not run): ([^>]*) -->\n)?```(?:bash|sh|console)\n(.*?)```", re.DOTALL)
ANOTHER = "192.0.2.10:31330"  # the first peer, in the pages
SHORT = (*LM, "--epochs", "4", "--validate-every", "0")
LONG = (*LM, "--epochs", "100000", "--validate-every", "0")
PICTURES = (
    "--listen",
    "127.0.0.1:0",
    "--classes",
    "3",
    "--size",
    "8",
    "--target-batch-size",
    "32",
    "--epochs",
)


@dataclass(frozen=True)
class Block:
    """A fenced block of shell commands. kind: "test", "not run", or None when nothing says."""

    page: str
    kind: str | None
    scenario: str
    commands: tuple[str, ...]


def blocks() -> Iterator[Block]:
    for page in PAGES:
        for kind, scenario, body in BLOCK.findall(page.read_text()):
            lines = [line for line in body.splitlines() if line.strip()]
            yield Block(page.name, kind or None, scenario.strip(), tuple(lines))


BLOCKS = tuple(blocks())


def of(scenario: str) -> list[str]:
    """The commands of a scenario, page by page."""
    return [command for block in BLOCKS if block.scenario == scenario for command in block.commands]


class Shell:
    """Runs one line of the pages, and presses Enter once: `python` and `p2pavg` are this interpreter's."""

    def __init__(self, terminal: Terminal, folder: Path) -> None:
        self._start = terminal
        self.folder = folder

    def __call__(self, line: str, *more: str, **replaced: str) -> Script:
        for old, new in replaced.items():
            line = line.replace({"address": ANOTHER}.get(old, old), new)
        words = shlex.split(line, comments=True)
        env = {}
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            env[name] = value
        program, *arguments = words
        if program == "p2pavg":
            arguments = ["-m", "p2pavg", *arguments]
        else:
            assert program == "python", line
            if not (self.folder / "examples").exists():
                (self.folder / "examples").symlink_to(ROOT / "examples")
        typed = self.folder / "typed"
        typed.write_text("\n")
        with typed.open() as stdin:
            return self._start(*arguments, *more, cwd=self.folder, env=env, stdin=stdin.fileno())


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with Terminal() as terminal:
        yield Shell(terminal, tmp_path)


def test_every_block_says_how_it_is_tested():
    """Every block of shell commands names the scenario that runs it, or why none does."""
    assert len(BLOCKS) > 12
    source = Path(__file__).read_text()
    for block in BLOCKS:
        assert block.kind, f"{block.page}: a block without a marker: {block.commands}"
        if block.kind == "test":
            assert f"def test_{block.scenario}(" in source, f"{block.page}: nothing runs {block.scenario!r}"


def test_make():
    """The make targets of the README exist, with all that they depend on."""
    for line in of("make"):
        done = subprocess.run(
            ["make", "-n", *shlex.split(line, comments=True)[1:]], cwd=ROOT, capture_output=True, timeout=60
        )
        assert done.returncode == 0, done.stderr


def test_install(tmp_path):
    """`pip install` of the pages builds a package that runs; here without dependencies and native part."""
    pytest.importorskip("scikit_build_core")
    lines = of("install")
    assert [line for line in lines if not line.startswith("pip install ")] == [
        "python3 -m venv venv && source venv/bin/activate"
    ] * 3
    (line,) = {line for line in lines if "-c constraints" in line}
    words = [*shlex.split(line)[1:], "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    environment = {"P2PAVG_NATIVE": "0", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    installing = [sys.executable, "-m", "pip", *words, "--target", str(tmp_path / "installed")]
    subprocess.run(installing, cwd=ROOT, env=environment, check=True, timeout=120)
    running = [sys.executable, "-m", "p2pavg", "--version"]
    environment["PYTHONPATH"] = str(tmp_path / "installed")
    done = subprocess.run(running, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("p2pavg ")


def test_version(shell):
    """p2pavg --version prints it."""
    (line,) = of("version")
    assert shell(line).end().startswith("p2pavg ")


@pytest.fixture(scope="class")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """The first peer of docs/start.md, which trains until the end."""
    with Terminal() as terminal:
        (line,) = of("first")
        yield Shell(terminal, tmp_path_factory.mktemp("first"))(line, *LONG)


@pytest.fixture(scope="class")
def address(first: Script) -> str:
    """Where the first peer says that it is, in a command that is the second's of the pages."""
    printed = first.line_with("--initial-peers")
    (line,) = of("second")
    where = shlex.split(printed)[shlex.split(line).index(ANOTHER)]
    assert printed.startswith(line.replace(ANOTHER, where))
    first.line_with("epoch 1:")
    return where


class TestTwoMachines:
    """The first peer trains while the others look on."""

    def test_first(self, first, address):
        """The first peer trains, and prints the command for the second."""
        assert first.process.poll() is None
        assert address.startswith("127.0.0.1:")

    def test_second(self, shell, address):
        """The second peer joins the first by the command of the pages."""
        (line,) = of("second")
        shell(line, *LONG, address=address).line_with(" 2 peers")

    def test_look(self, shell, address):
        """monitor, peers and --help show something, of the live run where they ask for one."""
        lines = [line.partition("#")[0].strip().replace(" my-run ", " demo ") for line in of("look")]
        free = {"127.0.0.1:8033": "127.0.0.1:0"}  # all look on at once
        scripts = {line: shell(line, address=address, **free) for line in dict.fromkeys(lines)}
        for line, script in scripts.items():
            if line.startswith("p2pavg monitor"):
                assert "epoch" in script.line_with("epoch")
                script.interrupt()
                assert script.process.returncode in (0, 130)
            else:
                assert len(script.end().splitlines()) > 1


@dataclass(frozen=True)
class Alone:
    """A peer that trains four epochs alone, in a folder of its own."""

    shell: Shell
    script: Script


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Alone]]:
    """The scenarios of one peer, all at once: most of their time is the import of PyTorch."""
    with Terminal() as terminal:
        shells = {
            name: Shell(terminal, tmp_path_factory.mktemp(name))
            for name in ("announced", "reports", "text", "closed")
        }
        texts = shells["text"].folder / "texts"
        texts.mkdir()
        for number in range(40):
            (texts / f"{number}.txt").write_text(f"call me number {number}. " * 60)
        shells["closed"](of("closed")[0]).end()
        mine = f"127.0.0.1:{free_port()}"
        lines = {
            "announced": of("announced")[0].replace("203.0.113.5:31330", mine),
            "reports": of("reports")[0],
            "text": of("text")[0],
            "closed": of("closed")[1],
        }
        more = {"announced": ("--listen", mine)}
        yield {
            name: Alone(shell, shell(lines[name], *SHORT, *more.get(name, ())))
            for name, shell in shells.items()
        }


def test_announced(alone):
    """A peer tells others the address that it was told to announce."""
    script = alone["announced"].script
    told = script.line_with("--initial-peers").split("--initial-peers ")[1].split()[0]
    assert told == script.words[-1]


def test_reports(alone):
    """Reports are written, and become a page."""
    alone["reports"].script.end()
    shell = alone["reports"].shell
    assert "epoch" in shell(of("reports")[1]).end()
    assert list(shell.folder.glob("*.png"))


def test_text(alone):
    """The language model trains on one's own text files."""
    assert "done after 4 epochs" in alone["text"].script.end()


def test_closed(alone):
    """A run closed by a shared secret trains."""
    out = alone["closed"].script.end()
    assert "done after 4 epochs" in out
    assert "is open" not in out


def test_digits(shell):
    """The README's script trains in two terminals."""
    alone, joining = of("digits")
    one = shell(alone, "--epochs", "100000")
    where = one.line_with("join with").split()[-1]
    shell(joining, "--epochs", "100000", address=where).line_with("peers: 2")


def test_images(shell):
    """The image classifier serves shards from a folder, and another peer fetches them."""
    pytest.importorskip("PIL")
    local, remote = of("images")
    (shell.folder / "shards").mkdir()
    write_shards(shell.folder / "shards", "train", 6)
    cache = ("--cache", str(shell.folder / "cache"))
    one = shell(local, "--http-port", "0", *cache, *PICTURES, "100000")
    *_, index, _, where = one.line_with("join with").split()
    other = remote.replace("http://192.0.2.10:8000/index.json", index)
    shell(other, *cache, *PICTURES, "100000", address=where).line_with(" 2 peers")


def test_forecast(shell):
    """Reports are foretold, and an inventory planned with."""
    (shell.folder / "reports.jsonl").write_text("".join(one.to_json() + "\n" for one in reports()))
    (shell.folder / "offers.toml").write_text(EXAMPLE)
    for line in of("forecast"):
        assert "samples/s" in shell(line).end()


def test_bootstrap(shell):
    """A bootstrap node prints its address."""
    (line,) = of("bootstrap")
    said = shell(line.replace("0.0.0.0:31330", "127.0.0.1:0")).line_with("127.0.0.1")
    assert re.fullmatch(r"127\.0\.0\.1:[1-9]\d*", said)


def test_credentials(shell):
    """Authority, request, invitation and credentials are made one after the other."""
    for line in of("credentials"):
        alias = f'p2pavg() {{ {shlex.quote(sys.executable)} -m p2pavg "$@"; }}'
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        script = ["bash", "-c", f"{alias}\n{line}"]
        subprocess.run(script, cwd=shell.folder, env=environment, check=True, timeout=60)
    made = {path.name for path in shell.folder.iterdir()}
    assert {"my-run.authority", "p2pavg-request.key", "p2pavg-member.credentials"} <= made


@pytest.mark.wan
def test_lab(shell):
    """A lab goes up, runs a program, is changed, and goes down."""
    up, *rest = of("lab")
    if (started := shell(up)).process.wait() != 0:
        pytest.skip(f"no lab here: {started.rest()}")
    (shell.folder / "train.py").write_text("print('trained')\n")
    for line in rest:
        out = shell(line.replace("python train.py", f"{sys.executable} {shell.folder}/train.py")).end()
        assert "train.py" not in line or "trained" in out
