"""What a leader makes of its members: plans, and how far apart their rounds must be."""

from __future__ import annotations

import pytest

from p2pavg.allreduce.choosing import Topology
from p2pavg.report.prices import PriceTable
from p2pavg.rounds.loop.planning import Planner
from p2pavg.rounds.protocol.roles import PlanMember

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
