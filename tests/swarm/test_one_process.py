"""Several optimizers in one process, over real links."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from p2pavg import CollaborativeOptimizer
from p2pavg.report import RoundReport
from tests.unit.optim.fake_path import FakePath

pytestmark = pytest.mark.swarm

DEADLINE_S = 90.0
EPOCHS = 6


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))


def bits(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def together(work: list[Callable[[], None]]) -> None:
    """All at once; the first failure is raised."""
    failures: list[BaseException] = []

    def guarded(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(one,), daemon=True) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "a peer hangs"
    if failures:
        raise failures[0]


class Peers:
    """Two peers of one run, each with its own model, on threads of this process."""

    def __init__(self, run_id: str, nudged: bool, **options: Any) -> None:
        self.models = [net(), net()]
        self.reports: list[dict[int, RoundReport]] = [{}, {}]
        self.after: list[dict[int, torch.Tensor]] = [{}, {}]
        self.nudged = nudged
        self.opts = []
        for rank in range(2):
            self.opts.append(
                CollaborativeOptimizer(
                    torch.optim.AdamW(self.models[rank].parameters(), lr=1e-3),
                    run_id,
                    32,
                    4,
                    initial_peers=[self.opts[0].peer.address] if rank else [],
                    listen="127.0.0.1:0",
                    on_round=lambda report, rank=rank: self.reports[rank].__setitem__(report.epoch, report),
                    **options,
                )
            )

    def train(self, rank: int) -> None:
        model, opt = self.models[rank], self.opts[rank]
        seed = 0
        until = time.monotonic() + DEADLINE_S - 10
        while opt.epoch < EPOCHS and time.monotonic() < until:
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * rank + seed))
            seed += 1
            model(x).square().sum(dim=1).mean().backward()
            epoch = opt.epoch
            opt.step()
            if opt.epoch > epoch:
                self.after[rank][opt.epoch] = bits(model).clone()
                if self.nudged and rank:
                    with torch.no_grad():
                        for param in model.parameters():
                            param.copy_(torch.nextafter(param, torch.tensor(float("inf"))))
            time.sleep(0.002)
        opt.close(0.0)


@pytest.mark.parametrize("accelerator", [False, True])
def test_two_runs_of_two_peers(monkeypatch: pytest.MonkeyPatch, accelerator: bool) -> None:
    """Two runs side by side: peers of each end every epoch with equal bits, gradients on a device or not."""
    if accelerator:
        monkeypatch.setattr("p2pavg.optim.optimizer.open_cuda_path", lambda codec: lambda *place: FakePath())
    runs = [Peers("one-process-a", False), Peers("one-process-b", False)]
    together([lambda run=run, rank=rank: run.train(rank) for run in runs for rank in range(2)])
    for run in runs:
        common = run.after[0].keys() & run.after[1].keys()
        assert len(common) >= EPOCHS - 1
        for epoch in common:
            assert torch.equal(run.after[0][epoch], run.after[1][epoch]), epoch


def test_resynchronisation_over_real_links() -> None:
    """Every second round carries parameters and state uncompressed, and ends the drift of a faulty peer."""
    run = Peers("one-process-resync", True, resync_epochs=2)
    together([lambda rank=rank: run.train(rank) for rank in range(2)])
    for epoch in range(1, EPOCHS):
        here, there = run.after[0].get(epoch), run.after[1].get(epoch)
        if here is None or there is None:
            continue
        assert torch.equal(here, there) == (epoch % 2 == 0 or epoch == 1), epoch
    for reports in run.reports:
        seen = {epoch: report for epoch, report in reports.items() if len(report.members) == 2}
        assert any(epoch % 2 for epoch in seen)
        for epoch, report in seen.items():
            assert ("drift" in report.extra) == (epoch % 2 == 1), epoch
    assert any(report.extra.get("drift", 0.0) > 0 for report in run.reports[1].values())
