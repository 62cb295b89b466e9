"""Plans against brute force, budgets, availability over time, and inventories that are wrong."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from p2pavg.allreduce.choosing import Topology
from p2pavg.errors import ConfigurationError
from p2pavg.forecast import trace
from p2pavg.forecast.inventory import load, parse
from p2pavg.forecast.laws import dollars_per_hour, epoch
from p2pavg.forecast.search import Goal, Judge, MachinePlan, front, search
from tests.forecast.swarms import inventory

SEEDS = range(40)


def goals(seed: int, judge: Judge) -> list[Goal]:
    random = np.random.default_rng(seed + 1000)
    fastest = search(judge, Goal(dollars_hour=1e8), whole=True)
    assert fastest is not None
    return [
        Goal(dollars_hour=float(random.uniform(0.2, 8))),
        Goal(sps=float(random.uniform(0.1, 1.0)) * fastest.sps),
    ]


def value(goal: Goal, plan: MachinePlan) -> float:
    return plan.sps if goal.dollars_hour is not None else -plan.dollars_hour


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_said_of_a_plan_is_what_the_laws_say(seed: int) -> None:
    """The bound that plans are chosen by is never better than the prediction, and near it."""
    judge = Judge(inventory(seed))
    plan = search(judge, Goal(dollars_hour=6.0))
    if plan is None:
        return
    members, links = judge.swarm(plan)
    found = epoch(judge.inventory.job, members, links, judge.overheads, Topology.FLAT)
    best = epoch(judge.inventory.job, members, links, judge.overheads)
    assert best.samples_per_second >= found.samples_per_second * (1 - 1e-3)
    assert found.samples_per_second >= plan.sps * (1 - 1e-3)
    assert found.samples_per_second <= plan.sps * 1.35
    assert sum(dollars_per_hour(found, members, judge.inventory.per_gb)) > 0


def test_climbing_finds_what_brute_force_finds() -> None:
    """Of small instances, both goals, at least 97 of 100 are equal to the best of all swarms."""
    off = []
    for seed in SEEDS:
        judge = Judge(inventory(seed))
        for goal in goals(seed, judge):
            best, climbed = search(judge, goal, whole=True), search(judge, goal, whole=False)
            assert (best is None) == (climbed is None)
            if best is not None and climbed is not None:
                off.append(abs(value(goal, best) - value(goal, climbed)) / abs(value(goal, best)))
    assert np.mean(np.array(off) > 1e-6) <= 0.03


@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_of_the_offers_does_not_matter(seed: int) -> None:
    """The same machines are chosen when the inventory lists them backwards."""
    one = inventory(seed)
    other = replace(one, offers=one.offers[::-1])
    first, second = (search(Judge(given), Goal(dollars_hour=4.0)) for given in (one, other))
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert first.sps == pytest.approx(second.sps)


@pytest.mark.parametrize("seed", SEEDS)
def test_more_budget_never_gives_less(seed: int) -> None:
    """Samples per second rise with the dollars that may be spent, and so do the plans of the front."""
    judge = Judge(inventory(seed))
    speeds = [
        plan.sps if (plan := search(judge, Goal(dollars_hour=budget))) else 0.0
        for budget in (0.5, 1, 2, 4, 8, 16)
    ]
    assert speeds == sorted(speeds)
    ways = front(judge, 8)
    assert [plan.dollars_hour for plan in ways] == sorted(plan.dollars_hour for plan in ways)
    assert [plan.sps for plan in ways] == sorted(plan.sps for plan in ways)


def test_a_large_inventory_is_searched_in_the_time_of_a_breath() -> None:
    """Eight regions of six types: a plan within the budget, by a bounded number of judged swarms."""
    judge = Judge(inventory(5, offers=48, most=6, regions=8))
    judged = []
    real = judge.judge
    judge.judge = lambda counts: (judged.append(len(counts)), real(counts))[1]  # type: ignore[method-assign]
    plan = search(judge, Goal(dollars_hour=5.0))
    assert plan is not None
    assert plan.dollars_hour <= 5.0
    assert sum(judged) < 1_500_000


def offered(text: str, tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return str(path)


def test_a_plan_follows_what_is_on_offer(tmp_path: Path) -> None:
    """Peers that vanish are replaced, and a plan is kept where a change would gain little."""
    job = {"target_batch_size": 8192, "values": 1e7}
    offers = [
        {"type": "a", "region": "r", "count": 8, "samples_per_second": 100, "dollars_per_hour": 0.5},
        {"type": "b", "region": "r", "count": 8, "samples_per_second": 98, "dollars_per_hour": 0.5},
    ]
    links = [{"between": ["r", "r"], "rtt_ms": 1, "rate_mbps": 1000}]
    judge = Judge(parse({"job": job, "offer": offers, "link": links}))
    text = "seconds,type,count\n0,a@r,4\n0,b@r,0\n100,b@r,8\n200,a@r,0\n300,a@r,8\n400,a@r,8\n"
    changes = trace.load(offered(text, tmp_path), judge.inventory)
    steps = trace.replay(judge, Goal(dollars_hour=2.0), changes, join_seconds=10.0)
    assert [step.plan.counts if step.plan else None for step in steps] == [(4, 0), (4, 0), (0, 4), (0, 4)]
    assert [step.changed for step in steps] == [True, False, True, False]
    told = trace.summary(steps)
    assert told["join_seconds"] == 80.0
    assert told["dollars"] == pytest.approx(4 * 0.5 * 400 / 3600, rel=0.01)
    begun = time.perf_counter()
    search(judge, Goal(dollars_hour=2.0), begin=(4, 0))
    assert time.perf_counter() - begun < 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0,a@r,1\n5,c@r,1\n", "does not offer 'c@r'"),
        ("0,a@r,1\n5,a@r\n", "line 2"),
        ("0,a@r,1\n-5,a@r,2\n", "at least 0"),
        ("5,a@r,1\n1,a@r,2\n", "must rise"),
        ("5,a@r,1\n", "two different times"),
    ],
)
def test_a_wrong_trace_is_refused(text: str, said: str, tmp_path: Path) -> None:
    """Each mistake is one sentence, with the line."""
    row = {"type": "a", "region": "r", "samples_per_second": 1}
    given = parse({"job": {"target_batch_size": 1, "values": 1}, "offer": [row]})
    with pytest.raises(ConfigurationError, match=said):
        trace.load(offered(text, tmp_path), given)


GOOD = {
    "job": {"target_batch_size": 8192, "values": 1e7},
    "offer": [{"type": "a", "region": "r", "count": 2, "samples_per_second": 10, "dollars_per_hour": 1}],
    "link": [{"between": ["r", "r"], "rtt_ms": 1, "rate_mbps": 100}],
}


@pytest.mark.parametrize(
    ("where", "change", "said"),
    [
        ("job", {"values": float("nan")}, "values must be a number above 0"),
        ("job", {"target_batch_size": -1}, "target_batch_size"),
        ("job", {"codec": "zip"}, "codec"),
        ("job", {"speed": 1}, "'speed'"),
        ("offer", {"count": 0}, "count"),
        ("offer", {"samples_per_second": 1e18}, "below 1e15"),
        ("offer", {"dollars_per_hour": "cheap"}, "dollars_per_hour"),
        ("offer", {"region": 5}, "a type and a region"),
        ("offer", {"region": "s"}, "between s and s.*bench net"),
        ("link", {"between": ["r"]}, "between"),
        ("link", {"rate_mbps": 0}, "rate_mbps"),
        ("link", {"net_json": "nowhere.json"}, "no JSON of 'bench net'"),
    ],
)
def test_a_wrong_inventory_is_refused(where: str, change: dict, said: str) -> None:
    """Each mistake is one sentence that names the key."""
    given: dict = {
        key: ([dict(row) for row in part] if isinstance(part, list) else dict(part))
        for key, part in GOOD.items()
    }
    target = given[where] if where == "job" else given[where][0]
    target.update(change)
    with pytest.raises(ConfigurationError, match=said):
        parse(given)


def test_what_is_told_twice_or_not_at_all_is_refused(tmp_path: Path) -> None:
    """A link or an offer twice, a type without a speed, a file that is no TOML."""
    with pytest.raises(ConfigurationError, match="told twice"):
        parse({**GOOD, "link": GOOD["link"] * 2})
    with pytest.raises(ConfigurationError, match="offered twice"):
        parse({**GOOD, "offer": GOOD["offer"] * 2})
    row = {key: value for key, value in GOOD["offer"][0].items() if key != "samples_per_second"}
    with pytest.raises(ConfigurationError, match="'a' was never measured; tell samples_per_second"):
        parse({**GOOD, "offer": [row]})
    path = tmp_path / "offers.toml"
    path.write_text("[job")
    with pytest.raises(ConfigurationError, match="no TOML"):
        load(str(path))
    with pytest.raises(ConfigurationError, match="cannot read"):
        load(str(tmp_path / "none.toml"))


@pytest.mark.parametrize("whole", [True, False])
def test_an_offer_with_too_little_memory_is_in_no_plan(whole: bool) -> None:
    """What one peer needs decides which offers count, however fast the small ones are; no word: all do."""
    job = {"target_batch_size": 1000, "values": 1e6, "memory_gb": 15}
    small = {"type": "small", "region": "r", "count": 4, "samples_per_second": 500, "memory_gb": 8}
    large = {"type": "large", "region": "r", "count": 4, "samples_per_second": 100, "memory_gb": 16}
    untold = {"type": "untold", "region": "r", "count": 1, "samples_per_second": 50}
    links = [{"between": ["r", "r"], "rtt_ms": 1, "rate_mbps": 1000}]
    judge = Judge(parse({"job": job, "offer": [small, large, untold], "link": links}))
    plan = search(judge, Goal(dollars_hour=1.0), whole=whole)
    assert plan is not None
    assert plan.counts == (0, 4, 1)
    assert all(one.counts[0] == 0 for one in front(judge))
    judge = Judge(parse({"job": {**job, "memory_gb": 8}, "offer": [small, large, untold], "link": links}))
    roomy = search(judge, Goal(dollars_hour=1.0), whole=whole)
    assert roomy is not None
    assert roomy.counts[0] == 4
