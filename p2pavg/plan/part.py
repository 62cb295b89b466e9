"""A part: the slice of the flat vector that one member reduces."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A contiguous slice [start, start + count) of the flat vector, reduced by rank `owner`; may be empty.

    deputies: ranks that stand between the owner and the other members of their own group, one for each group
    that has one; see `p2pavg.plan`. swaps: the owner and its only deputy give each other their partial means,
    and each of both makes the result of the two.
    """

    owner: int
    start: int
    count: int
    deputies: tuple[int, ...] = ()
    swaps: bool = False
