"""Circles: whom each member of a large run tells of itself, and whom of others. Decisions without I/O.

All members in the order of their ids fall into circles of about the square root of their number, equal to
within one. Once an interval a member beats to those of its own circle, and a moment later tells its *charges*
outside what it heard from all of the circle: of every other circle, those at its own place. So each member
hears of each other one after two steps at most, in about two square roots of messages an interval instead of
one from everybody; over TCP, where a packet of 27 bytes costs 104 more of headers, that is what counts.

Members whose views differ for a moment draw different circles. Who is missed then asks somebody.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple


class Circle(NamedTuple):
    """One member's: ids without its own."""

    mates: list[bytes]
    charges: list[bytes]


def draw(own: bytes, others: Iterable[bytes]) -> Circle:
    """The circle of the member `own` in a run of it and `others`."""
    ranked = sorted({own, *others})
    circles = max(1, math.isqrt(len(ranked)))
    starts = [-(-number * len(ranked) // circles) for number in range(circles + 1)]
    found = [ranked[begin:end] for begin, end in itertools.pairwise(starts)]
    mates = next(circle for circle in found if own in circle)
    place = mates.index(own)
    charges = []
    for number, circle in enumerate(found):
        if circle is not mates:
            charges += circle[place : place + 1]
            if len(circle) > len(mates) and number % len(mates) == place:
                charges.append(circle[-1])  # the one that nobody of this smaller circle has the place of
    return Circle([mate for mate in mates if mate != own], charges)
