"""A swarm that shares its data out: which samples are in the averages is read off the averages themselves."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from p2pavg import CollaborativeOptimizer, Outer, SwarmSampler
from p2pavg.data.ledger import LAPSES_AFTER
from p2pavg.data.permutation import EvenBlocks
from p2pavg.errors import ConfigurationError, IncompatiblePeerError
from p2pavg.optim.sampling import SPOILED
from p2pavg.report import RoundReport
from p2pavg.rounds.protocol.roles import Generation

pytestmark = pytest.mark.swarm

LENGTH, BLOCK, BATCH, TARGET = 300, 16, 4, 40
DEADLINE_S = 100.0


class Marked(nn.Module):
    """One parameter per index: the gradient of a batch's loss is 1 at each index in it, so averages tell."""

    def __init__(self) -> None:
        super().__init__()
        self.marks = nn.Parameter(torch.zeros(LENGTH))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.marks[indices].sum()


class Trainer(threading.Thread):
    """A peer on a thread of this process. `averaged` has the indices in each average, in order."""

    def __init__(
        self, address: str | None, until: Callable[[CollaborativeOptimizer], bool], **options: Any
    ) -> None:
        super().__init__(daemon=True)
        self.ready = threading.Event()
        self.told: list[RoundReport] = []
        self.averaged: list[Counter[int]] = []
        self.history: Sequence[Generation] = ()  # the rounds that led to where it stood in the end
        self.sampler = SwarmSampler(LENGTH, seed=3, block=BLOCK)
        self.failure: BaseException | None = None
        self.vanishes = options.pop("vanishes", False)
        self.pause = options.pop("pause", 0.002)
        self.discards = options.pop("discards", False)
        self._address, self._until, self._options = address, until, options

    def run(self) -> None:
        try:
            self._train()
        except BaseException as error:
            self.failure = error
        finally:
            self.ready.set()

    def _train(self) -> None:
        model = Marked()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        sampler = self.sampler
        options = {
            "initial_peers": [self._address] if self._address else [],
            "listen": "127.0.0.1:0",
            "compression": "none",
            "loss_reduction": "sum",
            "sampler": sampler,
            "on_round": self._reported,
            **self._options,
        }
        if "outer" not in self._options:
            inner.register_step_pre_hook(self._look)  # first: results are applied while it joins
        self.opt = opt = CollaborativeOptimizer(inner, "sampled", TARGET, BATCH, **options)
        self.address = opt.peer.address
        loader = DataLoader(range(LENGTH), sampler=sampler, batch_size=BATCH)
        self.ready.set()
        wait, steps = threading.Event(), 0
        while True:
            for batch in loader:
                wait.wait(self.pause)
                model(batch).backward()
                opt.step(batch_size=len(batch))
                opt.zero_grad()
                steps += 1
                if self.discards and steps in (7, 21, 50):
                    opt.discard()
                if self._until(opt):
                    self.history = opt._training.history()
                    opt.close(0 if self.vanishes else 5)
                    return

    def _reported(self, report: RoundReport) -> None:
        self.told.append(report)

    def _look(self, inner: torch.optim.Optimizer, *_: Any) -> None:
        (marks,) = inner.param_groups[0]["params"]
        gradient = marks.grad
        counts = (gradient / gradient[gradient > 0].min()).round().int()
        seen = Counter({int(i): int(counts[i]) for i in counts.nonzero().flatten()})
        self.averaged.append(seen)


def indices_of(report: RoundReport) -> Counter[int]:
    """What a report says was consumed."""
    blocks = EvenBlocks(LENGTH, BLOCK, seed=3)
    runs = [(number * LENGTH + first, number * LENGTH + end) for number, first, end in report.consumed]
    return Counter(blocks.index(position) for run in runs for position in range(*run))


def whole(sampler: SwarmSampler) -> float:
    """How many passes are consumed without a gap."""
    consumed = sampler.draws.ledger.consumed
    return consumed[0][1] / LENGTH if consumed and consumed[0][0] == 0 else 0.0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options",
    [{}, {"delay_updates": True}, {"outer": Outer(lr=1.0, overlap=2), "compression": "fp16"}],
    ids=["waiting", "delayed", "outer"],
)
def test_each_index_is_in_one_average_per_pass(options: dict[str, Any]) -> None:
    """A peer is killed, one leaves, one joins, one discards: each index is averaged once per pass."""

    def passed(number: float) -> Callable[[CollaborativeOptimizer], bool]:
        return lambda opt: opt.last_report is not None and opt.last_report.passes >= number

    gone = threading.Event()  # of all but the first, which would leave a newcomer without a state
    # Whoever is slow keeps its leases of a pass while others are in later ones; when it is gone, they lapse.
    first = Trainer(None, lambda opt: gone.is_set() and whole(first.sampler) > 2, **options)
    first.start()
    assert first.ready.wait(DEADLINE_S)
    others = [
        Trainer(first.address, passed(1.0), vanishes=True, **options),
        Trainer(first.address, passed(1.6), **options),
        Trainer(first.address, passed(3.0), pause=0.02, discards=True, **options),
    ]
    for each in others:
        each.start()
    assert others[0].ready.wait(DEADLINE_S)
    others[0].join(DEADLINE_S)
    newcomer = Trainer(first.address, passed(3.0), **options)
    newcomer.start()
    for each in (*others, newcomer, first):
        each.join(DEADLINE_S)
        if each is newcomer:
            gone.set()
        assert not each.is_alive(), "a peer hangs"
        assert each.failure is None, each.failure
    everybody = (first, *others, newcomer)
    if "outer" not in options:  # there gradients tell what is in an average
        for each in everybody:
            assert [indices_of(report) for report in each.told] == each.averaged[: len(each.told)]
    told: dict[tuple[int, str], list[RoundReport]] = {}
    for report in (report for each in everybody for report in each.told):
        told.setdefault((report.epoch, report.lineage), []).append(report)
        assert sum(indices_of(report).values()) == report.samples, report.epoch
    # Whoever was left behind by a round, and healed, has no report of it; others have.
    survived = {generation.epoch: generation.lineage.hex() for generation in first.history}
    survived |= {report.epoch: report.lineage for report in first.told if report.epoch > max(survived)}
    consumed: Counter[int] = Counter()
    ledger = first.sampler.draws.ledger
    for epoch in range(ledger.epoch):
        report, *same = told[epoch, survived[epoch]]
        assert all(other.consumed == report.consumed for other in same), epoch
        for number, begin, end in report.consumed:
            consumed.update(range(number * LENGTH + begin, number * LENGTH + end))
    assert set(consumed.values()) == {1}
    assert consumed.keys() == {position for run in ledger.consumed for position in range(*run)}
    assert consumed.keys() >= set(range(2 * LENGTH))
    assert report.passes == pytest.approx(consumed.total() / LENGTH)


