"""Reports of training on a CUDA device: kernels that still run when a call returns are timed to their end."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
import torch

from p2pavg import CollaborativeOptimizer, RoundReport

pytestmark = pytest.mark.gpu

CYCLES = 200_000_000  # of the device's clock: about a tenth of a second


class SlowSGD(torch.optim.SGD):
    """A step whose kernels run on for long after it has returned."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        torch.cuda._sleep(CYCLES)
        return result


def timed() -> float:
    """Seconds of the kernel alone."""
    torch.cuda.synchronize()
    begun = time.monotonic()
    torch.cuda._sleep(CYCLES)
    torch.cuda.synchronize()
    return time.monotonic() - begun


def test_kernels_of_the_step_are_in_the_update() -> None:
    """The update holds all of an asynchronous step, the phases add up to the wall clock within 2%, and what
    the device holds is told.
    """
    kernel = min(timed() for _ in range(3))
    model = torch.nn.Linear(64, 64).cuda()
    reports: list[tuple[float, RoundReport]] = []
    with CollaborativeOptimizer(
        SlowSGD(model.parameters(), lr=1e-3),
        run_id="gpu-report",
        target_batch_size=16,
        batch_size_per_step=4,
        initial_peers=[],
        listen="127.0.0.1:0",
        on_round=lambda report: reports.append((time.monotonic(), report)),
    ) as opt:
        while opt.epoch < 6:
            time.sleep(0.02)
            model(torch.ones(4, 64, device="cuda")).sum().backward()
            opt.step()
            opt.zero_grad()
    for (before, _), (after, report) in list(pairwise(reports))[1:]:
        assert report.seconds_update >= 0.95 * kernel
        assert report.seconds_calculation < 4 * 0.02 + kernel / 2
        parts = report.seconds_calculation + report.seconds_communication + report.seconds_update
        assert parts == pytest.approx(report.seconds_total, rel=0.02)
        assert report.seconds_total == pytest.approx(after - before, rel=0.02, abs=0.005)
        assert report.memory.device >= report.memory.device_peak >= 64 * 64 * 4
