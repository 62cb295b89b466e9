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
STEP_S = 0.03
DEVICE_S = 0.06
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
        self.device.launch(DEVICE_S)
        return result


def train(
    run: str, epochs: int, first: str | None, options: dict[str, Any], device: Device
) -> list[tuple[float, RoundReport]]:
    """One peer's (time of the report, report). A step takes STEP_S at least, and more on a busy machine."""
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
        while opt.epoch < epochs:
            time.sleep(STEP_S)
            model(torch.ones(BATCH, 32)).sum().backward()
            opt.step()
            opt.zero_grad()
        return reports


ADDRESS: dict[str, list[str]] = {}
READY: dict[str, threading.Event] = {}


def two_peers(run: str, epochs: int, **options: Any) -> list[list[tuple[float, RoundReport]]]:
    """Two peers of this process, each with its own device."""
    ADDRESS[run], READY[run] = [], threading.Event()
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(train, run, epochs, None, options, Device())
        assert READY[run].wait(30)
        two = pool.submit(train, run, epochs, ADDRESS[run][0], options, Device())
        return [one.result(60), two.result(60)]


@pytest.fixture(autouse=True)
def _devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters' device is the pretended one."""
    monkeypatch.setattr(update, "synchronize", lambda optimizer: optimizer.device.synchronize(optimizer))


def check_sums(reports: list[tuple[float, RoundReport]]) -> list[RoundReport]:
    """Phases add up to each epoch within 2%, and the epochs to what passed on our clock. This one may be read
    a
    little late where other programs run: hence one comparison over all epochs.
    """
    checked = []
    for (_, first), (_, report) in pairwise(reports):
        if report.epoch != first.epoch + 1 or not report.members:
            continue
        assert phases(report) == pytest.approx(report.seconds_total, rel=0.02)
        checked.append(report)
    assert len(checked) >= 3
    passed = reports[-1][0] - reports[0][0]
    assert sum(report.seconds_total for _, report in reports[1:]) == pytest.approx(passed, rel=0.02, abs=0.3)
    return checked


def test_phases_add_up_with_an_asynchronous_step() -> None:
    """A step that returns before the device is done is timed to its end: the update holds all of it, and the
    calculation of the next epoch none.
    """
    for reports in two_peers("phases", 7):
        for report in check_sums(reports)[1:]:
            assert report.seconds_update >= DEVICE_S
            assert report.seconds_calculation >= report.local_samples / BATCH * STEP_S
            assert report.seconds_calculation + report.seconds_update <= 1.001 * report.seconds_total
            assert not report.overlapped


def test_phases_add_up_when_updates_are_delayed() -> None:
    """Delayed updates say that they overlap, by how much, and the rest still adds up to the wall clock."""
    for reports in two_peers("delayed", 8, delay_updates=True):
        delayed = [report for report in check_sums(reports) if report.epoch >= 2]
        for report in delayed:
            assert report.overlapped
            assert report.seconds_overlapped > 0
            assert report.seconds_calculation <= report.seconds_total * 1.001
        computed = sum(report.seconds_calculation for report in delayed)
        assert computed >= 0.75 * sum(report.local_samples for report in delayed) / BATCH * STEP_S
