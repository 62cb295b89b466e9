"""A simulated all-reduce attempt. A part's value is the set of contributions that really went into it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine import events as ev

if TYPE_CHECKING:
    from tests.simulation.trainer import Node

CHUNKS = 2  # of each contribution and each result on each way
SMALL = 16  # up to so many members everything goes chunk by chunk
NOTHING = ev.RankProgress(0, 0, 0, 0)


class Value(tuple[Any, ...]):
    """What a part was reduced to: (contribution, weight) of each. Hashed once, however many hold it."""

    hashed: int | None = None

    def __hash__(self) -> int:
        if self.hashed is None:
            self.hashed = super().__hash__()
        return self.hashed


def digest(value: Value) -> bytes:
    """32 bytes that tell values apart within one process."""
    return hash(value).to_bytes(8, "big", signed=True) * 4


class Job:
    """One member's side of one transfer."""

    def __init__(self, node: Node, opened: act.OpenJob) -> None:
        self.node = node
        self.transfer = opened.transfer
        self.ballot = opened.ballot
        self.members = [seat.peer for seat in opened.members]
        self.voters = [seat.voter for seat in opened.members]
        self.owned = {part.owner: index for index, part in enumerate(opened.parts)}
        self.parts = len(opened.parts)
        self.rank = self.members.index(node.me)
        few = len(self.members) > SMALL or not node.swarm.chunk_seconds  # they would come together
        self.chunks = 1 if few else CHUNKS
        self.begun = False
        self.early: list[tuple[str, int, Any]] = []
        self.weights: tuple[float, ...] = ()
        self.contribution: tuple[Any, ...] = ()  # our samples in it
        self.contributors = 0
        self.contributions: dict[int, Any] = {}
        self.results: dict[int, Any] = {}
        self.chunks_in: dict[int, list[int]] = {}  # by rank: contributions, results
        self.done = False

    def begin(self, weights: tuple[float, ...], samples: tuple[Any, ...]) -> None:
        self.begun = True
        self.weights = weights
        self.contributors = sum(weight > 0 for weight in weights)
        node = self.node
        if weights[self.rank] > 0:
            self.contribution = samples
            node.swarm.checks.books.begins(node, self)
            value = (node.me, node.parameters.epoch, node.parameters.lineage, samples)
            if node.poison:
                node.poison = False
                value = ("poison", *value)
            for rank in self.owned:
                if rank == self.rank and value[0] == "poison":
                    node.swarm.world.after(0.0, self._refuse_own)
                elif rank == self.rank:
                    self.contributions[rank] = value
                else:
                    self._send(rank, "contribution", value)
        self._reduce()
        early, self.early = self.early, []
        for kind, rank, value in early:
            self.received(kind, rank, value)

    def _refuse_own(self) -> None:
        self.node.feed(ev.JobRefused(self.transfer, self.rank, "the own contribution is not finite"))

    def _send(self, rank: int, kind: str, value: Any) -> None:
        """As chunks; the last one carries the value."""
        node, swarm = self.node, self.node.swarm
        target = swarm.nodes[self.members[rank]]
        last = self.chunks - 1
        for chunk in range(self.chunks):
            carried = value if chunk == last else None
            swarm.send_data(node, target, self.transfer, kind, self.rank, carried)

    def received(self, kind: str, rank: int, value: Any) -> None:
        if not self.begun:
            self.early.append((kind, rank, value))
            return
        self.chunks_in.setdefault(rank, [0, 0])[kind == "result"] += 1
        if value is None:
            return
        if kind == "contribution":
            if value[0] == "poison":
                self.node.feed(ev.JobRefused(self.transfer, rank, "a contribution is not finite"))
                return
            self.contributions[rank] = value
            self._reduce()
        else:
            self.results[self.owned[rank]] = value
            self._finish()

    def _reduce(self) -> None:
        part = self.owned.get(self.rank)
        if part is not None and part not in self.results:
            if len(self.contributions) < self.contributors:
                return
            needed = [rank for rank, weight in enumerate(self.weights) if weight > 0]
            value = Value((self.contributions[rank], self.weights[rank]) for rank in needed)
            self.results[part] = value
            for rank in range(len(self.members)):
                if rank != self.rank:
                    self._send(rank, "result", self.node.swarm.corrupted(self.node, rank, value))
        self._finish()

    def _finish(self) -> None:
        if not self.done and len(self.results) == self.parts:
            self.done = True
            lag = self.node.swarm.lag(self.node)
            if lag:  # the job may be cancelled meanwhile
                self.node.world.after(lag, self.tell)
            else:
                self.tell()

    def tell(self) -> None:
        """The event loop sees that the engine is through."""
        digests = tuple(digest(self.results[part]) for part in range(self.parts))
        self.node.feed(ev.JobProgressed(self.transfer, self.progress()))
        self.node.feed(ev.JobDone(self.transfer, digests))

    def progress(self) -> tuple[ev.RankProgress, ...]:
        """Ranks that owe nothing and sent nothing share one."""
        owns = self.rank in self.owned
        progress = [NOTHING] * len(self.members)
        for rank in range(len(self.members)) if owns else sorted({*self.owned, *self.chunks_in}):
            contributions, results = self.chunks_in.get(rank, (0, 0))
            other = rank != self.rank
            progress[rank] = ev.RankProgress(
                contributions,
                results,
                self.chunks if owns and self.weights[rank] > 0 and other else 0,
                self.chunks if rank in self.owned and other else 0,
            )
        return tuple(progress)
