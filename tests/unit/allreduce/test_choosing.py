"""Which plan a round gets: flat or over regions, what it takes, what it costs."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from p2pavg import codecs
from p2pavg.allreduce.choosing import (
    PlanInputs,
    Topology,
    choose,
    dollars,
    flat,
    gather,
    swaps_of,
    two_levels,
)
from p2pavg.allreduce.levels import MOST_TREES, Swaps, trees
from p2pavg.allreduce.loads import Capacity, link_rates
from p2pavg.allreduce.regions import regions
from p2pavg.plan import MOST_GATHERED, Plan
from p2pavg.plan.part import Part

SHAPES = [(2, 2, 2, 2), (4, 4), (5, 3), (6, 1, 1)]
NUMEL = 25_000_000


def question(
    sizes: tuple[int, ...], *, lan: float = 125e6, wan: float = 1e6, numel: int = NUMEL, **more: object
) -> PlanInputs:
    """Regions of so many members; pairs of one region carry `lan` bytes/s, others `wan`."""
    groups = tuple(region for region, size in enumerate(sizes) for _ in range(size))
    pairs = itertools.permutations(range(len(groups)), 2)
    links = {(a, b): lan if groups[a] == groups[b] else wan for a, b in pairs}
    known = link_rates(len(groups), links)
    return PlanInputs(numel, 2 * numel, [Capacity()] * len(groups), known, groups, **more)  # type: ignore[arg-type]


def crossing(plan: Plan, groups: tuple[int, ...] | list[int]) -> float:
    """Elements that go from one group to another, contributions and results."""
    found = 0
    for index, part in enumerate(plan.parts):
        for rank, other in plan.ways(index, len(groups)):
            if groups[other] != groups[rank]:
                found += 2 * part.count
    return found


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_each_part_crosses_between_regions_as_seldom_as_it_can(sizes: tuple[int, ...]) -> None:
    """With R regions 2(R-1) vectors go from one to another, however many members they have; a flat plan
    is never better."""
    asked = question(sizes)
    found = two_levels(asked)
    assert found is not None
    assert found.plan.why_not([True] * sum(sizes)) is None
    assert (found.plan.kind, flat(asked).plan.kind) == ("two-level", "flat")
    assert sum(part.count for part in found.plan.parts) == NUMEL
    assert crossing(found.plan, asked.groups) == 2 * (len(sizes) - 1) * NUMEL
    assert crossing(flat(asked).plan, asked.groups) >= crossing(found.plan, asked.groups)


@pytest.mark.parametrize(
    ("sizes", "swaps", "swapped"),
    [
        ((4, 4), Swaps.CROWDS, True),
        ((5, 3), Swaps.ALL, True),
        ((5, 1), Swaps.ALL, True),
        ((5, 1), Swaps.CROWDS, False),  # the lone member's contribution takes fewer bytes than a partial mean
        ((4, 4), Swaps.NOBODY, False),
        ((2, 2, 2), Swaps.ALL, False),  # who swapped with two would send twice as much
    ],
    ids=str,
)
def test_two_regions_swap(sizes: tuple[int, ...], swaps: Swaps, swapped: bool) -> None:
    """The owners of two regions swap partial means where that takes no more bytes and gives both equal bits;
    a vector crosses each way, as without.
    """
    asked = question(sizes, swaps=swaps)
    found = two_levels(asked)
    assert found is not None
    assert found.plan.why_not([True] * sum(sizes)) is None
    assert all(part.swaps == swapped for part in found.plan.parts)
    assert sum(part.count for part in found.plan.parts) == NUMEL
    assert crossing(found.plan, asked.groups) == 2 * (len(sizes) - 1) * NUMEL
    plain = two_levels(replace(asked, swaps=Swaps.NOBODY))
    assert plain is not None
    assert plain.seconds is not None
    assert found.seconds is not None
    assert found.seconds == pytest.approx(plain.seconds, rel=0.02)


def test_who_may_swap() -> None:
    """Results of a codec of somebody else may be made by one peer alone; coarse contributions of a lone
    member stay coarse.
    """
    assert swaps_of(codecs.get("fp16"), codecs.get("fp16")) is Swaps.ALL
    assert swaps_of(codecs.get("int8"), codecs.get("fp16")) is Swaps.CROWDS
    mine = codecs.get("fp16")
    theirs = SimpleNamespace(wire_id=64)
    assert swaps_of(mine, theirs) is Swaps.NOBODY  # type: ignore[arg-type]


@pytest.mark.parametrize("numel", [100_000, NUMEL])
def test_a_swap_saves_the_way_back_where_the_bytes_do_not_fill_it(numel: int) -> None:
    """A vector that has left in less than a round trip arrives half a round trip earlier; a longer one is
    still leaving when the first results come back, and gains nothing.
    """
    asked = question((2, 2), wan=100e6, numel=numel, far_rtt_s=0.3)
    there, back = two_levels(replace(asked, swaps=Swaps.ALL)), two_levels(asked)
    assert there is not None
    assert back is not None
    assert there.seconds
    assert back.seconds
    saved = back.seconds - there.seconds
    assert saved == pytest.approx(0.15, abs=0.01) if numel == 100_000 else abs(saved) < 0.01


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (4, 4), (8, 8)], ids=str)
def test_all_members_and_pairs_of_two_regions_take_turns(sizes: tuple[int, ...]) -> None:
    """Every member reduces as much as the others, and every pair of two regions carries something."""
    asked = question(sizes)
    found = two_levels(asked)
    assert found is not None
    reduced = [0] * sum(sizes)
    pairs: dict[tuple[int, int], int] = {}
    for part in found.plan.parts:
        for deputy in part.deputies:
            reduced[deputy] += part.count
            pair = min(deputy, part.owner), max(deputy, part.owner)
            pairs[pair] = pairs.get(pair, 0) + part.count
        reduced[part.owner] += part.count
    assert max(reduced) <= 1.05 * min(reduced)
    between = [
        p for p in itertools.combinations(range(sum(sizes)), 2) if asked.groups[p[0]] != asked.groups[p[1]]
    ]
    assert set(pairs) == set(between)
    assert max(pairs.values()) <= 1.1 * min(pairs.values())


@pytest.mark.parametrize(("sizes", "times"), [((2, 2, 2, 2), 2), ((4, 4), 4), ((8, 8), 8)])
def test_between_regions_it_is_faster_by_as_much_as_they_have_members(
    sizes: tuple[int, ...], times: float
) -> None:
    """Where pairs of machines of two regions bind, m members a region make it m times faster."""
    asked = question(sizes)
    fast, slow = choose(Topology.AUTO, asked), choose(Topology.FLAT, asked)
    assert any(part.deputies for part in fast.plan.parts)
    assert fast.seconds is not None
    assert slow.seconds is not None
    assert slow.seconds >= 0.9 * times * fast.seconds


def test_where_it_does_not_pay_rounds_are_flat() -> None:
    """One region, members alone in theirs, links as fast between regions as inside, or nothing measured."""
    for asked in (
        question((8,)),
        question((1, 1, 1, 1)),
        question((2, 2), wan=125e6, lan=12.5e6),
        PlanInputs(NUMEL, 2 * NUMEL, [Capacity()] * 4, link_rates(4, {}), (0, 0, 1, 1)),
        question((2, 2), numel=1000, lan=125e6, wan=60e6),  # it takes longer to go twice than to send
    ):
        assert not any(part.deputies for part in choose(Topology.AUTO, asked).plan.parts)


@pytest.mark.parametrize("topology", [Topology.AUTO, Topology.CHEAPEST])
def test_more_than_a_flat_plan_is_tested_with_get_two_levels(topology: Topology) -> None:
    """Where there are regions, measured or not and whatever it saves; above what two levels take, and without
    regions, all plans are flat.
    """
    for sizes, kind in (((16, 16), "flat"), ((17, 16), "two-level"), ((33, 32), "flat"), ((33,), "flat")):
        groups = [region for region, size in enumerate(sizes) for _ in range(size)]
        nothing = link_rates(len(groups), {})
        asked = PlanInputs(NUMEL, 2 * NUMEL, [Capacity()] * len(groups), nothing, groups)
        assert choose(topology, asked).plan.kind == kind


def test_who_cannot_own_is_no_deputy() -> None:
    """A member that owns nothing is no deputy, and its region's others do."""
    asked = question((2, 2))
    members = [Capacity(), Capacity(), Capacity(owns=False), Capacity()]
    found = two_levels(PlanInputs(NUMEL, 2 * NUMEL, members, asked.links, asked.groups))
    assert found is not None
    assert {rank for part in found.plan.parts for rank in (part.owner, *part.deputies)} == {0, 1, 3}


