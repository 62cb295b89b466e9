"""From the members of a group to the plan of a round: flat or two levels, whatever is faster or
cheaper; an all-gather where contributions are sparse. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from p2pavg import codecs
from p2pavg.allreduce.levels import Swaps, sized, trees
from p2pavg.allreduce.loads import Capacity, loads, measured
from p2pavg.codecs import Codec
from p2pavg.plan import MOST_FLAT, MOST_GATHERED, MOST_MEMBERS, Plan
from p2pavg.plan.part import Part

F64 = npt.NDArray[np.float64]

_WORTH = 0.9  # two levels are chosen when they take at most so much of a flat plan's time
_OVERHEAD_S = 0.02  # of the second stage, besides its round trip
_GB = 1e9

Prices = Mapping[tuple[int, int], float]  # dollars for 1e9 bytes from one group of members to another


class Topology(StrEnum):
    """What a user may ask for."""

    AUTO = "auto"  # whatever is predicted to be faster
    FLAT = "flat"
    TWO_LEVEL = "two-level"  # where there are regions with several members
    CHEAPEST = "cheapest"


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan, and what it is predicted to take."""

    plan: Plan
    seconds: float | None  # of its transfer; None: nothing was measured
    dollars: float = 0.0  # for what it sends between groups


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Dollars that a round's gradients cost by its plan, and would have cost with a flat one."""

    dollars: float
    flat_dollars: float


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What a plan follows from."""

    numel: int
    nbytes: int  # of the encoded vector
    members: Sequence[Capacity]  # in rank order
    links: F64  # float64[members, members]: bytes/s from rank to rank; 0.0 where not known
    groups: Sequence[int]  # the region of each member
    near_rtt_s: float = 0.0  # the longest round trip inside a region
    far_rtt_s: float = 0.0  # the longest of all
    swaps: Swaps = Swaps.NOBODY
    prices: Prices | None = None
    votes: Sequence[bool] = ()  # of each member


def swaps_of(contribution: Codec, result: Codec) -> Swaps:
    """Who may swap partial means, which travel as results do."""
    if not codecs.is_built_in(result):
        return Swaps.NOBODY  # somebody else's codec promises equal floats of equal bytes, not the reverse
    return Swaps.ALL if contribution.wire_id == result.wire_id else Swaps.CROWDS


def gather(question: PlanInputs) -> Choice:
    """An all-gather of the voters that all others have links to, or of the first that fit; a single one has a
    flat plan.
    """
    voting = [rank for rank, votes in enumerate(question.votes) if votes]
    voters = ([rank for rank in voting if question.members[rank].owns] or voting)[:MOST_GATHERED]
    if len(voting) == 1:
        members = [replace(member, owns=rank in voters) for rank, member in enumerate(question.members)]
        return flat(replace(question, members=members))
    numel = question.numel
    plan = Plan(tuple(Part(rank, at * numel, numel) for at, rank in enumerate(voters)), gathers=True)
    known = measured(question.members, question.links)
    seconds = None
    if known is not None:
        others = len(question.members) - 1
        rates = [known.up[voters].min() / others, known.down.min() / max(1, len(voters) - 1)]
        links = known.links[voters]
        rates += [links[links > 0].min(initial=np.inf)]
        seconds = question.nbytes / float(min(rates)) + question.far_rtt_s / 2
    prices, groups = question.prices or {}, question.groups
    ways = [(groups[a], groups[b]) for a in voters for b in range(len(groups)) if a != b]
    return Choice(plan, seconds, sum(prices.get(way, 0.0) for way in ways) * question.nbytes / _GB)


def choose(topology: Topology, question: PlanInputs, level: Choice | None = None) -> Choice:
    """The plan of a round. More members than a flat one is tested with get two levels wherever there are
    regions. level: the flat one, where it is known. Raises ValueError when nobody may own a part.
    """
    if topology is Topology.TWO_LEVEL:
        return two_levels(question) or level or flat(question)
    level = level or flat(question)
    if topology is Topology.FLAT:
        return level
    stacked = two_levels(question, cheapest_homes(question) if topology is Topology.CHEAPEST else None)
    if stacked is None:
        return level
    if len(question.members) > MOST_FLAT:
        return stacked
    if topology is Topology.CHEAPEST:
        return stacked if stacked.dollars < level.dollars else level
    if stacked.seconds is None or level.seconds is None:
        return level
    return stacked if stacked.seconds <= _WORTH * level.seconds else level


def flat(question: PlanInputs) -> Choice:
    """One part for each member that owns something; all others send to it."""
    owners = [rank for rank, member in enumerate(question.members) if member.owns]
    if not owners:
        raise ValueError("no member of the group can own a part")
    plan, seconds = _sized(Plan(tuple(Part(rank, 0, 0) for rank in owners)), question)
    return Choice(plan, seconds, dollars(plan, question))


def two_levels(question: PlanInputs, homes: Collection[int] | None = None) -> Choice | None:
    """A plan over the regions; None: there are none, or they have one member each. homes: regions that may
    own parts; None: all.
    """
    owners = [rank for rank, member in enumerate(question.members) if member.owns]
    if len(question.members) > MOST_MEMBERS:
        return None
    empty = trees(question.groups, owners, homes, question.swaps)
    if empty is None:
        return None
    plan, seconds = _sized(empty, question)
    if seconds is not None:
        seconds += question.near_rtt_s + _OVERHEAD_S
    return Choice(plan, seconds, dollars(plan, question))


def _sized(empty: Plan, question: PlanInputs) -> tuple[Plan, float | None]:
    """The plan with parts of their sizes, and the seconds that it takes; None: not known."""
    plan, per_byte = sized(empty, question.numel, loads(empty, question.members, question.links))
    if per_byte is None:
        return plan, None
    seconds = question.nbytes * per_byte
    return plan, seconds + _under_way(plan, seconds, question)


def _under_way(plan: Plan, seconds: float, question: PlanInputs) -> float:
    """Seconds that the last bytes are under way, of a transfer that the rates alone let take `seconds`.

    What is reduced elsewhere comes back: while the first half of the bytes, the contributions, is still
    leaving that costs nothing more, else the rest of a second way. What is swapped goes one way.
    """
    way = question.far_rtt_s / 2
    if all(part.swaps for part in plan.parts):
        return way
    return max(way, 2 * way - seconds / 2)


def cheapest_homes(question: PlanInputs) -> set[int]:
    """The regions to which partial means, and from which results, cost least."""
    prices = question.prices or {}
    here = {question.groups[rank] for rank, member in enumerate(question.members) if member.owns}
    cost = {
        home: sum(prices.get((group, home), 0.0) + prices.get((home, group), 0.0) for group in here - {home})
        for home in here
    }
    least = min(cost.values(), default=0.0)
    return {home for home, price in cost.items() if price <= least * (1 + 1e-9)}


def cost(choice: Choice, question: PlanInputs, level: Choice | None = None) -> RoundCost | None:
    """What the choice costs; None: there are no prices. An all-gather has no flat plan to be held against.
    level: the flat one, where it is known.
    """
    if question.prices is None:
        return None
    plain = choice if choice.plan.gathers else level or flat(question)
    return RoundCost(choice.dollars, plain.dollars)


def dollars(plan: Plan, question: PlanInputs) -> float:
    """What the plan's traffic costs, contributions and results."""
    prices, groups = question.prices, question.groups
    if not prices or not question.numel:
        return 0.0
    sizes = Counter(groups)
    both = {(a, b): prices.get((a, b), 0.0) + prices.get((b, a), 0.0) for a in sizes for b in sizes}
    values: dict[tuple[int, frozenset[int]], int] = {}  # by the owner's group and those that have a deputy
    for part in plan.parts:
        way = groups[part.owner], frozenset([groups[deputy] for deputy in part.deputies])
        values[way] = values.get(way, 0) + part.count
    total = 0.0
    for (home, deputized), count in values.items():
        for group, members in sizes.items():
            across = 1 if group in deputized else members - (group == home)  # ways, as in Plan.ways
            inside = members - 1 if group in deputized else 0
            total += (across * both[group, home] + inside * both[group, group]) * count
    return total / question.numel * question.nbytes / _GB
