"""From what the members of a group can move, and where they are, to the plan of a round."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from p2pavg.allreduce.choosing import Choice, PlanInputs, RoundCost, Topology, choose, cost, flat, gather
from p2pavg.allreduce.levels import Swaps
from p2pavg.allreduce.loads import Capacity
from p2pavg.allreduce.regions import NEAR_RTT_S, region_of, regions
from p2pavg.allreduce.unmeasured import assumed
from p2pavg.identity import short_id
from p2pavg.plan import MOST_FLAT, MOST_GATHERED, Plan
from p2pavg.rounds.machine.rules.spacing import Spacing
from p2pavg.rounds.protocol.ballot import PeerId
from p2pavg.rounds.protocol.roles import PlanMember

F64 = npt.NDArray[np.float64]

logger = logging.getLogger("p2pavg.rounds")


class Planner:
    """Plans rounds, and remembers what the last one costs."""

    def __init__(
        self,
        numel: Callable[[], int],
        nbytes: Callable[[int], int],
        topology: Topology = Topology.AUTO,
        prices: Callable[[str, str], float] | None = None,
        gathers: bool = False,
        egress_usd_per_hour: float = math.inf,
        swaps: Swaps = Swaps.NOBODY,
    ) -> None:
        """egress_usd_per_hour: the most that rounds may cost. gathers: contributions are exchanged, not
        reduced. numel: values of the vector that is averaged next. nbytes: of so many values, encoded.
        prices: dollars for 1e9 bytes from one region to another, by their names; None: not known.
        """
        self._numel = numel
        self._nbytes = nbytes
        self._topology = topology
        self._prices = None if prices is None else functools.cache(prices)
        self._gathers = gathers
        self._egress_usd_per_hour = egress_usd_per_hour
        self._swaps = swaps
        self.cost: RoundCost | None = None  # of the round that was planned last
        self._asked: tuple[int, int, list[PlanMember]] | None = None
        self._answer: tuple[Choice, RoundCost | None]
        self._left_out = frozenset[PeerId]()
        self._crowd_told = False

    def __call__(self, members: Sequence[PlanMember]) -> Plan:
        """The plan. members: in rank order."""
        choice, self.cost = self._decide(members)
        if self._gathers:
            self._tell_left_out(members, choice.plan)
        else:
            self._tell_crowd(len(members), choice.plan)
        return choice.plan

    def spacing(self, members: Sequence[PlanMember]) -> Spacing:
        """How far apart rounds of these members must be, for what they may cost. members: in rank order."""
        return Spacing(self._decide(members)[0].dollars, self._egress_usd_per_hour)

    def _decide(self, members: Sequence[PlanMember]) -> tuple[Choice, RoundCost | None]:
        """Rounds that are shorter than the time between two measurements have one answer."""
        numel = self._numel()
        asked = numel, self._nbytes(numel), list(members)
        if self._asked != asked:
            question = self._question(*asked)
            if self._gathers:
                choice, level = gather(question), None
            else:
                alone = self._topology is Topology.TWO_LEVEL and question.prices is None
                level = None if alone else flat(question)
                choice = choose(self._topology, question, level)
            self._asked, self._answer = asked, (choice, cost(choice, question, level))
        return self._answer

    def _question(self, numel: int, nbytes: int, members: Sequence[PlanMember]) -> PlanInputs:
        rates, rtts = _links(members)
        groups, near, far = _regions(members, rtts)
        return PlanInputs(
            numel,
            nbytes,
            # What a member receives says what others sent; where it is the limit, the links to it show that.
            [Capacity(m.upload_bps / 8 or None, owns=m.voter and m.owns) for m in members],
            assumed(rates, groups),
            groups,
            near,
            far,
            self._swaps,
            self._priced(members, groups),
            [m.voter for m in members],
        )

    def _tell_crowd(self, members: int, plan: Plan) -> None:
        if members > MOST_FLAT and not any(part.deputies for part in plan.parts) and not self._crowd_told:
            self._crowd_told = True
            logger.warning(
                "%d peers average with a flat plan, which is tested with %d: name their regions with "
                "region=, or train with fewer",
                members,
                MOST_FLAT,
            )

    def _tell_left_out(self, members: Sequence[PlanMember], plan: Plan) -> None:
        left = frozenset(m.peer for rank, m in enumerate(members) if m.voter and not plan.takes(rank))
        for peer in sorted(left - self._left_out):
            logger.warning(
                "the steps of peer %s do not count for now: Outer(density=) takes at most %d peers, each "
                "with links to all others; leave density out for more, or for peers that cannot be reached",
                short_id(peer),
                MOST_GATHERED,
            )
        self._left_out = left

    def _priced(
        self, members: Sequence[PlanMember], groups: Sequence[int]
    ) -> dict[tuple[int, int], float] | None:
        """Dollars for 1e9 bytes between two groups: as between the first members of both that name a
        region. Inside a region without a name nothing is known to cost.
        """
        if self._prices is None:
            return None
        names: dict[int, str] = {}
        for member, group in zip(members, groups, strict=True):
            if not names.get(group):
                names[group] = member.region
        return {
            (a, b): self._prices(names[a], names[b]) if a != b or names[a] else 0.0
            for a in names
            for b in names
        }


def _links(members: Sequence[PlanMember]) -> tuple[F64, F64]:
    """float64[members, members], both: bytes/s and seconds of a round trip from rank to rank; 0.0 where not
    measured.
    """
    n = len(members)
    rank = {member.peer: rank for rank, member in enumerate(members)}
    counts = [len(member.links) for member in members]
    known = list(itertools.chain.from_iterable(member.links.values() for member in members))
    others = itertools.chain.from_iterable(member.links for member in members)
    # In thousands of links, whose senders are mostly members; the others' are in a row that is left away.
    senders = np.fromiter(map(rank.get, others, itertools.repeat(n)), np.int64, len(known))
    places = senders, np.repeat(np.arange(n), counts)
    rates, rtts = np.zeros((2, n + 1, n))
    rates[places] = np.fromiter(map(attrgetter("bps"), known), float, len(known))
    rtts[places] = np.fromiter(map(attrgetter("rtt_s"), known), float, len(known))
    return rates[:n] / 8, rtts[:n]


def _regions(members: Sequence[PlanMember], rtts: F64) -> tuple[tuple[int, ...], float, float]:
    """The region of each member, the longest round trip inside one, and the longest of all."""
    names = [m.region for m in members]
    nameless = np.array([not region_of(name) for name in names])
    near = np.argwhere((rtts > 0) & (rtts <= NEAR_RTT_S) & (nameless | nameless[:, None])).tolist()
    groups = regions(names, {(a, b): float(rtts[a, b]) for a, b in near})
    ranks = np.array(groups)
    same = ranks == ranks[:, None]
    return groups, min(float(rtts[same].max()), NEAR_RTT_S), float(rtts.max())