def test_slow_pairs_are_left_alone() -> None:
    """Of three regions, two with a slow path between them meet at the third: it owns nearly everything."""
    groups = (0, 0, 1, 1, 2, 2)
    links = {
        (a, b): 125e6 if groups[a] == groups[b] else 1e5 if {groups[a], groups[b]} == {1, 2} else 1e7
        for a, b in itertools.permutations(range(6), 2)
    }
    found = two_levels(PlanInputs(NUMEL, 2 * NUMEL, [Capacity()] * 6, link_rates(6, links), groups))
    assert found is not None
    at_home = sum(part.count for part in found.plan.parts if groups[part.owner] == 0)
    assert at_home > 0.95 * NUMEL


def brute_force(groups: tuple[int, ...], prices: dict[tuple[int, int], float], nbytes: int) -> float:
    """The least dollars of all flat plans, and of all plans with one deputy in each other region."""
    members = [Capacity()] * len(groups)
    asked = PlanInputs(1, nbytes, members, link_rates(len(groups), {}), groups, prices=prices)
    first = {group: groups.index(group) for group in groups}
    ways = [Plan((Part(owner, 0, 1),)) for owner in range(len(groups))]
    for home in first.values():
        deputies = tuple(rank for group, rank in first.items() if group != groups[home])
        ways.append(Plan((Part(home, 0, 1, deputies),), groups))
    return min(dollars(way, asked) for way in ways)


