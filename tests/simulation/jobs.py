"""A simulated all-reduce attempt. A part's value is the set of contributions that really went into it, also
on the way from a deputy to the part's owner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine import events as ev

if TYPE_CHECKING:
    from tests.simulation.trainer import Node

CHUNKS = 2  # of each contribution and each result on each way
SMALL = 16  # up to so many members everything goes chunk by chunk
NOTHING = ev.RankProgress(0, 0, 0, 0)


Sums = tuple[tuple[int, Any, float], ...]  # rank, contribution and weight of each that is added up


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
        self.plan = opened.plan
        self.parts = len(opened.plan.parts)
        self.rank = self.members.index(node.me)
        count = len(self.members)
        self.parents = [self.plan.parent(part, self.rank) for part in range(self.parts)]
        self.partners = [self.plan.partner(part, self.rank) for part in range(self.parts)]
        self.children = {
            part: self.plan.children(part, self.rank, count)
            for part in range(self.parts)
            if self.plan.reduces(part, self.rank)
        }
        few = len(self.members) > SMALL or not node.swarm.chunk_seconds  # they would come together
        self.chunks = 1 if few else CHUNKS
        self.begun = False
        self.early: list[tuple[str, int, int, Any]] = []
        self.weights: tuple[float, ...] = ()
        self.contribution: tuple[Any, ...] = ()  # our samples in it
        self.contributions: dict[int, dict[int, Sums]] = {}  # by part that we reduce, and by sender
        self.due: dict[int, set[int]] = {}  # by part that we reduce: whose contribution is not here
        self.partial: dict[int, Sums] = {}  # by part that we reduce, once all below us is in
        self.swapped: dict[int, Sums] = {}  # by part: the other side's
        self.results: dict[int, Any] = {}
        self.chunks_in: dict[int, list[int]] = {}  # by rank: contributions, results
        self.done = False

    def begin(self, weights: tuple[float, ...], samples: tuple[Any, ...]) -> None:
        self.begun = True
        self.weights = weights
        node = self.node
        if weights[self.rank] > 0:
            self.contribution = samples
            node.swarm.checks.books.begins(node, self)
            value = (node.me, node.parameters.epoch, node.parameters.lineage, samples)
            if node.poison:
                node.poison = False
                value = ("poison", *value)
            own = ((self.rank, value, weights[self.rank]),)
            for part, parent in enumerate(self.parents):
                if part not in self.children:
                    assert parent is not None
                    if self._sends(self.rank, part):
                        self._send(parent, "contribution", part, own)
                elif value[0] == "poison":
                    node.swarm.world.after(0.0, self._refuse_own)
                else:
                    self.contributions.setdefault(part, {})[self.rank] = own
        for part, children in self.children.items():
            self.due[part] = {rank for rank in children if self._sends(rank, part)}
            if weights[self.rank] > 0 and part not in self.contributions:
                self.due[part].add(self.rank)  # it is poison
            if part not in self.absent():
                self._reduce(part)
        self.results |= dict.fromkeys(self.absent(), Value())
        self._finish()
        early, self.early = self.early, []
        for kind, rank, part, value in early:
            self.received(kind, rank, part, value)

    def _refuse_own(self) -> None:
        self.node.feed(ev.JobRefused(self.transfer, self.rank, "the own contribution is not finite"))

    def _send(self, rank: int, kind: str, part: int, value: Any) -> None:
        """As chunks; the last one carries the value."""
        node, swarm = self.node, self.node.swarm
        target = swarm.nodes[self.members[rank]]
        last = self.chunks - 1
        for chunk in range(self.chunks):
            carried = value if chunk == last else None
            swarm.send_data(node, target, self.transfer, kind, self.rank, part, carried)

    def received(self, kind: str, rank: int, part: int, value: Any) -> None:
        if not self.begun:
            self.early.append((kind, rank, part, value))
            return
        self.chunks_in.setdefault(rank, [0, 0])[kind == "result"] += 1
        if value is None:
            return
        if kind == "contribution":
            if value[0][1][0] == "poison":
                self.node.feed(ev.JobRefused(self.transfer, rank, "a contribution is not finite"))
                return
            if rank == self.partners[part]:
                self.swapped[part] = value
            else:
                self.contributions.setdefault(part, {})[rank] = value
                self.due[part].discard(rank)
            self._reduce(part)
        else:
            self._returned(part, value)
        self._finish()

    def absent(self) -> set[int]:
        """Parts of an all-gather that nobody sends: their owner has no weight."""
        parts = self.plan.parts if self.plan.gathers and self.weights else ()
        return {part for part, facts in enumerate(parts) if not self.weights[facts.owner]}

    def _sends(self, rank: int, part: int) -> bool:
        """Whether it contributes to this part: itself, or as a deputy of others."""
        if not self.plan.groups and not self.plan.gathers:
            return self.weights[rank] > 0
        return self.plan.weight(part, rank, self.weights) > 0

    def _reduce(self, part: int) -> None:
        """Once all that is contributed to a part is here: it goes on, or is the result; of two that swap,
        each makes the result of both.
        """
        if self.due[part] or part in self.results:
            return
        given = self.contributions.get(part, {})
        receiver = self.plan.receiver(part, self.rank)
        if part not in self.partial:
            sums = self.partial[part] = self._add_up(part, given)
            if receiver is not None and sums:
                self._send(receiver, "contribution", part, sums)
        if self.parents[part] is not None or (
            receiver is not None and self._sends(receiver, part) and part not in self.swapped
        ):
            return
        both = sorted((*self.partial[part], *self.swapped.get(part, ())))
        self._returned(part, Value((value, weight) for _, value, weight in both))

    def _add_up(self, part: int, given: Mapping[int, Sums]) -> Sums:
        """What is contributed to a part here, and who does not own it sends on."""
        return tuple(sorted(entry for entries in given.values() for entry in entries))

    def _returned(self, part: int, value: Value) -> None:
        """The result of a part is here: it goes down the tree."""
        self.results[part] = value
        for rank in self.children.get(part, ()):
            self._send(rank, "result", part, self.node.swarm.corrupted(self.node, rank, value))

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
        owed: dict[int, list[int]] = {}
        for part, children in self.children.items():
            for rank in children:
                if self._sends(rank, part):
                    owed.setdefault(rank, [0, 0])[0] += self.chunks
            partner = self.partners[part]
            if partner is not None and self._sends(partner, part):
                owed.setdefault(partner, [0, 0])[0] += self.chunks
        for part, parent in enumerate(self.parents):
            if parent is not None and part not in self.absent():
                owed.setdefault(parent, [0, 0])[1] += self.chunks
        progress = [NOTHING] * len(self.members)
        for rank in {*owed, *self.chunks_in}:
            contributions, results = self.chunks_in.get(rank, (0, 0))
            progress[rank] = ev.RankProgress(contributions, results, *owed.get(rank, (0, 0)))
        return tuple(progress)