def optimizer(
    sampler: Any, run: str = "one", target: int = 8, marked: Marked | None = None, **options: Any
) -> CollaborativeOptimizer:
    inner = torch.optim.SGD((marked or Marked()).parameters(), lr=1.0)
    options = {"listen": "127.0.0.1:0", "initial_peers": [], **options}
    return CollaborativeOptimizer(inner, run, target, 4, sampler=sampler, **options)


def _wait(ready: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.01)
    return ready()


def test_peers_with_other_samplers_are_refused_by_name() -> None:
    """A sampler of another length or seed is another run: the newcomer is told what differs."""
    with optimizer(SwarmSampler(LENGTH, seed=1)) as opt:
        for other in (SwarmSampler(LENGTH + 1, seed=1), SwarmSampler(LENGTH, seed=2), None):
            with pytest.raises(IncompatiblePeerError, match="SwarmSampler"):
                optimizer(other, initial_peers=[opt.peer.address])


def test_a_sampler_draws_for_one_optimizer() -> None:
    """A second optimizer over the same sampler is refused; after close() it may have it."""
    sampler = SwarmSampler(LENGTH)
    with optimizer(sampler), pytest.raises(ConfigurationError, match="another optimizer, of run 'one'"):
        optimizer(sampler, "two")
    optimizer(sampler, "two").close()


@pytest.mark.parametrize(
    "options",
    [{}, {"delay_updates": True}, {"outer": Outer(lr=1.0, overlap=2)}],
    ids=["waiting", "delayed", "outer"],
)
def test_what_another_peer_claimed_too_is_dropped_at_once(options: dict[str, Any]) -> None:
    """A peer hears that another one claimed what it trains on: its next step drops that, not the next round,
    and the report names it. No position is consumed twice.
    """
    epochs = LAPSES_AFTER + 3
    reports: list[RoundReport] = []
    sampler = SwarmSampler(LENGTH, seed=3, block=BLOCK)
    options = {"loss_reduction": "sum", "target": 40, "on_round": reports.append, **options}
    marked = Marked()
    with optimizer(sampler, marked=marked, **options) as opt:
        for step, batch in enumerate(DataLoader(range(LENGTH), sampler=sampler, batch_size=4)):
            marked(batch).backward()
            opt.step()
            opt.zero_grad()
            if step == 4:  # 20 samples are trained, and as many positions more are in this peer's piece
                sampler.draws.heard(bytes(20), [0, 24])
            if opt.epoch == epochs:
                break
        assert _wait(lambda: len(reports) >= epochs)
    assert (SPOILED, 24) in zip(reports[0].discarded_why, reports[0].discarded_samples, strict=True)
    consumed = Counter(at for report in reports[:epochs] for _, a, b in report.consumed for at in range(a, b))
    assert set(consumed.values()) == {1}
    assert reports[0].consumed[0][1] == 24
    assert min(consumed) == 0, "nobody averaged what was claimed: the ledger gives it out, a few rounds later"


def test_a_run_goes_on_where_its_data_was() -> None:
    """state_dict() has the ledger: a run that resumes draws what no average has yet, and nothing else."""
    drawn: Counter[int] = Counter()
    saved: dict[str, Any] = {}
    for life in range(3):
        sampler = SwarmSampler(LENGTH, seed=3, block=BLOCK)
        with optimizer(sampler, "resumed", loss_reduction="sum") as opt:
            if saved:
                opt.load_state_dict(saved)
            model = opt.inner.param_groups[0]["params"][0]
            for batch in DataLoader(range(LENGTH), sampler=sampler, batch_size=4):
                model[batch].sum().backward()
                opt.step()
                drawn.update(batch.tolist())
                if opt.epoch == 13 * (life + 1):
                    break
            saved = opt.state_dict()
    assert set(drawn.values()) == {1}
    assert len(drawn) == LENGTH
