"""A plan: who sends what to whom in a round, as data. Pure.

Each part of the vector has a tree. Its root is the part's owner, the members are its nodes, and a member's
parent is the owner or the deputy of the member's own group. Contributions climb the tree: who has children
adds up what they contribute and its own, in float32; a deputy sends the mean of it on, encoded as results
are, and its parent weighs that with the weights of all it holds; the owner encodes the result. The very
bytes of the result go down the same tree. So there are at most two stages in which something is reduced:

- stage 0, member to deputy, or to an owner without a deputy between: a contribution in its own codec;
- stage 1, deputy to owner: a partial mean.

Where a part is swapped, its owner and its only deputy are peers: each sends the other the encoded mean of its
own side, and makes the result of the two encoded means, the owner's first, its own as the other has it. So
both have the same bits, a part crosses once instead of there and back, and each gives the result to its own
side.

A flat butterfly has no deputies. In a two-level plan the groups are regions: of each part one contribution
leaves a region, and one result comes in, however many members the region has.

In an all-gather nothing is reduced on the way: a voter owns a part as long as the vector, which holds its
own contribution, encoded. All members get all parts, and sum them up in rank order. What has no weight is not
sent: everybody knows that it is zeros.

Start at `Plan`; `part` is a slice of the vector with its tree. May import errors alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from p2pavg.plan.part import Part

STAGES = 2  # in which something is reduced, at most
MOST_MEMBERS, MOST_PARTS = 64, 256  # of a plan with deputies
MOST_FLAT = 32  # members of a flat plan: more are not tested, and told so
MOST_GATHERED = 12  # voters of an all-gather: each sends its contribution to all others


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts of a round, in order, and the group of each member."""

    parts: tuple[Part, ...]  # ordered by start, covering the vector exactly; one owner may own several
    groups: tuple[int, ...] = ()  # by rank, any numbers; none: there are no deputies
    gathers: bool = False  # an all-gather: the parts, all equally long, are contributions, one of each voter

    @property
    def numel(self) -> int:
        """Values of the vector."""
        return self.parts[0].count if self.gathers else sum(part.count for part in self.parts)

    def parent(self, part: int, rank: int) -> int | None:
        """To whom `rank` sends its contribution to this part, and from whom it gets the result. None: it
        makes the result, as it owns the part or swaps.
        """
        facts = self.parts[part]
        if rank == facts.owner or (facts.swaps and rank in facts.deputies):
            return None
        if facts.deputies and rank not in facts.deputies:
            for deputy in facts.deputies:
                if self.groups[deputy] == self.groups[rank]:
                    return deputy
        return facts.owner

    def partner(self, part: int, rank: int) -> int | None:
        """The other one of the two that swap partial means of this part; None: `rank` is neither."""
        facts = self.parts[part]
        if not facts.swaps or rank not in (facts.owner, *facts.deputies):
            return None
        return facts.deputies[0] if rank == facts.owner else facts.owner

    def receiver(self, part: int, rank: int) -> int | None:
        """To whom `rank` sends what it contributes to this part, or adds up; None: to nobody."""
        parent = self.parent(part, rank)
        return self.partner(part, rank) if parent is None else parent

    def children(self, part: int, rank: int, members: int) -> tuple[int, ...]:
        """Those of `members` ranks whose parent is `rank`. They start with the next one, so that members do
        not all begin with the same one.
        """
        if not self.reduces(part, rank):
            return ()
        following = (*range(rank + 1, members), *range(rank))
        if not self.parts[part].deputies:
            return following
        return tuple(other for other in following if self.parent(part, other) == rank)

    def ways(self, part: int, members: int) -> Iterator[tuple[int, int]]:
        """Pairs of ranks between which values of this part go in both directions: contributions and results,
        or two partial means.
        """
        owner = self.parts[part].owner
        for rank in range(members):
            if rank != owner:
                parent = self.parent(part, rank)
                yield rank, owner if parent is None else parent

    def reduces(self, part: int, rank: int) -> bool:
        """Whether it adds up contributions to this part: it owns it, or is a deputy."""
        facts = self.parts[part]
        return rank == facts.owner or rank in facts.deputies

    @property
    def kind(self) -> str:
        """As reports name it."""
        if self.gathers:
            return "all-gather"
        return "two-level" if any(part.deputies for part in self.parts) else "flat"

    def takes(self, rank: int) -> bool:
        """Whether it has room for a contribution of `rank`: an all-gather has none for more than so many."""
        return not self.gathers or any(part.owner == rank for part in self.parts)

    def sends_partial(self, part: int, rank: int) -> bool:
        """Whether what it sends to its receiver is a partial mean."""
        facts = self.parts[part]
        return rank in facts.deputies or (facts.swaps and rank == facts.owner)

    def weight(self, part: int, rank: int, weights: Sequence[float]) -> float:
        """Of what `rank` sends to its receiver, or divides by as an owner that does not swap: its own weight
        and all below, added up in rank order, as all who need it must get the same.
        """
        facts = self.parts[part]
        if self.gathers:
            return weights[rank] if rank == facts.owner else 0.0
        if rank == facts.owner and not facts.swaps:
            return float(sum(weights))
        if not self.reduces(part, rank):
            return weights[rank]
        below = {rank, *self.children(part, rank, len(weights))}
        return float(sum(weight for other, weight in enumerate(weights) if other in below))

    def neighbours(self, rank: int, members: int) -> frozenset[int]:
        """Ranks with which `rank` exchanges something: it needs a link to each."""
        found: set[int] = set()
        for part in range(len(self.parts)):
            receiver = self.receiver(part, rank)
            if receiver is not None:
                found.add(receiver)
            if len(found) < members - 1:
                found.update(self.children(part, rank, members))
        return frozenset(found)

    def stage(self, sender: int, receiver: int) -> int:
        """The last stage in which `sender` contributes to a part at `receiver`."""
        partial = any(
            self.sends_partial(index, sender) and self.receiver(index, sender) == receiver
            for index in range(len(self.parts))
        )
        return STAGES - 1 if partial else 0

    def passes_on(self, sender: int, receiver: int) -> bool:
        """Whether `sender` gives `receiver` results that it has from an owner itself."""
        return any(
            sender in part.deputies and not part.swaps and self.parent(index, receiver) == sender
            for index, part in enumerate(self.parts)
        )

    def partial_givers(self, rank: int) -> frozenset[int]:
        """Who sends `rank` partial means."""
        found: set[int] = set()
        for part in self.parts:
            if part.owner == rank:
                found.update(part.deputies)
            elif part.swaps and rank in part.deputies:
                found.add(part.owner)
        return frozenset(found)

    def above(self, rank: int) -> frozenset[int]:
        """From whom it has results that it passes on."""
        return frozenset(part.owner for part in self.parts if rank in part.deputies and not part.swaps)

    def why_not(self, voters: Sequence[bool]) -> str | None:
        """What is wrong with it for members of whom these vote; None: nothing."""
        members, at = len(voters), 0
        if self.gathers and (why := self._why_not_gathered()) is not None:
            return why
        deputized = any(part.deputies for part in self.parts)
        if deputized and len(self.groups) != members:
            return "a plan with deputies names the group of each member"
        if deputized and (members > MOST_MEMBERS or len(self.parts) > MOST_PARTS):
            return f"a plan with deputies has at most {MOST_MEMBERS} members and {MOST_PARTS} parts"
        for part in self.parts:
            reducing = (part.owner, *part.deputies)
            if part.start != at or part.count < 0:
                return "the parts do not follow each other"
            if any(not 0 <= rank < members or not voters[rank] for rank in reducing):
                return "an owner or deputy is no voter"
            if part.deputies and len({self.groups[rank] for rank in reducing}) != len(reducing):
                return "a group has two that reduce the same part"
            if part.swaps and len(part.deputies) != 1:
                return "a part that is swapped has one deputy"
            at += part.count
        return None

    def _why_not_gathered(self) -> str | None:
        owners = sorted(part.owner for part in self.parts)
        if not owners or len(owners) > MOST_GATHERED:
            return f"an all-gather has 1 to {MOST_GATHERED} parts"
        if len(set(owners)) != len(owners):
            return "an all-gather has two parts of one member"
        if len({part.count for part in self.parts}) > 1 or any(
            part.deputies or part.swaps for part in self.parts
        ):
            return "the parts of an all-gather are equally long, and have no deputies"
        return None
