"""Sets of positions, as sorted half-open runs (first, end) that neither touch nor overlap."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

Run = tuple[int, int]
Runs = tuple[Run, ...]

MAX_POSITION = 1 << 62


def union(*sets: Iterable[Run]) -> Runs:
    """Positions that are in any of the sets."""
    merged: list[Run] = []
    begins = stops = -1  # of the run that is not in `merged` yet
    for first, end in sorted(chain(*sets)):
        if first > stops:
            if stops >= 0:
                merged.append((begins, stops))
            begins, stops = first, end
        elif end > stops:
            stops = end
    if stops >= 0:
        merged.append((begins, stops))
    return tuple(merged)


def difference(runs: Runs, without: Runs) -> Runs:
    """Positions of `runs` that are not in `without`."""
    left: list[Run] = []
    for first, end in runs:
        at = bisect_left(without, (first,))
        if at and without[at - 1][1] > first:
            first = min(end, without[at - 1][1])
        while at < len(without) and without[at][0] < end:
            begins, stops = without[at]
            if first < begins:
                left.append((first, begins))
            first = min(end, stops)
            at += 1
        if first < end:
            left.append((first, end))
    return tuple(left)


def intersection(one: Runs, other: Runs) -> Runs:
    """Positions that are in both sets."""
    return difference(one, difference(one, other))


def size(runs: Iterable[Run]) -> int:
    """How many positions there are."""
    return sum(end - first for first, end in runs)


def head(runs: Iterable[Run], count: int) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """The first `count` positions in the given order, and the rest; runs may be in any order."""
    taken: list[Run] = []
    rest: list[Run] = []
    for first, end in runs:
        cut = min(end, first + count)
        if first < cut:
            taken.append((first, cut))
        if cut < end:
            rest.append((cut, end))
        count -= cut - first
    return tuple(taken), tuple(rest)


def pieces(runs: Runs, block: int) -> int:
    """How many pieces of at most `block` positions the runs fall into."""
    return sum(-(-(end - first) // block) for first, end in runs)


def first_piece(free: Runs, taken: Runs, block: int, place: int, of: int, least: int = 0) -> Runs:
    """What is left of the first piece that is not all in `taken`. `free` falls into pieces of at most `block`
    positions, numbered through all its runs; from `least` on, those with the numbers place, place + of, ...
    count.
    """
    number = 0  # of the run's first piece
    for first, stop in free:
        for begins, ends in difference(((first, stop),), taken):
            inside = max((begins - first) // block, least - number)
            inside += (place - number - inside) % of
            at = first + inside * block
            if at < ends:
                return difference(((at, min(at + block, stop)),), taken)
        number += pieces(((first, stop),), block)
    return ()


def lowest_free(used: Runs, count: int) -> Runs:
    """The `count` lowest positions that are not in `used`."""
    return head(difference(((0, (used[-1][1] if used else 0) + count),), used), count)[0]


def packed(runs: Iterable[Run]) -> list[int]:
    """A flat list for msgpack: of each run, how far it begins behind the one before, and its length."""
    flat: list[int] = []
    at = 0
    for first, end in runs:
        flat += [first - at, end - first]
        at = end
    return flat


def unpacked(value: Any, most: int) -> Runs:
    """What `packed` made of a set of at most `most` runs. Raises ValueError for anything else."""
    if type(value) is not list or len(value) % 2 or len(value) > 2 * most:
        raise ValueError("runs of positions are malformed")
    runs: list[Run] = []
    at = 0
    for gap, length in zip(value[::2], value[1::2], strict=True):
        if type(gap) is not int or type(length) is not int or gap < (1 if runs else 0) or length < 1:
            raise ValueError("runs of positions are malformed")
        first, at = at + gap, at + gap + length
        if at > MAX_POSITION:
            raise ValueError("a position is too large")
        runs.append((first, at))
    return tuple(runs)


def by_pass(runs: Iterable[Run], length: int) -> Sequence[tuple[int, int, int]]:
    """(pass, first, end) of each run, cut where passes of `length` positions end."""
    cut: list[tuple[int, int, int]] = []
    for first, end in runs:
        while first < end:
            number = first // length
            stop = min(end, (number + 1) * length)
            cut.append((number, first - number * length, stop - number * length))
            first = stop
    return cut
