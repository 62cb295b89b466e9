"""Inventories of more swarms than can all be looked at: budgets, order, and plans made from the one at
hand.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from p2pavg.forecast.search import KEEP, Goal, Judge, front, search
from tests.forecast.swarms import inventory

SIZES = ((8, 6, 3), (12, 8, 4), (24, 16, 6))  # offers, machines of each at most, regions
SEEDS = (4, 5, 14, 17)


def large(seed: int, backwards: bool = False) -> Judge:
    """A judge that has judged nothing yet, as a new run of the command has."""
    offers, most, regions = SIZES[seed % 3]
    judge = Judge(inventory(seed, offers, most, regions, backwards))
    assert not judge.whole
    return judge


@pytest.mark.parametrize("seed", SEEDS)
def test_more_budget_never_gives_less(seed: int) -> None:
    """The plan for more money is at least as fast, and keeps to its budget."""
    judge = large(seed)
    least = float(np.random.default_rng(seed).uniform(0.5, 4))
    before = 0.0
    for factor in (1, 1.001, 1.1, 1.3, 2):
        goal = Goal(dollars_hour=factor * least)
        plan = search(judge, goal)
        speed = plan.sps if plan else 0.0
        assert speed >= before
        assert plan is None or goal.met(plan)
        before = speed


@pytest.mark.parametrize("seed", [4, 6])
@pytest.mark.parametrize("cheapest", [False, True])
def test_the_plan_follows_from_the_goal_alone(seed: int, cheapest: bool) -> None:
    """The same machines when offers and links are told backwards, and when other plans were asked for
    before.
    """
    goal = Goal(cheapest=True, sps=700.0) if cheapest else Goal(dollars_hour=3.0)
    plan = search(large(seed), goal)
    assert plan is not None
    assert search(large(seed, backwards=True), goal) == plan
    asked = large(seed)
    for budget in (9.0, 1.0):
        search(asked, Goal(dollars_hour=budget))
    assert search(asked, goal) == plan


def test_the_front_rises_and_ends_with_the_fastest() -> None:
    """Each plan of the front costs more than the one before and is faster."""
    judge = large(4)
    ways = front(judge)
    assert len(ways) > 3
    for one, dearer in pairwise(ways):
        assert one.sps < dearer.sps
        assert one.dollars_hour < dearer.dollars_hour
    assert ways[-1] == search(large(4), Goal())


@pytest.mark.parametrize("seed", [4, 10])
@pytest.mark.parametrize("cheapest", [False, True])
def test_a_new_plan_from_the_one_at_hand_judges_few_swarms(seed: int, cheapest: bool) -> None:
    """Offers of 48 kinds come and go: each new plan meets the goal with what is there and judges the plan at
    hand and eight large ones at most; a plan that still meets the goal is left only for one better by `KEEP`.
    """
    judge = Judge(inventory(seed, offers=48, most=16, regions=8))
    goal = Goal(cheapest=True, sps=2000.0) if cheapest else Goal(dollars_hour=5.0)
    now = search(judge, goal)
    assert now is not None
    random = np.random.default_rng(seed)
    for _ in range(8):
        judged = set(judge._known)
        there = judge.within(random.integers(0, judge.limits + 1))
        plan = search(there, goal, begin=now.counts)
        assert plan is not None
        assert goal.met(plan)
        assert (plan.counts <= there.limits).all()
        assert sum(sum(counts) ** 2 for counts in judge._known.keys() - judged) <= 10 * 32**2
        left = there.plan(np.minimum(now.counts, there.limits))
        if plan != left and goal.met(left):
            better = left.dollars_hour / plan.dollars_hour if cheapest else plan.sps / left.sps
            assert better > KEEP
        now = plan


def test_a_plan_that_lost_peers_is_mended() -> None:
    """Where four machines of the plan at hand are gone, others in their place reach the speed for about what
    a search of all finds, though each of them alone makes the swarm dearer and misses it still.
    """
    judge = Judge(inventory(0, offers=12, most=8, regions=3))
    goal = Goal(cheapest=True, sps=2542.0)
    now = search(judge, goal)
    assert now is not None
    left = [4, 5, 1, 0, 8, 0, 1, 0, 0, 8, 1, 0]
    assert now.counts[3] > left[3]
    plan = search(judge.within(left), goal, begin=now.counts)
    anew = Judge(judge.inventory)
    anew.limits = np.minimum(left, anew.limits)
    best = search(anew, goal)
    assert plan is not None
    assert best is not None
    assert plan.dollars_hour <= 1.25 * best.dollars_hour


def test_nothing_on_offer_is_no_plan() -> None:
    """Where all machines are gone there is no plan, from one at hand neither, and the next offers are
    used.
    """
    judge = large(4)
    goal = Goal(dollars_hour=3.0)
    now = search(judge, goal)
    assert now is not None
    nothing = judge.within(0 * judge.limits)
    assert search(nothing, goal, begin=now.counts) is None
    assert search(nothing, goal) is None
    assert search(judge.within(judge.limits), goal) == now


def test_a_budget_that_nothing_meets_takes_no_long_search() -> None:
    """Where the plan at hand became too dear and nothing is cheap enough, hardly a swarm is judged."""
    judge = large(4)
    now = search(judge, Goal(dollars_hour=3.0))
    assert now is not None
    judged = len(judge._known)
    assert search(judge, Goal(dollars_hour=0.001), begin=now.counts) is None
    assert len(judge._known) - judged < 5
