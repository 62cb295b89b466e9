"""Benchmarks in sections: what each one measures is kept at once."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from p2pavg.bench.result import add_section_options, emit_sections


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