def test_cheapest_is_as_cheap_as_any() -> None:
    """In a thousand random tables of prices and sizes of regions no home and no tree cost less."""
    dice = random.Random(1)
    for _ in range(1000):
        sizes = [dice.randint(1, 4) for _ in range(dice.randint(2, 5))]
        groups = tuple(region for region, size in enumerate(sizes) for _ in range(size))
        regions = range(len(sizes))
        prices = {
            (a, b): 0.0 if a == b else dice.choice((0.01, 0.02, 0.05, 0.08, dice.random()))
            for a in regions
            for b in regions
        }
        nothing = link_rates(len(groups), {})
        asked = PlanInputs(100_000, 200_000, [Capacity()] * len(groups), nothing, groups, prices=prices)
        asked = replace(asked, swaps=dice.choice(tuple(Swaps)))
        found = choose(Topology.CHEAPEST, asked)
        assert found.dollars <= brute_force(groups, prices, 200_000) * (1 + 1e-9)


@pytest.mark.parametrize("sizes", [(3, 2), (2, 2, 1), (1, 1)], ids=str)
def test_dollars_are_those_of_every_way(sizes: tuple[int, ...]) -> None:
    """What a plan costs is the sum over all pairs of members that exchange something, inside regions, too."""
    dice = random.Random(3)
    groups = set(question(sizes).groups)
    asked = question(sizes, prices={(a, b): dice.random() for a in groups for b in groups}, swaps=Swaps.ALL)
    assert asked.prices is not None
    for choice in (flat(asked), two_levels(asked), two_levels(asked, {0})):
        if choice is None:
            continue
        total = 0.0
        for index, part in enumerate(choice.plan.parts):
            for pair in choice.plan.ways(index, sum(sizes)):
                a, b = (asked.groups[rank] for rank in pair)
                total += (asked.prices[a, b] + asked.prices[b, a]) * part.count / NUMEL
        assert choice.dollars == pytest.approx(total * asked.nbytes / 1e9)


@pytest.mark.parametrize(
    "sizes", [(2, 2), (3, 3), (5, 3), (6, 6), (2, 2, 2), (3, 3, 3), (2, 2, 2, 2)], ids=str
)
def test_every_pair_of_two_regions_has_as_many_trees(sizes: tuple[int, ...]) -> None:
    """Who reduces for one region meets all who do for another equally often: so the caps of all pairs
    add up.
    """
    asked = question(sizes)
    empty = trees(asked.groups, range(sum(sizes)), {0}, Swaps.ALL)
    assert empty is not None
    met = Counter(
        pair
        for part in empty.parts
        for pair in itertools.combinations(sorted((part.owner, *part.deputies)), 2)
    )
    for a, b in itertools.combinations(sorted(set(asked.groups)), 2):
        counts = {
            met[pair]
            for pair in itertools.combinations(range(sum(sizes)), 2)
            if (asked.groups[pair[0]], asked.groups[pair[1]]) == (a, b)
        }
        assert len(counts) == 1
        assert counts != {0}


@pytest.mark.parametrize("sizes", [(8,) * 8, (32, 32), (49, *(1,) * 15)], ids=lambda sizes: f"{len(sizes)}")
def test_plans_of_sixty_four_are_small_enough_to_be_taken(sizes: tuple[int, ...]) -> None:
    """However many of them are in one region, there are no more trees than a plan may have parts, and all
    regions and members have one.
    """
    asked = question(sizes)
    for homes in (None, {0}):
        empty = trees(asked.groups, range(64), homes, Swaps.ALL)
        assert empty is not None
        assert len(empty.parts) <= MOST_TREES
        assert empty.why_not([True] * 64) is None
        reducing = {rank for part in empty.parts for rank in (part.owner, *part.deputies)}
        alone = {rank for rank in range(64) if sizes[asked.groups[rank]] == 1}
        assert reducing == set(range(64)) - (alone if homes else set())
        if homes is None and len(sizes) > 2:
            assert {asked.groups[part.owner] for part in empty.parts} == set(asked.groups)


