"""Part sizes: exact cover, and close to the optimum of the linear program."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg.allreduce.choosing import PlanInputs, flat
from p2pavg.allreduce.loads import Capacity, link_rates, loads
from p2pavg.allreduce.partition import ALIGNMENT, chunk_elements, fractions, part_counts
from p2pavg.plan import Plan
from p2pavg.plan.part import Part

speeds = st.floats(1e5, 1e10)


def shares(members: list[Capacity], links: dict[tuple[int, int], float] | None = None) -> tuple[float, ...]:
    """What each member owns of a vector that is reduced in a flat round."""
    owners = [rank for rank, member in enumerate(members) if member.owns]
    costs = loads(
        Plan(tuple(Part(rank, 0, 0) for rank in owners)), members, link_rates(len(members), links or {})
    )
    owned = dict(
        zip(owners, [1 / len(owners)] * len(owners) if costs is None else fractions(costs)[0], strict=True)
    )
    return tuple(float(owned.get(rank, 0.0)) for rank in range(len(members)))


def round_time(members: list[Capacity], x: tuple[float, ...]) -> float:
    """Seconds per vector byte of the slowest member; all contribute."""
    n = len(members)
    return max(
        max((1 - x[i] + (n - 1) * x[i]) / (m.up or 1.0), ((n - 1) * x[i] + 1 - x[i]) / (m.down or 1.0))
        for i, m in enumerate(members)
    )


def test_equal_without_measurements() -> None:
    """Nothing measured: every owner gets the same share, and one that cannot own gets none."""
    assert shares([Capacity(), Capacity(), Capacity(owns=False)]) == (0.5, 0.5, 0.0)


@given(st.lists(st.tuples(speeds, speeds), min_size=2, max_size=6))
@settings(max_examples=60, deadline=None)
def test_no_coarse_grid_point_is_better(pairs: list[tuple[float, float]]) -> None:
    """No other split on a grid of tenths ends sooner than the chosen one by more than two hundredths."""
    members = [Capacity(up, down) for up, down in pairs]
    chosen = shares(members)
    assert sum(chosen) == pytest.approx(1.0)
    best = round_time(members, chosen)
    steps = 10 if len(members) <= 4 else 4
    for grid in itertools.product(range(steps + 1), repeat=len(members)):
        if sum(grid) == steps:
            assert best <= round_time(members, tuple(g / steps for g in grid)) * 1.02


def test_a_slow_home_line_owns_less() -> None:
    """Three members at 1 Gb/s and one home line (20 up, 100 down): the home line owns nearly nothing."""
    fast, home = Capacity(125e6, 125e6), Capacity(2.5e6, 12.5e6)
    chosen = shares([fast, fast, fast, home])
    assert chosen[3] < 0.01
    assert round_time([fast, fast, fast, home], chosen) == pytest.approx(1 / 2.5e6, rel=0.01)


def test_slow_links_bound_the_shares_of_both_ends() -> None:
    """With one slow link between two members, the time meets the link's bound within 2%."""
    members = [Capacity(1e9, 1e9)] * 3
    links = {(0, 1): 1e7, (1, 0): 1e7}
    chosen = shares(members, links)
    worst = max((chosen[j] + chosen[i]) / rate for (i, j), rate in links.items())
    alternatives = [(0.0, 0.0, 1.0), (1 / 3, 1 / 3, 1 / 3), (0.1, 0.1, 0.8)]
    for other in alternatives:
        time = max(round_time(members, other), (other[0] + other[1]) / 1e7)
        assert max(round_time(members, chosen), worst) <= time * 1.02


@given(st.integers(2, 4), st.data())
@settings(max_examples=60, deadline=None)
def test_links_of_any_rates(members: int, data: st.DataObject) -> None:
    """With a rate for each ordered pair, no split on a grid ends sooner by more than two hundredths."""
    pairs = list(itertools.permutations(range(members), 2))
    links = {pair: data.draw(speeds) for pair in pairs}

    def time(x: tuple[float, ...]) -> float:
        return max((x[i] + x[j]) / rate for (i, j), rate in links.items())

    best = time(shares([Capacity()] * members, links))
    for grid in itertools.product(range(11), repeat=members):
        if sum(grid) == 10:
            assert best <= time(tuple(g / 10 for g in grid)) * 1.02


def test_equal_members_own_equal_parts() -> None:
    """Where many splits end at the same time, because one member is slow, the others own the same."""
    fast, slow = Capacity(1e9, 1e9), Capacity(1e6, 1e6)
    assert shares([fast, slow, fast, fast]) == pytest.approx((1 / 3, 0.0, 1 / 3, 1 / 3))


def test_what_is_not_known_is_no_limit() -> None:
    """One member is known to be slow, of the others nothing: they own all."""
    assert shares([Capacity(), Capacity(1e6, 1e6), Capacity()])[1] == 0.0


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_shares_are_shares_whatever_was_measured(data: st.DataObject) -> None:
    """For any rates, be they denormal, negative, infinite or no numbers: finite, not negative, summing to 1,
    and 0 for those that may not own.
    """
    rate = st.none() | st.floats()
    members = data.draw(
        st.lists(st.builds(Capacity, rate, rate, st.booleans(), st.booleans()), min_size=1, max_size=6)
    )
    ranks = st.integers(0, len(members) - 1)
    links = data.draw(st.dictionaries(st.tuples(ranks, ranks), st.floats(), max_size=20))
    if any(member.owns for member in members):
        chosen = shares(members, links)
        assert all(0.0 <= x < math.inf for x in chosen)
        assert sum(chosen) == pytest.approx(1.0)
        assert not any(x for x, member in zip(chosen, members, strict=True) if not member.owns)


def test_nobody_may_own() -> None:
    """A group without an owner is refused."""
    with pytest.raises(ValueError, match="own"):
        flat(PlanInputs(1000, 2000, [Capacity(owns=False)] * 2, link_rates(2, {}), (0, 0)))


@given(st.integers(0, 10_000_000), st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_counts_cover_the_vector(numel: int, raw: list[float]) -> None:
    """Counts are aligned except the last and add up to the vector."""
    total = sum(raw)
    fractions = [x / total for x in raw] if total > 0 else [1.0] + [0.0] * (len(raw) - 1)
    counts = part_counts(numel, fractions)
    assert sum(counts) == numel
    assert min(counts) >= 0
    ends = list(itertools.accumulate(counts))
    assert all(end % ALIGNMENT == 0 or end == numel for end in ends)
    assert all(count == 0 for count, x in zip(counts, fractions, strict=True) if x == 0 and count < numel)


def test_chunks_are_bounded() -> None:
    """Chunks hold 4 Ki to 128 Ki elements; between, a part of the mean size has 64."""
    assert chunk_elements([10]) == 4 * 1024
    assert chunk_elements([64 * 40_000, 64 * 60_000, 0]) == 49 * 1024
    assert chunk_elements([64 * 50_000]) == 49 * 1024
    assert chunk_elements([50_000_000]) == 128 * 1024


def test_plan_leaves_no_gap() -> None:
    """Parts follow each other and cover the vector; members that own nothing have no part."""
    members = [Capacity(), Capacity(owns=False), Capacity()]
    parts = flat(PlanInputs(1_000_003, 1, members, link_rates(3, {}), (0, 0, 0))).plan.parts
    assert [part.owner for part in parts] == [0, 2]
    assert parts[0].start == 0
    assert parts[0].count == parts[1].start
    assert parts[1].start + parts[1].count == 1_000_003
