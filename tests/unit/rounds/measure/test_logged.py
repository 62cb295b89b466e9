"""Figures that a script logs."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from p2pavg.errors import ConfigurationError
from p2pavg.report import RoundReport
from p2pavg.rounds.measure.logged import MOST, Logged
from tests.unit.report.reports import report


def test_a_figure_is_the_mean_over_an_epochs_calls() -> None:
    """The next epoch begins anew."""
    logged = Logged()
    logged.add({"loss": 1.0, "accuracy": 1})
    logged.add({"loss": np.float32(3.0)})
    assert logged.take() == {"loss": 2.0, "accuracy": 1.0}
    assert logged.take() == {}


@pytest.mark.parametrize("figures", [{"loss": "high"}, {"loss": None}, {"x" * 65: 1.0}, {"loss": [1.0]}])
def test_what_is_no_figure_is_refused(figures: dict[str, object]) -> None:
    """One sentence with an example, and nothing of the call is kept."""
    logged = Logged()
    with pytest.raises(ConfigurationError, match=r"log\(loss=1\.5\)"):
        logged.add({"good": 1.0, **figures})  # type: ignore[dict-item]
    assert logged.take() == {}


def test_names_are_bounded() -> None:
    """A script that makes up a name for each call is told so."""
    logged = Logged()
    logged.add({f"figure{number}": 1.0 for number in range(MOST)})
    logged.add({"figure0": 3.0})
    with pytest.raises(ConfigurationError, match="at most"):
        logged.add({"another": 1.0})


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_breaks_no_report(loss: float) -> None:
    """JSON has no such number: there it is null, and a report comes back from it; loggers get the rest."""
    made = replace(report(), extra={"loss": loss, "accuracy": 0.5})
    data = json.loads(made.to_json())
    assert data["extra"] == {"loss": None, "accuracy": 0.5}
    back = RoundReport.from_dict(data)
    assert "extra_loss" not in back.flat()
    assert "extra_loss" not in made.flat()
    assert made.flat()["extra_accuracy"] == 0.5