@pytest.mark.parametrize(
    ("names", "rtts", "expected"),
    [
        (["us-east-1a", "us-east-1b", "eu-west-3"], {}, (0, 0, 2)),
        (["", "", ""], {}, (0, 1, 2)),
        (["", "", "", ""], {(0, 1): 0.002, (2, 3): 0.009, (1, 2): 0.1}, (0, 0, 2, 2)),
        (["eu-west-3", "", ""], {(1, 0): 0.004, (2, 1): 0.12}, (0, 0, 2)),
        (["eu-west-3", "eu-north-1"], {(0, 1): 0.001}, (0, 1)),  # names count more than round trips
        (["the lab", "The Lab ", "home"], {}, (0, 0, 2)),
        (["", ""], {(0, 1): 0.0}, (0, 1)),  # not measured
    ],
)
def test_regions(names: list[str], rtts: dict[tuple[int, int], float], expected: tuple[int, ...]) -> None:
    """Members of one region have one number: by name, and who names none by round trips of less than 10
    ms.
    """
    assert regions(names, rtts) == expected


class TestGather:
    """All-gathers: every voter's contribution goes to all others."""

    def plan(self, votes: list[bool], owns: list[bool] | None = None) -> Plan:
        members = [Capacity(1e6, owns=can) for can in owns or votes]
        asked = PlanInputs(1000, 20, members, link_rates(len(votes), {}), range(len(votes)), votes=votes)
        found = gather(asked)
        assert found.plan.why_not(votes) is None
        assert found.plan.numel == 1000
        return found.plan

    def test_each_voter_has_a_part(self) -> None:
        """One part as long as the vector for each voter; a joiner gets all and has none."""
        plan = self.plan([True, True, True, False])
        assert [(part.owner, part.start, part.count) for part in plan.parts] == [
            (0, 0, 1000),
            (1, 1000, 1000),
            (2, 2000, 1000),
        ]
        assert plan.children(1, 1, 4) == (2, 3, 0)
        assert plan.neighbours(3, 4) == {0, 1, 2}
        assert plan.kind == "all-gather"
        assert not plan.takes(3)
        assert [plan.weight(1, rank, [2.0, 3.0, 4.0, 0.0]) for rank in range(4)] == [0, 3, 0, 0]

    def test_one_alone_has_a_flat_plan(self) -> None:
        """Nobody else's contribution is to be had: the average is that of one."""
        assert self.plan([True, False]) == Plan((Part(0, 0, 1000),))

    def test_there_is_room_for_so_many(self) -> None:
        """More voters than fit, and those that others cannot reach, take part without a weight."""
        plan = self.plan([True] * (MOST_GATHERED + 2))
        assert len(plan.parts) == MOST_GATHERED
        assert not plan.takes(MOST_GATHERED)
        assert not self.plan([True] * 3, [True, False, True]).takes(1)
        assert len(self.plan([True] * 2, [False, False]).parts) == 2

    def test_it_takes_what_the_slowest_needs(self) -> None:
        """The slowest sender gives its contribution to each of the others."""
        members = [Capacity(1e6), Capacity(2e6), Capacity(4e6)]
        found = gather(
            PlanInputs(1000, 5000, members, link_rates(3, {(2, 0): 1e3}), range(3), votes=[True] * 3)
        )
        assert found.seconds == pytest.approx(5.0)
        found = gather(PlanInputs(1000, 5000, members, link_rates(3, {}), range(3), votes=[True] * 3))
        assert found.seconds == pytest.approx(0.01)

    @pytest.mark.parametrize(
        ("parts", "why"),
        [
            ((Part(0, 0, 5), Part(0, 5, 5)), "two parts of one member"),
            ((Part(0, 0, 5), Part(1, 5, 6)), "equally long"),
            ((Part(0, 0, 5), Part(1, 5, 5, (2,))), "no deputies"),
            ((Part(0, 0, 5), Part(3, 5, 5)), "no voter"),
            ((), "1 to 12 parts"),
        ],
    )
    def test_impossible_ones_are_refused(self, parts: tuple[Part, ...], why: str) -> None:
        """What no leader plans is refused before anything is sent."""
        found = Plan(parts, (0, 0, 0, 0), gathers=True).why_not([True, True, True, False])
        assert found is not None
        assert why in found
