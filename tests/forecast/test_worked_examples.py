"""The worked examples of docs/forecast.md: what they show is what the command prints."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from p2pavg.cli import main
from tests.forecast.swarms import reports
from tests.forecast.test_forecast_cli import OFFERS

PAGE = (Path(__file__).parents[2] / "docs" / "forecast.md").read_text()
EXAMPLES = re.findall(r"```text\n\$ p2pavg (.*)\n((?:.*\n)+?)```", PAGE)
TRACE = re.findall(r"```text\n(seconds,offer,count\n(?:.*\n)+?)```", PAGE)[0]


def test_there_are_three_examples() -> None:
    """One of each question: does a peer pay, what to rent, and what when offers come and go."""
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize(("command", "printed"), EXAMPLES)
def test_an_example_prints_what_the_page_shows(
    command: str,
    printed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Four T4 in two regions, 100 ms apart, and an inventory with one region more."""
    monkeypatch.chdir(tmp_path)
    told = [replace(one, device="Tesla T4") for one in reports(10, 4)]
    Path("reports.jsonl").write_text("".join(one.to_json() + "\n" for one in told))
    Path("offers.toml").write_text(OFFERS)
    Path("trace.csv").write_text(TRACE)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == printed
