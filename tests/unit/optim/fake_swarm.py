"""A swarm without a network: the threads of one process average through shared memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from p2pavg import codecs
from p2pavg.allreduce.encoded import EncodedResult, Layout
from p2pavg.plan.part import Part
from p2pavg.rounds.protocol.roles import Generation
from p2pavg.rounds.training import Average, Contribution, Heal, KeepGoing, Outcome, TrainingSpec

DEADLINE_S = 60.0


CHUNK = 1 << 14


def encoded(vector: np.ndarray, name: str) -> EncodedResult:
    """An encoded vector, decoded by everybody from the same bytes."""
    codec = codecs.get(name)
    layout = Layout((Part(0, 0, len(vector)),), CHUNK, codec)
    body, at = np.zeros(layout.nbytes, dtype=np.uint8), 0
    for start, count in layout.chunks():
        size = codec.encoded_size(count)
        codec.encode(vector[start : start + count], body[at : at + size], 1.0)
        at += size
    return EncodedResult(layout, body)


def mean_of(contribution: Contribution, codec: str) -> np.ndarray:
    """float32[numel]: what a member brings; one on an accelerator comes through the codec."""
    gradient = contribution.gradient
    assert gradient is not None
    if isinstance(gradient, np.ndarray):
        return gradient * np.float32(contribution.scale)
    numel = gradient.vector.numel()  # type: ignore[attr-defined]
    encoding = gradient.encode(codecs.get(codec), [(0, numel)], CHUNK, contribution.scale)
    assert encoding.finite()
    out = np.empty(numel, np.float32)
    EncodedResult(Layout((Part(0, 0, numel),), CHUNK, codecs.get(codec)), encoding.data).decode_into(out)
    return out


class FakeSwarm:
    """Waits for every member at the end of an epoch, except those in `late`, which apply it afterwards."""

    def __init__(self, members: int) -> None:
        self.condition = threading.Condition()
        self.members = members
        self.joined: list[FakeTraining] = []
        self.late: set[int] = set()
        self.rounds = 0
        self.waiting: dict[int, Contribution] = {}
        self.discarded: list[tuple[int, str]] = []
        self.before_arrival: Callable[[], None] = lambda: None

    def peer(self, *args: Any, **kwargs: Any) -> FakePeer:
        return FakePeer(self)

    def total(self) -> int:
        return sum(member.counted for member in self.joined)

    def average(self) -> None:
        """Called with the condition held, when everybody who takes part is waiting."""
        weights = {rank: c.samples for rank, c in self.waiting.items() if c.gradient is not None}
        spec = self.joined[0].spec
        exact = spec.exact(self.rounds)
        codec = "none" if exact else spec.compression
        mean = np.zeros(exact or spec.numel, dtype=np.float32)
        for rank, weight in weights.items():
            share = np.float32(weight / sum(weights.values()))
            mean += share * mean_of(self.waiting[rank], codec)
        result = encoded(mean, codec)
        note = self.waiting[min(self.waiting)].note
        for rank, member in enumerate(self.joined):
            late = rank not in self.waiting
            average = Average(self.rounds, sum(weights.values()), len(self.joined), late, result, note)
            member.outcomes.append(average)
            if not late:
                member.counted -= self.waiting[rank].samples
        self.waiting.clear()
        self.rounds += 1
        self.condition.notify_all()


class FakePeer:
    def __init__(self, swarm: FakeSwarm) -> None:
        self.swarm = swarm
        self.closed = False
        self.peers: Mapping[bytes, Any] = {}
        self.address = "fake:0"
        self.peer_id = bytes(20)

    def start(self) -> FakePeer:
        return self

    def training(self, spec: TrainingSpec) -> FakeTraining:
        with self.swarm.condition:
            training = FakeTraining(self.swarm, spec, len(self.swarm.joined))
            self.swarm.joined.append(training)
            self.swarm.condition.notify_all()
        return training

    def wait_for_peers(self, count: int = 1) -> int:
        return len(self.swarm.joined) - 1

    def close(self) -> None:
        self.closed = True


class FakeTraining:
    last_report = None

    def __init__(self, swarm: FakeSwarm, spec: TrainingSpec, rank: int) -> None:
        self.swarm, self.spec, self.rank = swarm, spec, rank
        self.epoch = 0 if spec.start is None else spec.start.epoch
        self.counted = 0
        self.outcomes: list[Outcome] = []
        self.seen: list[Outcome] = []
        self.extra: dict[str, float] = {}
        self.leads = rank == 0

    def count(self, samples: int) -> bool:
        with self.swarm.condition:
            self.counted += samples
            return bool(self.outcomes) or self.swarm.total() >= self.spec.target_batch_size

    @property
    def standing(self) -> tuple[int, bytes]:
        return self.epoch, b"lineage"

    def history(self) -> tuple[Generation, ...]:
        return ()

    catching_up = False

    def samples(self) -> int:
        return self.counted

    def claimed(self) -> None:
        """Nobody else draws."""

    def arrive(self, contribution: Contribution) -> Outcome:
        swarm = self.swarm
        if contribution.samples:
            swarm.before_arrival()
        with swarm.condition:
            if not self.outcomes and (contribution.samples or swarm.total() >= self.spec.target_batch_size):
                swarm.waiting[self.rank] = contribution
                swarm.condition.notify_all()
                expected = set(range(swarm.members)) - swarm.late
                if set(swarm.waiting) >= expected:
                    swarm.average()
                elif not swarm.condition.wait_for(lambda: bool(self.outcomes), DEADLINE_S):
                    raise AssertionError("the round did not finish")
            outcome = self.outcomes.pop(0) if self.outcomes else KeepGoing()
            self.seen.append(outcome)
            return outcome

    def leave(self, contribution: Contribution, notice_s: float) -> Outcome:
        return KeepGoing()

    @contextmanager
    def applying(self) -> Iterator[None]:
        yield

    def applied(
        self, seconds_update: float, *, extra: Mapping[str, float] | None = None, waited: float | None = None
    ) -> None:
        last = self.seen[-1]
        if isinstance(last, Heal):
            self.counted = 0
            self.epoch = last.state.epoch
        else:
            self.epoch += 1
        self.extra = dict(extra or {})

    def unaveraged(self) -> int:
        """No contribution is under way."""
        return self.counted

    def refused(self, samples: int, why: str) -> None:
        self.swarm.discarded.append((samples, why))

    def discard(self, why: str, since: int = 0) -> None:
        with self.swarm.condition:
            self.swarm.discarded.append((self.counted - since, why))
            self.counted = since
