from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg import cli
from p2pavg.bench.machine import tcp_sysctls
from p2pavg.bench.options import positive_int, processes, seed
from p2pavg.bench.progress import progress
from p2pavg.bench.result import add_output_options, add_section_options, emit, emit_sections, percentile
from p2pavg.bench.workers import WorkerError, Workers
from p2pavg.cli.verbs import Parser
from p2pavg.errors import ConfigurationError
from p2pavg.report.plot import save_plot


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    return parser.parse_args(words)


def test_json_dash_is_alone_on_stdout(capsys):
    """With --json - stdout is one JSON document and nothing else."""
    emit(parse("--json", "-"), {"seconds": 1.5}, ["for people"])
    document = json.loads(capsys.readouterr().out)
    assert document["seconds"] == 1.5
    assert document["environment"]["cores"] >= 1


def test_json_path_keeps_the_words_on_stdout(capsys, tmp_path):
    """With --json PATH people still read the summary."""
    path = tmp_path / "result.json"
    emit(parse("--json", str(path)), {"seconds": 1.5}, ["for people"])
    assert capsys.readouterr().out == "for people\n"
    assert json.loads(path.read_text())["seconds"] == 1.5


def test_nan_never_reaches_the_json(tmp_path):
    """A result that is not a number is a bug, not a JSON that others cannot read."""
    with pytest.raises(ValueError, match="JSON compliant"):
        emit(parse("--json", str(tmp_path / "r.json")), {"seconds": float("nan")}, [])


def test_missing_folder_is_a_usage_error_before_the_run(capsys):
    """--json into a folder that does not exist leaves with code 2 at once."""
    with pytest.raises(SystemExit) as left:
        parse("--json", "/nonexistent/folder/result.json")
    assert left.value.code == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "join --epoch-seconds -1",
        "join --epoch-seconds nan",
        "rounds --epoch-seconds 0",
        "chaos --epoch-seconds inf",
        "chaos --fault-every 0",
        "allreduce --idle-seconds -1",
        "allreduce --streams 0",
        "allreduce --streams many",
        "penalty --step-seconds -1",
        "penalty --slow 0",
        "net --listen 127.0.0.1:1 --seconds nan",
        "net --listen 127.0.0.1:1 --gigabytes 0",
        "dht --lifetime 0",
        "dht --settle-seconds -1",
    ],
)
def test_impossible_numbers_are_usage_errors(words, capsys):
    """A number that no run can have leaves with code 2 and one sentence, before anything starts."""
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", *words.split()])
    assert left.value.code == 2
    assert "of at least" in capsys.readouterr().err


def test_a_table_without_publishers_is_refused(capsys):
    """--kill that would leave nobody whose record could be found."""
    assert cli.main(["bench", "dht", "--nodes", "20", "--publishers", "1", "--kill", "0.95"]) == 1
    assert "all publishers would be killed" in capsys.readouterr().err


def test_plot_is_drawn(tmp_path):
    """--plot writes a picture."""
    path = tmp_path / "result.png"
    emit(parse("--plot", str(path)), {}, [], draw=lambda figure: figure.subplots().plot([1, 2]))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_unknown_picture_format_names_the_file(tmp_path):
    """A suffix that matplotlib cannot write is one clear error."""
    with pytest.raises(ConfigurationError, match=r"picture\.nonsense"):
        save_plot(tmp_path / "picture.nonsense", lambda _: None)


