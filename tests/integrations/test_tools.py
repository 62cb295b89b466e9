"""Trainer, Accelerate and Lightning on two peers are the plain tool in one process with the same batches."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from tests.integrations import tools
from tests.integrations.processes import STEPS, run

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(200)]

NEEDED = {
    "trainer": ("transformers", "accelerate"),
    "accelerate": ("accelerate",),
    "lightning": ("lightning",),
}


@pytest.mark.parametrize(("tool", "accumulate"), [("trainer", 2), ("accelerate", 2), ("lightning", 2)])
def test_two_peers_train_like_the_tool_alone(tool: str, accumulate: int, tmp_path: Path) -> None:
    """Losses within 1e-6, the same learning rates, the same parameters, and each process joined once."""
    for name in NEEDED[tool]:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    alone = getattr(tools, f"{tool}_alone")(tmp_path, 2)
    first, second = run(getattr(tools, f"{tool}_peer"), 2, tmp_path, accumulate)
    assert len(alone.losses) == len(first.losses) == len(second.losses) == STEPS
    assert np.array_equal(first.params, second.params)
    np.testing.assert_allclose(first.params, alone.params, rtol=1e-5, atol=1e-6)
    for mine, theirs, whole in zip(first.losses, second.losses, alone.losses, strict=True):
        assert (mine + theirs) / 2 == pytest.approx(whole, rel=1e-6)
    assert first.rates == second.rates == pytest.approx(alone.rates, rel=1e-12)
    assert first.joins == second.joins == 1
