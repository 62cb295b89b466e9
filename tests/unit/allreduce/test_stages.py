"""What a member sends in each stage of a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2pavg.allreduce.choosing import PlanInputs, flat, gather, two_levels
from p2pavg.allreduce.levels import Swaps
from p2pavg.allreduce.loads import Capacity, link_rates
from p2pavg.allreduce.stages import CONTRIBUTIONS, PARTIAL, PASSED_ON, RESULTS, sent_by_stage
from p2pavg.plan import Plan

NUMEL = 64 * 1024


def question(peers: int, groups: tuple[int, ...]) -> PlanInputs:
    return PlanInputs(
        NUMEL, 2 * NUMEL, [Capacity()] * peers, link_rates(peers, {}), groups, votes=[True] * peers
    )


def swarm(plan: Plan, weights: list[float]) -> dict[str, int]:
    """What all members send, where a value takes 3 bytes as a contribution and 2 in a result."""
    total: dict[str, int] = {}
    for rank in range(len(weights)):
        for stage, count in sent_by_stage(plan, rank, weights, lambda n: 3 * n, lambda n: 2 * n).items():
            total[stage] = total.get(stage, 0) + count
    return total


def test_a_flat_plan_has_contributions_and_results() -> None:
    """Each of the others contributes to a part, and gets its result; who has no weight only gets it."""
    plan = flat(question(4, (0, 1, 2, 3))).plan
    assert swarm(plan, [1.0] * 4) == {CONTRIBUTIONS: 9 * NUMEL, RESULTS: 6 * NUMEL}
    own = NUMEL // 4
    assert sent_by_stage(plan, 0, [0.0, 1.0, 1.0, 1.0], lambda n: 3 * n, lambda n: 2 * n) == {
        RESULTS: 3 * 2 * own
    }


def test_two_levels_send_one_mean_across() -> None:
    """In two regions of two, of each part one partial mean crosses, and one result is passed on."""
    found = two_levels(question(4, (0, 0, 1, 1)))
    assert found is not None
    assert swarm(found.plan, [1.0] * 4) == {
        CONTRIBUTIONS: 2 * 3 * NUMEL,
        PARTIAL: 2 * NUMEL,
        RESULTS: 2 * 2 * NUMEL,
        PASSED_ON: 2 * NUMEL,
    }


def test_two_regions_swap_partial_means() -> None:
    """Of each part one partial mean crosses each way; each side's own member gets the result."""
    found = two_levels(replace(question(4, (0, 0, 1, 1)), swaps=Swaps.ALL))
    assert found is not None
    assert swarm(found.plan, [1.0] * 4) == {
        CONTRIBUTIONS: 2 * 3 * NUMEL,
        PARTIAL: 2 * 2 * NUMEL,
        RESULTS: 2 * 2 * NUMEL,
    }


@pytest.mark.parametrize("silent", [0, 1])
def test_an_all_gather_has_contributions_alone(silent: int) -> None:
    """Each contribution goes to all others; one without weight is not sent."""
    plan = gather(question(3, (0, 1, 2))).plan
    weights = [1.0] * (3 - silent) + [0.0] * silent
    assert swarm(plan, weights) == {CONTRIBUTIONS: (3 - silent) * 2 * 2 * NUMEL}
