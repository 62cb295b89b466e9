"""How far apart rounds must be, so that what they send costs no more an hour than is allowed. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_TIMES = 4.0  # the own interval: a leader that lets a peer compute on for longer is not believed


@dataclass(frozen=True, slots=True)
class Spacing:
    """What a round of a group is predicted to cost, and the most that rounds may cost in an hour."""

    dollars: float
    usd_per_hour: float

    @property
    def seconds(self) -> float:
        """From one round to the next one, at least."""
        return 3600 * self.dollars / self.usd_per_hour


@dataclass(slots=True)
class Spent:
    """When the last round was, and how many attempts it took: each attempt sent as much, at most."""

    began_at: float = -math.inf
    attempts: int = 1

    def next_round(self, spacing: Spacing) -> float:
        """When the next round may begin."""
        return self.began_at + spacing.seconds * max(1, self.attempts)

    def believed_until(self, spacing: Spacing) -> float:
        """Until when a peer that would wait itself as `spacing` says lets a leader have it compute on."""
        return self.began_at + MOST_TIMES * spacing.seconds * max(1, self.attempts)
