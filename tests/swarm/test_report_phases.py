"""Reports of real training: the phases are wall clock, and add up to the epoch."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch

from p2pavg import CollaborativeOptimizer, RoundReport
from p2pavg.optim.updates import update

BATCH = 4
LISTEN = "127.0.0.1:0"


def phases(report: RoundReport) -> float:
    return (
        report.seconds_calculation
        + report.seconds_communication
        + report.seconds_update
        - report.seconds_overlapped
    )


class Device:
    """Work that goes on after the call that asked for it has returned, as on an accelerator."""

    def __init__(self) -> None:
        self.pending: list[threading.Thread] = []

    def launch(self, seconds: float) -> None:
        work = threading.Thread(target=time.sleep, args=(seconds,))
        work.start()
        self.pending.append(work)

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        while self.pending:
            self.pending.pop().join()


class AsyncSGD(torch.optim.SGD):
    """Returns from step() while the device still works on it."""

    device: Device

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.device.launch(0.06)
        return result


def train(
    run: str, epochs: int, step_seconds: float, first: str | None, options: dict[str, Any], device: Device
) -> tuple[list[tuple[float, RoundReport]], float]:
    """One peer's (time of the report, report), and the seconds that its steps slept, by epoch on average."""
    model = torch.nn.Linear(32, 32)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.zeros_(model.bias)
    inner = AsyncSGD(model.parameters(), lr=1e-3)
    inner.device = device
    reports: list[tuple[float, RoundReport]] = []
    with CollaborativeOptimizer(
        inner,
        run_id=run,
        target_batch_size=2 * 8 * BATCH,
        batch_size_per_step=BATCH,
        initial_peers=[] if first is None else [first],
        listen=LISTEN,
        on_round=lambda report: reports.append((time.monotonic(), report)),
        **options,
    ) as opt:
        ADDRESS[run].append(opt.peer.address)
        READY[run].set()
        slept, steps = 0.0, 0
        while opt.epoch < epochs:
            begun = time.monotonic()
            time.sleep(step_seconds)
            model(torch.ones(BATCH, 32)).sum().backward()
            slept, steps = slept + time.monotonic() - begun, steps + 1
            opt.step()
            opt.zero_grad()
        return reports, slept / steps


ADDRESS: dict[str, list[str]] = {}
READY: dict[str, threading.Event] = {}


def two_peers(
    run: str, epochs: int, **options: Any
) -> tuple[list[list[tuple[float, RoundReport]]], list[float]]:
    """Two peers of this process, each with its own device."""
    ADDRESS[run], READY[run] = [], threading.Event()
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(train, run, epochs, 0.03, None, options, Device())
        assert READY[run].wait(30)
        two = pool.submit(train, run, epochs, 0.03, ADDRESS[run][0], options, Device())
        results = [one.result(60), two.result(60)]
    return [reports for reports, _ in results], [slept for _, slept in results]


@pytest.fixture(autouse=True)
def _devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters' device is the pretended one."""
    monkeypatch.setattr(update, "synchronize", lambda optimizer: optimizer.device.synchronize(optimizer))


def check_sums(reports: list[tuple[float, RoundReport]]) -> list[RoundReport]:
    """Phases add up to the epoch, and the epoch is what passed on our clock, both within 2%."""
    checked = []
    for (before, first), (after, report) in pairwise(reports):
        if report.epoch != first.epoch + 1 or not report.members:
            continue
        assert phases(report) == pytest.approx(report.seconds_total, rel=0.02)
        assert report.seconds_total == pytest.approx(after - before, rel=0.02, abs=0.005)
        checked.append(report)
    assert len(checked) >= 3
    return checked


def test_phases_add_up_with_an_asynchronous_step() -> None:
    """A step that returns before the device is done is timed to its end: the update holds all of it, and the
    calculation of the next epoch none.
    """
    for reports, step in zip(*two_peers("phases", 7), strict=True):
        for report in check_sums(reports)[1:]:
            steps = report.local_samples / BATCH
            assert report.seconds_update >= 0.06
            assert report.seconds_calculation == pytest.approx(steps * step, rel=0.15)
            assert not report.overlapped


def test_phases_add_up_when_updates_are_delayed() -> None:
    """Delayed updates say that they overlap, by how much, and the rest still adds up to the wall clock."""
    for reports, step in zip(*two_peers("delayed", 8, delay_updates=True), strict=True):
        delayed = [report for report in check_sums(reports) if report.epoch >= 2]
        for report in delayed:
            assert report.overlapped
            assert report.seconds_overlapped > 0
            assert report.seconds_calculation <= report.seconds_total * 1.001
        computed = sum(report.seconds_calculation for report in delayed)
        steps = sum(report.local_samples for report in delayed) / BATCH
        assert computed == pytest.approx(steps * step, rel=0.25)
