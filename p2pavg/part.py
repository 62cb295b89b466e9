"""A part: the slice of the flat vector that one member reduces."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A contiguous slice [start, start + count) of the flat vector, reduced by rank `owner`; may be empty."""

    owner: int
    start: int
    count: int
