"""A run that shares its data out, and resumes with another number of peers: it trains as if undisturbed."""

from __future__ import annotations

import threading
from collections import Counter
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from p2pavg import CollaborativeOptimizer, SwarmSampler
from p2pavg.data.permutation import EvenBlocks
from p2pavg.report import RoundReport

pytestmark = pytest.mark.swarm

LENGTH, BLOCK, TARGET, HALF, WHOLE = 240, 8, 48, 7, 15  # of the data, its blocks, an epoch; epochs
DEADLINE_S = 60.0

generator = torch.Generator().manual_seed(5)
INPUTS = torch.randn(LENGTH, 6, generator=generator)
OUTPUTS = (INPUTS @ torch.randn(6, 1, generator=generator)).tanh()


def model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    made = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    return made, torch.optim.AdamW(made.parameters(), lr=2e-2)


def summed(made: nn.Module, indices: torch.Tensor) -> torch.Tensor:
    return (made(INPUTS[indices]) - OUTPUTS[indices]).square().sum()


def of_all(made: nn.Module) -> float:
    with torch.no_grad():
        return float(summed(made, torch.arange(LENGTH))) / LENGTH


class Peer(threading.Thread):
    """A peer on a thread of this process, until an epoch; `losses` of all the data, by epoch, and the epochs
    whose parameters each sample's gradients were `computed` on.
    """

    def __init__(self, address: str | None, saved: dict[str, Any] | None, batch: int, until: int) -> None:
        super().__init__(daemon=True)
        self.ready = threading.Event()
        self.ended = threading.Event()
        self.losses: dict[int, float] = {}
        self.reports: dict[int, RoundReport] = {}
        self.computed: list[tuple[int, int]] = []  # (sample, epoch)
        self.saved: dict[str, Any] = {}
        self.failure: BaseException | None = None
        self._address, self._state, self._batch, self._until = address, saved, batch, until

    def run(self) -> None:
        try:
            self._train()
        except BaseException as error:
            self.failure = error
        finally:
            self.ready.set()
            self.ended.set()

    def _train(self) -> None:
        made, inner = model()
        if self._state is not None:
            made.load_state_dict(self._state["model"])
        sampler = SwarmSampler(LENGTH, seed=11, block=BLOCK)
        with CollaborativeOptimizer(
            inner,
            "resumed data",
            TARGET,
            self._batch,
            initial_peers=[self._address] if self._address else [],
            listen="127.0.0.1:0",
            compression="none",
            loss_reduction="sum",
            sampler=sampler,
            on_round=lambda report: self.reports.update({report.epoch: report}),
        ) as opt:
            if self._state is not None:
                opt.load_state_dict(self._state["run"])
            self.address = opt.peer.address
            self.ready.set()
            wait = threading.Event()
            while opt.epoch < self._until:
                for batch in DataLoader(range(LENGTH), sampler=sampler, batch_size=self._batch):
                    wait.wait(0.002)
                    summed(made, batch).backward()
                    self.computed += [(index, opt.epoch) for index in batch.tolist()]
                    opt.step(batch_size=len(batch))
                    opt.zero_grad()
                    if opt.stepped:
                        self.losses[opt.epoch] = of_all(made)
                    if opt.epoch >= self._until:
                        break
            self.saved = {"model": deepcopy(made.state_dict()), "run": deepcopy(opt.state_dict())}
            _ = opt.last_report


def trained(peers: int, saved: dict[str, Any] | None, batch: int, until: int) -> Peer:
    """The first of so many peers, after all reached the epoch, with what the others tell."""
    first = Peer(None, saved, batch, until)
    first.start()
    assert first.ready.wait(DEADLINE_S)
    others = [Peer(first.address, None, batch, until) for _ in range(peers - 1)]
    for each in others:
        each.start()
    for each in (first, *others):
        assert each.ended.wait(DEADLINE_S)
        assert each.failure is None, each.failure
    for each in others:
        first.reports = {**each.reports, **first.reports}  # of those, some may miss an epoch
        first.computed += each.computed
    return first


@pytest.mark.timeout(200)
def test_the_loss_is_that_of_an_undisturbed_run() -> None:
    """Two peers, then three from their checkpoint, with other batches: the loss after each epoch is that of
    one process that never stopped and takes the blocks in the same order, within 1e-5. Samples of a peer
    that got no processor for long count in the next epoch, with the gradients that it had.
    """
    begun = trained(2, None, 4, HALF)
    resumed = trained(3, begun.saved, 6, WHOLE)
    reports = {**resumed.reports, **{e: r for e, r in begun.reports.items() if e < HALF}}
    losses = {**resumed.losses, **{e: loss for e, loss in begun.losses.items() if e <= HALF}}
    computed: dict[int, list[int]] = {index: [] for index in range(LENGTH)}
    for index, at in sorted(begun.computed + resumed.computed, key=lambda each: each[1]):
        computed[index].append(at)
    blocks = EvenBlocks(LENGTH, BLOCK, seed=11)
    alone, inner = model()
    positions: list[int] = []
    was: list[nn.Module] = []
    for epoch in range(WHOLE):
        was.append(deepcopy(alone))
        taken = [n * LENGTH + at for n, a, b in reports[epoch].consumed for at in range(a, b)]
        on: dict[int, list[int]] = {}
        for index, times in Counter(map(blocks.index, taken)).items():  # two of two passes
            last = [at for at in computed[index] if at <= epoch][-times:]
            assert len(last) == times, epoch
            for at in last:
                on.setdefault(at, []).append(index)
        inner.zero_grad()
        for at, drawn in on.items():
            indices = torch.tensor(drawn)
            grads = torch.autograd.grad(summed(was[at], indices) / len(taken), list(was[at].parameters()))
            for parameter, grad in zip(alone.parameters(), grads, strict=True):
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        inner.step()
        if epoch + 1 in losses:  # else the peer came to a boundary only after the next one
            assert losses[epoch + 1] == pytest.approx(of_all(alone), abs=1e-5), epoch
        positions += taken
    assert len(losses) > WHOLE - 5
    assert len(set(positions)) == len(positions)
    assert of_all(alone) < 0.5 * losses[1]
