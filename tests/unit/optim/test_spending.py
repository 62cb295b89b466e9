"""`max_egress_usd_per_hour`: which values and which other options it goes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from p2pavg.errors import ConfigurationError
from p2pavg.optim.training_options import TrainingOptions


def options(target: int | str = 8, **given: Any) -> TrainingOptions:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    return TrainingOptions(optimizer, "spending", target, 4, **given)


def test_it_needs_a_table_of_prices(tmp_path: Path) -> None:
    """Without one nobody knows what a round costs."""
    table = tmp_path / "prices.toml"
    table.write_text("[gb]\nworld = 0.1\n")
    assert options(max_egress_usd_per_hour=0.5, prices=table).max_egress_usd_per_hour == 0.5
    with pytest.raises(ConfigurationError, match="cannot read the price table"):
        options(max_egress_usd_per_hour=0.5, prices=tmp_path / "other.toml")
    with pytest.raises(ConfigurationError, match="needs prices="):
        options(max_egress_usd_per_hour=0.5)


@pytest.mark.parametrize("value", [0, -1, True, "1", float("inf"), float("nan")])
def test_it_is_a_number_of_dollars(value: object) -> None:
    """Zero would be a run that never averages."""
    with pytest.raises(ConfigurationError, match=r"a number (of dollars from 0.000001|or None)"):
        options(max_egress_usd_per_hour=value, prices="prices.toml")


def test_it_does_not_go_with_lockstep() -> None:
    """There every step is an epoch, which cannot count more."""
    with pytest.raises(ConfigurationError, match="max_egress_usd_per_hour does not go with"):
        options("step", max_egress_usd_per_hour=0.5, prices="prices.toml")
