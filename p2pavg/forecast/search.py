"""The choice of machines to rent: counts of each offer that give most for the money. Pure.

With up to `EXHAUSTIVE` swarms, the best of all is found for certain (branch and bound). With more, a ladder
of
rising budgets is climbed: at each, peers are added, removed and exchanged, from several beginnings, until
nothing is better.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from p2pavg.forecast.bounds import Counts
from p2pavg.forecast.judge import Candidates, Goal, Judge, MachinePlan, Rung, around
from p2pavg.plan import MOST_FLAT

_STARTS, _BEGINNINGS = 3, 1  # that are judged, and of these that are climbed from
_TRIES = 10  # swarms of those around another that are judged, the likeliest first
_STEPS = 6  # swarms that are judged at most around a plan that replaces another
_RUNG, _HALVINGS = 2.0, 7  # budgets of which each is so many times the one before, and what is between them
_FRONT = 0.9  # of a plan's dollars: what the next cheaper one of the front may cost


def search(judge: Judge, goal: Goal, begin: Sequence[int] | None = None) -> MachinePlan | None:
    """The best swarm found; None: none meets the goal.

    begin: the plan at hand, kept unless another is better by `KEEP`.
    """
    if begin is not None:
        return _anew(judge, goal, begin)
    if judge.whole:
        return _best(judge, goal, judge.begun)
    return _on_ladder(judge, goal)


def next_best(judge: Judge, goal: Goal, plan: MachinePlan) -> MachinePlan | None:
    """The best other swarm; where there are many, of those around the plan. None: none meets the goal."""
    swarms = judge.begun.swarms if judge.whole else around(plan.counts, judge.limits)
    return _best(judge, goal, judge.candidates(swarms[(swarms != plan.counts).any(1)]))


def front(judge: Judge) -> list[MachinePlan]:
    """Plans of which none has both more samples/s and fewer dollars: the way from cheap to fast."""
    if not judge.whole:
        plans = sorted({rung.plan for rung in _rungs(judge)}, key=lambda plan: (plan.dollars_hour, -plan.sps))
        most = itertools.accumulate((plan.sps for plan in plans), max, initial=0.0)
        return [plan for plan, before in zip(plans, most, strict=False) if plan.sps > before]
    found: list[MachinePlan] = []
    plan = search(judge, Goal())
    while plan is not None and (not found or plan.dollars_hour < found[-1].dollars_hour):
        found.append(_best(judge, Goal(cheapest=True, sps=plan.sps), judge.begun, plan) or plan)
        plan = search(judge, Goal(dollars_hour=_FRONT * found[-1].dollars_hour))
    return found[::-1]


def _best(
    judge: Judge, goal: Goal, candidates: Candidates, known: MachinePlan | None = None
) -> MachinePlan | None:
    """The best of `known` and the candidates. The most promising are judged, until no other may be better."""
    values = candidates.at_most(goal)
    may = candidates.promising(goal, known)
    for at in may[np.argsort(-values[may], kind="stable")]:
        if known is not None and values[at] <= goal.value(known):
            break
        plan = judge.plan(candidates.swarms[at])
        if goal.met(plan) and (known is None or goal.value(plan) > goal.value(known)):
            known = plan
    return known


def _rungs(judge: Judge) -> Iterator[Rung]:
    """The fastest plans within rising budgets, each found from the one before and from the likeliest
    beginnings. They depend on the inventory alone, and so do the plans between two of them.
    """
    rents = np.array([offer.dollars_hour for offer in judge.inventory.offers])[judge.limits > 0]
    dearest = MOST_FLAT * float(rents.max(initial=0.0))
    first = float(rents[rents > 0].min(initial=dearest)) or 1.0
    steps = max(0, math.ceil(math.log(max(1.0, dearest / first), _RUNG)))
    for at, budget in enumerate((0.0, *(first * _RUNG**step for step in range(steps + 1)), math.inf)):
        if at == len(judge.rungs):
            seen = [judge.rungs[-1].plan if at else judge.plan(0 * judge.limits)]
            judge.rungs.append(Rung(budget, _within(judge, budget, seen), tuple(seen)))
        yield judge.rungs[at]


def _within(judge: Judge, budget: float, seen: list[MachinePlan], sps: float = math.inf) -> MachinePlan:
    """The fastest plan within a budget, no faster than `sps`: of those seen, and of what climbs reach from
    the best of these and from the likeliest beginnings. Adds what is judged to `seen`.
    """
    goal = Goal(dollars_hour=budget)
    best = _fastest_of(seen, budget, sps)
    starts = _starts(judge, goal, best)
    seen += starts
    starts = [plan for plan in starts if goal.met(plan) and plan.sps <= sps]
    starts = sorted(starts, key=goal.value, reverse=True)[:_BEGINNINGS]
    for start in (best, *starts):
        _climb(judge, goal, start, seen, sps)
    return _fastest_of(seen, budget, sps)


def _starts(judge: Judge, goal: Goal, known: MachinePlan | None) -> list[MachinePlan]:
    """The likeliest beginnings that may be better than a known plan."""
    may = judge.begun.promising(goal, known)
    order = may[np.argsort(-judge.begun.likely(goal)[may], kind="stable")]
    return [judge.plan(counts) for counts in itertools.islice(_unlike(judge.begun.swarms[order]), _STARTS)]


def _unlike(swarms: Counts) -> Iterator[Counts]:
    """The first of those with peers of the same offers."""
    met: set[bytes] = set()
    for counts in swarms:
        if (key := (counts > 0).tobytes()) not in met:
            met.add(key)
            yield counts


def _fastest_of(plans: Sequence[MachinePlan], budget: float, sps: float = math.inf) -> MachinePlan:
    """Of the plans within a budget that are no faster than `sps`."""
    return max(
        (plan for plan in plans if plan.dollars_hour <= budget and plan.sps <= sps), key=lambda plan: plan.sps
    )


def _on_ladder(judge: Judge, goal: Goal) -> MachinePlan | None:
    """Climbs up to the two rungs around the goal, and halves what is between them, until they are near each
    other. A plan there is never faster than that of the upper rung, and which swarms are judged follows from
    the rungs alone: so more money never gives less, whatever climbs find.
    """

    def short(rung: Rung) -> bool:
        return rung.plan.sps < goal.sps if goal.cheapest else rung.budget <= goal.dollars_hour

    lower = upper = next(_rungs(judge))
    for upper in _rungs(judge):
        if not short(upper):
            break
        lower = upper
    if goal.met(upper.plan) and not goal.cheapest:
        return upper.plan
    seen = [lower.plan, *upper.seen]
    low, high = lower.budget, max(lower.budget, min(upper.budget, upper.plan.dollars_hour))
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high) if low else high / 2
        rung = Rung(middle, _within(judge, middle, seen, upper.plan.sps))
        if short(rung):
            low, lower = middle, rung
        else:
            high, upper = middle, rung
    if goal.cheapest:
        found = [plan for plan in seen if plan.sps >= goal.sps]
        best = _climb(judge, goal, max(found, key=goal.value), []) if found else lower.plan
    else:
        best = _fastest_of([lower.plan, *seen], goal.dollars_hour, upper.plan.sps)
    return best if goal.met(best) else None


def _climb(
    judge: Judge, goal: Goal, plan: MachinePlan, seen: list[MachinePlan], sps: float = math.inf, most: int = 0
) -> MachinePlan:
    """From a plan to better ones around it, no faster than `sps`, until none of the likeliest is better, or
    `most` were judged, if that is not 0. Adds those that were judged to `seen`.
    """
    better: MachinePlan | None = plan
    while better is not None and not 0 < most <= len(seen):
        plan = better
        near = judge.candidates(around(plan.counts, judge.limits), goal, plan)
        may = near.promising(goal, plan)
        better = None
        for at in may[np.argsort(-near.likely(goal)[may], kind="stable")][:_TRIES]:
            other = judge.plan(near.swarms[at])
            seen.append(other)
            if goal.met(other) and other.sps <= sps and goal.value(other) > goal.value(plan):
                better = other
                break
    return plan


def _anew(judge: Judge, goal: Goal, begin: Sequence[int]) -> MachinePlan | None:
    """The plan at hand, or one that is better by `KEEP`: of what was judged before, of the likeliest
    beginnings, and of what a few steps around the best of these reach. Where none of these meets the goal, of
    what peers added to the plan at hand reach.
    """
    now = judge.plan(np.minimum(begin, judge.limits))
    if judge.whole:
        best = _best(judge, goal, judge.begun, now if goal.met(now) else None)
    else:
        plans = [now, *judge.judged(), *_starts(judge, goal, now if goal.met(now) else None)]
        known = [*filter(goal.met, plans)] or [*filter(goal.met, _more(judge, goal, now))]
        if not known:
            return search(judge, goal)
        best = _climb(judge, goal, max(known, key=goal.value), [], most=_STEPS)
    return now if goal.met(now) and best and not goal.worth(now, best) else best


def _more(judge: Judge, goal: Goal, plan: MachinePlan) -> Iterator[MachinePlan]:
    """Plans with more and more peers, those that bring most for their dollars first, until the goal is met or
    the budget is spent.
    """
    eye = np.eye(len(judge.limits), dtype=np.int64)
    while not goal.met(plan) and plan.dollars_hour <= goal.dollars_hour:
        counts = np.array(plan.counts)
        more = [np.minimum(counts + times * eye, judge.limits) for times in (1, 3, MOST_FLAT)]
        near = judge.candidates(np.unique(np.concatenate(more), axis=0), goal=Goal(), known=plan)
        gain, cost = near.sps - plan.sps, near.about - plan.dollars_hour
        enough = near.sps >= goal.sps
        order = np.lexsort((np.where(enough, near.about, -gain / np.maximum(cost, 1e-9)), ~enough))
        better = next((p for at in order[:3] if (p := judge.plan(near.swarms[at])).sps > plan.sps), None)
        if better is None:
            return
        plan = better
        yield plan
