"""What needs a library that is not there says so before anything else, with all that is missing."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from p2pavg import cli
from p2pavg.bench.__main__ import VERBS
from p2pavg.errors import ConfigurationError
from p2pavg.extras import LIBRARIES, check_installed

ROOT = Path(__file__).parents[3]
PLOTTING = [["report", "missing.jsonl"], ["plan", "missing.toml"]]
PLOTTING += [["bench", verb.name] for verb in VERBS if verb.name != "scenario"]


def test_the_package_brings_what_the_messages_name() -> None:
    """An extra installs what pip is told to install where it is missing."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, wanted in LIBRARIES.values():
        assert wanted in extras[extra]


def test_all_that_is_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody installs one library only to hear of the next one."""
    for module in ("aiohttp", "prometheus_client"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigurationError) as caught:
        check_installed("The page needs", "aiohttp", "prometheus_client")
    assert str(caught.value) == (
        "The page needs aiohttp and prometheus-client: pip install 'aiohttp>=3.9' 'prometheus-client>=0.20', "
        "or in a clone of p2pavg pip install '.[monitor]'"
    )


@pytest.mark.parametrize("words", PLOTTING, ids=" ".join)
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Without matplotlib, in no folder, or under a name that is no picture's: nothing is measured."""
    pytest.importorskip("matplotlib")
    for name, said in (
        ("no/x.png", "does not exist; make it first"),
        ("x.docx", "is no picture"),
        ("x.png", "error: argument --plot: Plots need matplotlib: pip install "),
    ):
        if name == "x.png":
            monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(SystemExit) as ended:
            cli.main([*words, "--plot", str(tmp_path / name)])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
