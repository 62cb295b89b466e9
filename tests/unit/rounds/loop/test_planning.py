"""What a leader makes of its members: plans, and how far apart their rounds must be."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from p2pavg.allreduce.choosing import Topology
from p2pavg.report.prices import PriceTable
from p2pavg.rounds.loop.planning import Planner
from p2pavg.rounds.protocol.roles import LinkFacts, PlanMember

PRICES = PriceTable({}, {}, {"us": {"eu": 0.02}, "eu": {"us": 0.08}})
NUMEL = 5_000_000  # 1e7 bytes in fp16


def members(*regions: str) -> list[PlanMember]:
    return [
        PlanMember(bytes([rank]) * 20, True, 0.0, 0.0, True, {}, region)
        for rank, region in enumerate(regions)
    ]


def planner(topology: Topology, usd_per_hour: float) -> Planner:
    return Planner(
        lambda: NUMEL,
        lambda numel: 2 * numel,
        topology,
        PRICES.between,
        egress_usd_per_hour=usd_per_hour,
    )


def linked(bps: dict[tuple[int, int], float], count: int = 4) -> list[PlanMember]:
    """Members 100 ms apart; bps: bit/s from rank to rank, where measured."""
    return [
        replace(
            member,
            links={
                bytes([sender]) * 20: LinkFacts(bps.get((sender, rank), 0.0), 0.1)
                for sender in range(count)
                if sender != rank
            },
        )
        for rank, member in enumerate(members(*[""] * count))
    ]


@pytest.mark.parametrize("unknown", [(3,), (1, 3)])
def test_links_that_nobody_measured_are_taken_to_be_as_others(unknown: tuple[int, ...]) -> None:
    """A newcomer's, or those that the last run did not remember: no part is much longer than an even one."""
    ways = [(a, b) for a in range(4) for b in range(4) if a != b and not {a, b} & set(unknown)]
    plan = planner(Topology.FLAT, math.inf)(linked(dict.fromkeys(ways, 1e8) | {(0, 2): 2e9, (2, 0): 2e9}))
    assert max(part.count for part in plan.parts) < 0.4 * NUMEL


@pytest.mark.parametrize(
    ("topology", "crossings"), [(Topology.TWO_LEVEL, 1.0), (Topology.CHEAPEST, 1.0), (Topology.FLAT, 2.0)]
)
def test_rounds_are_apart_by_what_their_plan_costs(topology: Topology, crossings: float) -> None:
    """Two levels send one vector each way between two regions of 2 + 2 peers, a flat plan sends two."""
    spacing = planner(topology, 0.5).spacing(members("us", "us", "eu", "eu"))
    dollars = crossings * 0.01 * (0.02 + 0.08)
    assert spacing.dollars == pytest.approx(dollars, rel=1e-6)
    assert spacing.seconds == pytest.approx(3600 * dollars / 0.5, rel=1e-6)


def test_rounds_inside_one_region_without_prices_may_follow_at_once() -> None:
    """What costs nothing is not held up."""
    assert planner(Topology.AUTO, 0.5).spacing(members("us", "us")).seconds == 0.0


def test_asking_for_the_spacing_plans_no_round() -> None:
    """What is reported of the last round's cost stays."""
    asked = planner(Topology.AUTO, 0.5)
    asked(members("us", "us"))
    cost = asked.cost
    asked.spacing(members("us", "eu"))
    assert asked.cost is cost


def test_what_a_round_costs_is_held_against_a_flat_one() -> None:
    """Two levels of 2 + 2 peers send half of what a flat plan sends between the two regions."""
    asked = planner(Topology.TWO_LEVEL, 0.5)
    asked(members("us", "us", "eu", "eu"))
    assert asked.cost is not None
    assert asked.cost.dollars == pytest.approx(0.001, rel=1e-6)
    assert asked.cost.flat_dollars == pytest.approx(0.002, rel=1e-6)


def test_without_prices_nothing_is_said_of_costs() -> None:
    """Not even that they are zero."""
    asked = Planner(lambda: NUMEL, lambda numel: 2 * numel)
    asked(members("us", "eu"))
    assert asked.cost is None
