"""`checkpoint_dir`: where it comes from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from p2pavg.errors import ConfigurationError
from p2pavg.optim.training_options import TrainingOptions


def options(**given: Any) -> TrainingOptions:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    return TrainingOptions(optimizer, "checkpoints", 8, 4, **given)


def test_a_launcher_names_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the script names none, the environment's counts, and checkpoint_epochs goes with that one."""
    with pytest.raises(ConfigurationError, match="checkpoint_epochs needs checkpoint_dir"):
        options(checkpoint_epochs=3)
    monkeypatch.setenv("P2PAVG_CHECKPOINTS", "/data")
    assert options(checkpoint_epochs=3).checkpoint_dir == "/data"
    assert options(checkpoint_dir="mine").checkpoint_dir == "mine"
    monkeypatch.setenv("P2PAVG_CHECKPOINTS", "")
    assert options().checkpoint_dir is None
