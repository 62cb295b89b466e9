from __future__ import annotations

import argparse
import contextlib
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from p2pavg import cli
from p2pavg.bench import __main__ as bench
from p2pavg.cli import verbs
from p2pavg.credentials import new_secret, texts
from p2pavg.errors import UnreachableError
from p2pavg.peer.peer import Peer


class Fake:
    """A verb module made of a function."""

    def __init__(self, func, *names: str) -> None:
        self.func = func
        self.names = names

    def register(self, subparsers) -> None:
        for name in self.names:
            parser = subparsers.add_parser(name, help=name)
            parser.add_argument("--count", type=int, default=1)
            parser.set_defaults(func=self.func)


@pytest.mark.parametrize("words", [("--listen", "{}"), ("--listen", "{}", "--run", "r")])
def test_errors_name_the_options_that_were_written(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A library's sentence about an argument names the option of the command line. However many ports a node
    is started on, one file keeps who it is.
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            assert cli.main(["bootstrap", *(word.format(address) for word in words)]) == 1
            assert "choose another with --listen\n" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / ".config/p2pavg").iterdir()] == ["bootstrap.key"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # as before


@pytest.fixture
def fake(monkeypatch):
    """Installs verb modules under a name; returns Verb objects for them."""

    def install(func, *names: str) -> list[verbs.Verb]:
        module = Fake(func, *names)
        monkeypatch.setattr(verbs.importlib, "import_module", lambda _: module)
        monkeypatch.setattr(verbs.Verb, "exists", lambda _: True)
        return [verbs.Verb(name, "m", f"does {name}") for name in names]

    return install


def test_exit_code_is_what_the_verb_returns(fake):
    """A verb's return value is the exit code."""
    table = fake(lambda args: args.count, "one", "two")
    assert verbs.run("p", "d", table, ["two", "--count", "7"]) == 7


def test_error_is_one_line_and_exit_code_1(fake, capsys):
    """A P2PAvgError ends with code 1 and exactly its sentence on stderr."""

    def fail(_: argparse.Namespace) -> int:
        raise UnreachableError("Nobody answers at 10.0.0.1:1; check the address.")

    assert verbs.run("p2pavg", "d", fake(fail, "one"), ["one"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "p2pavg one: Nobody answers at 10.0.0.1:1; check the address.\n"


def test_other_exceptions_keep_their_traceback(fake):
    """A bug is not dressed up as a user's mistake."""

    def fail(_: argparse.Namespace) -> int:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        verbs.run("p2pavg", "d", fake(fail, "one"), ["one"])


def test_interrupt_is_exit_code_130(fake):
    """Ctrl-C ends quietly with the shell's code for SIGINT."""

    def stop(_: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    assert verbs.run("p2pavg", "d", fake(stop, "one"), ["one"]) == 130


@pytest.mark.parametrize("words", [[], ["nonsense"], ["one", "--count", "x"], ["--nonsense"]])
def test_usage_errors_are_exit_code_2(fake, capsys, words):
    """A missing or unknown verb or a wrong option leaves with code 2."""
    with pytest.raises(SystemExit) as left:
        verbs.run("p2pavg", "d", fake(lambda _: 0, "one", "two"), words)
    assert left.value.code == 2
    assert "usage: p2pavg" in capsys.readouterr().err


def test_only_a_missing_file_hides_a_verb(tmp_path, monkeypatch):
    """A verb whose module file is absent is hidden; one whose file is broken shows its import error."""
    (tmp_path / "p2pavg_broken_verb.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    table = [verbs.Verb("absent", "p2pavg_absent_verb", "h"), verbs.Verb("broken", "p2pavg_broken_verb", "h")]
    assert [verb.exists() for verb in table] == [False, True]
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        verbs.run("p", "d", table, ["broken"])


@pytest.mark.parametrize("table", [cli.VERBS, bench.VERBS], ids=["p2pavg", "bench"])
def test_help_lists_every_verb_that_is_there(capsys, table):
    """--help names each verb of this installation with one line."""
    with pytest.raises(SystemExit) as left:
        verbs.run("p2pavg", "d", table, ["--help"])
    assert left.value.code == 0
    words = capsys.readouterr().out.split()
    assert [verb.name for verb in table if verb.exists() and verb.name not in words] == []


ALL = [([verb.name], verb) for verb in cli.VERBS] + [(["bench", verb.name], verb) for verb in bench.VERBS]


@pytest.mark.parametrize(
    ("words", "verb"), [pytest.param(w, v, id="-".join(w)) for w, v in ALL if v.exists()]
)
def test_help_of_a_verb_has_an_example(capsys, words, verb):
    """VERB --help shows a command line that one can paste."""
    with pytest.raises(SystemExit) as left:
        cli.main([*words, "--help"])
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"p2pavg {' '.join(words)} " in text.split("xample", 1)[1]


@pytest.mark.parametrize("module", ["p2pavg", "p2pavg.bench"])
def test_help_does_not_import_torch(module):
    """python -m p2pavg --help and python -m p2pavg.bench --help answer without loading torch."""
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['x', '--help']\n"
        "try:\n"
        f"    runpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"
        "except SystemExit as left:\n"
        "    assert left.code == 0, left.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "VERB" in done.stdout


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["moniter", "my-run"], "did you mean monitor?"),
        (["peers", "my-run", "--intial-peers", "a:1"], "did you mean --initial-peers?"),
        (["peers", "my-run", "--intial-peers=a:1"], "did you mean --initial-peers?"),
        (["credentials", "nwe", "my-run"], "did you mean new?"),
        (["bench", "alreduce"], "did you mean allreduce?"),
        (["bench", "dht", "--noodes", "3"], "did you mean --nodes?"),
        (["xyzzy"], "choose from bootstrap, "),
        (["peers", "my-run", "--xyzzy"], "unrecognized arguments: --xyzzy\n"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_one_meant(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Verbs, steps and options that are nearly right; what is like none is answered as before."""
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert meant in capsys.readouterr().err


def test_a_misspelt_argument_is_answered_with_the_one_meant() -> None:
    """Constructors name the argument that a wrong keyword is like."""
    with pytest.raises(TypeError, match=r"Peer: .*'lisen'; did you mean 'listen'\?"):
        Peer("my-run", lisen="0.0.0.0:0")  # type: ignore[call-arg]
    with pytest.raises(
        TypeError, match=r"Peer: .*'run_if'; did you mean 'run_id'\?$"
    ):  # and 'run_id' is missing
        Peer(run_if="my-run")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'xyzzy'$"):
        Peer("my-run", xyzzy=1)  # type: ignore[call-arg]


def test_an_empty_run_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    """`p2pavg peers` of a run in which nobody is: one line on stderr, exit code 1, and the JSON all the
    same.
    """
    with contextlib.closing(Peer("somebody", listen="127.0.0.1:0").start()) as peer:
        for extra, told in (([], ""), (["--json", "-"], '"peers": []')):
            assert cli.main(["peers", "nosuch", "--initial-peers", peer.address, *extra]) == 1
            out, err = capsys.readouterr()
            assert told in out
            assert err == "p2pavg peers: nobody is in run 'nosuch' (the swarm itself answered)\n"


def test_a_run_of_other_credentials_is_not_an_empty_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`p2pavg peers` with another secret, or with none, says so, and not that nobody is there."""
    texts.write(tmp_path / "other.secret", new_secret("closed"))
    with contextlib.closing(
        Peer("closed", listen="127.0.0.1:0", credentials=new_secret("closed")).start()
    ) as peer:
        words = ["peers", "closed", "--initial-peers", peer.address]
        assert cli.main([*words, "--credentials", str(tmp_path / "other.secret")]) == 1
        assert "credentials are not of this run" in capsys.readouterr().err
        assert cli.main(words) == 1
        assert "that run is closed" in capsys.readouterr().err


def test_a_page_is_not_announced_before_its_run_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`p2pavg monitor --web` without a way into the swarm says that alone."""
    for library in ("aiohttp", "prometheus_client"):
        pytest.importorskip(library)
    monkeypatch.delenv("P2PAVG_INITIAL_PEERS", raising=False)
    monkeypatch.setattr("os.nice", lambda by: 0)
    assert cli.main(["monitor", "my-run", "--web", "127.0.0.1:0"]) == 1
    told = "p2pavg monitor: no way into the swarm; name any member with --initial-peers host:port\n"
    assert capsys.readouterr().err == told