def test_plot_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    """Without matplotlib the error names what to install, in a clone as elsewhere."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'matplotlib"):
        save_plot(tmp_path / "picture.png", lambda _: None)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "two", "²"])
def test_positive_int_refuses(text):
    """positive_int takes whole numbers from 1 only."""
    with pytest.raises(argparse.ArgumentTypeError):
        positive_int(text)


def test_numbers_of_options_have_bounds():
    """More processes than a machine starts, and numbers that nothing could be made of, are refused."""
    assert (processes("64"), positive_int("1000000000")) == (64, 10**9)
    for kind, text in (
        (processes, "257"),
        (positive_int, "9" * 13),
        (positive_int, "9" * 5000),
        (seed, "-1"),
        (seed, "1" + "0" * 30),
    ):
        with pytest.raises(argparse.ArgumentTypeError) as told:
            kind(text)
        assert len(str(told.value)) < 100


def test_what_workers_refuse_is_the_verbs_own_error():
    """An argument that cannot work is told without the number of a worker, and as the verb calls it."""
    answers = [
        {"refused": 'plan="cheapest" needs prices=, a table'},
        {"error": "no memory"},
    ]
    program = f"import sys\nfor line in {[json.dumps(answer) for answer in answers]}: print(line)"
    with Workers(1, "", argv=[sys.executable, "-c", program]) as workers:
        with pytest.raises(ConfigurationError, match=r"^plan="):
            workers.workers[0].receive(60.0)
        with pytest.raises(WorkerError, match=r"^worker 0: no memory$"):
            workers.workers[0].receive(60.0)
    parser = Parser()
    parser.add_argument("--plan")
    parser.add_argument("--prices")
    parser.add_argument("--overlap")
    assert (
        parser.words("Outer(overlap=9) is more; Outer(overlap=...) must")
        == "--overlap 9 is more; --overlap must"
    )
    assert parser.words(answers[0]["refused"]) == "--plan cheapest needs --prices, a table"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["chaos", "--peers", "1", "--faults", "join,kill"],
            "'kill' needs a peer that outlives it",
        ),
        (["join", "--state-mb", "3", "--numel", "1000000"], "--numel 1000000 takes 4 MB of state by itself"),
    ],
)
def test_what_a_benchmark_cannot_do_is_refused_before_it_begins(words, told, capsys):
    """A swarm of one whose member is to be killed; a state that is smaller than its parameters."""
    assert cli.main(["bench", *words]) == 1
    assert told in capsys.readouterr().err


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_percentile_agrees_with_median_and_extremes(values):
    """Percentiles 0, 50 and 100 are minimum, median and maximum."""
    assert percentile(values, 0) == min(values)
    assert percentile(values, 100) == max(values)
    assert percentile(values, 50) == pytest.approx(statistics.median(values), abs=1e-6)


def test_progress_is_silent_without_a_terminal(capsys):
    """No progress line where nobody watches."""
    with progress("working", total=2) as advance:
        advance(2)
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    """A terminal that notices when a text was shown on it."""

    def __init__(self, awaited: str) -> None:
        super().__init__()
        self.awaited = awaited
        self.shown = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.awaited in self.getvalue():
            self.shown.set()
        return written


def test_progress_shows_only_when_it_takes_long(monkeypatch):
    """The line appears on a terminal after the delay, and not for quick work."""
    monkeypatch.setenv("TERM", "xterm")
    quick, long = Terminal("working"), Terminal("working")
    monkeypatch.setattr(sys, "stderr", quick)
    with progress("working", total=2) as advance:
        advance(2)
    assert not quick.shown.is_set()
    monkeypatch.setattr(sys, "stderr", long)
    monkeypatch.setattr("p2pavg.bench.progress.PROGRESS_AFTER_S", 0.0)
    with progress("working", total=2) as advance:
        advance(1)
        assert long.shown.wait(10)


def test_sysctls_are_read_from_the_kernel(monkeypatch):
    """Settings that this kernel does not have are left out rather than invented."""
    monkeypatch.setattr("p2pavg.bench.machine._SYSCTLS", ("net.ipv4.tcp_rmem", "net.ipv4.no_such_setting"))
    found = tcp_sysctls()
    assert "net.ipv4.no_such_setting" not in found
    assert all(part.isdigit() for part in found.get("net.ipv4.tcp_rmem", "1").split())


def test_a_progress_line_can_move_by_the_clock(monkeypatch):
    """A measurement that takes a known time shows how much of it has passed, though nobody advances it."""
    from p2pavg.bench import progress as module

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    seen = threading.Event()
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(module, "BEAT_S", 0.01)
    monkeypatch.setattr("rich.progress.Progress.update", lambda bar, task, completed: seen.set())
    with module.progress("measuring", 5.0, by_clock=True):
        assert seen.wait(20)


def fails(args: argparse.Namespace) -> dict[str, Any]:
    raise ValueError("the swarm broke")


def interrupted(args: argparse.Namespace) -> dict[str, Any]:
    raise KeyboardInterrupt


SECTIONS = {
    "one": lambda args: {"one": 1},
    "broken": fails,
    "two": lambda args: {"two": 2},
    "stopped": interrupted,
}


def measure(*words: str, sections: Any = SECTIONS) -> int:
    parser = argparse.ArgumentParser()
    add_section_options(parser, sections)
    return emit_sections(parser.parse_args(words), sections)


def kept(path: Path) -> dict[str, Any]:
    """The figures in the file."""
    found: dict[str, Any] = json.loads(path.read_text())
    assert found.pop("environment")["cores"] >= 1
    return found


def test_an_interrupted_benchmark_keeps_what_it_has_measured(tmp_path: Path) -> None:
    """Each section is written before the next begins; what the file had of others stays."""
    path = tmp_path / "found.json"
    path.write_text(json.dumps({"stopped": 3, "environment": {}}))
    with pytest.raises(KeyboardInterrupt):
        measure("--json", str(path), "--only", "one", "stopped", "two")
    assert kept(path) == {"stopped": 3, "one": 1}


def test_a_section_that_fails_is_reported_and_the_next_one_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code says so, and the reason stands in the file until the section is measured."""
    path = tmp_path / "found.json"
    assert measure("--json", str(path), "--only", "one", "broken", "two") == 1
    assert kept(path) == {"one": 1, "two": 2, "failed": {"broken": "ValueError: the swarm broke"}}
    assert "broken: failed: ValueError: the swarm broke" in capsys.readouterr().out
    assert measure("--json", str(path), "--only", "two") == 0
    assert kept(path)["failed"] == {"broken": "ValueError: the swarm broke"}
    mended = {**SECTIONS, "broken": lambda args: {"broken": 4}}
    assert measure("--json", str(path), "--only", "broken", sections=mended) == 0
    assert kept(path) == {"one": 1, "two": 2, "broken": 4}


def test_with_a_dash_stdout_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    """However many sections there are."""
    assert measure("--json", "-", "--only", "one", "broken", "two") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["one"], found["two"], list(found["failed"])) == (1, 2, ["broken"])
