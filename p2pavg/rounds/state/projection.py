"""When a newcomer will be in, from its link and how fast results come; whether rounds must wait. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

WINDOW_S = 3.0  # the link's rate is that of the last seconds
LEAST_S = 0.4  # of a transfer, before anything is said of its rate
ALLOWED = 2.0  # times the state's own time, and an epoch, that a newcomer may take before rounds wait for it
HELD = 1.5  # times the state's own time that rounds may wait for it, in all
TRIPS = 3  # round trips from a COMMIT to a newcomer that has its result and says so
MOST_OF_EPOCH = 0.7  # that this may take
CLOSE_S = 1.0  # what is lacking takes less: rounds may wait for the rest


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a download is. Bytes."""

    state: int  # verified
    total: int  # of the state
    results: int  # that came
    lacking: int  # of results that are known and not here
    result: int  # of one epoch


class Projection:
    """One newcomer's link and its swarm."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()  # (time, bytes that came)
        self._began_at: float | None = None
        self._last = Standing(0, 0, 0, 0, 0)
        self._epoch_s = math.inf
        self.paced = False  # rounds have to wait, from here on

    def observe(self, now: float, at: Standing, epochs: int, epochs_s: float) -> None:
        """epochs: that the swarm was seen to make in `epochs_s` seconds."""
        came = at.state + at.results
        if self._began_at is None:
            if not came and not at.total:
                return
            self._began_at = now
        self._last = at
        self._seen.append((now, came))
        while len(self._seen) > 2 and now - self._seen[1][0] > WINDOW_S:
            self._seen.popleft()
        if not self.paced and epochs >= 1 and epochs_s > 0:
            self._epoch_s = epochs_s / epochs
        if not self.paced:
            self.paced = self._has_to_wait(now)

    @property
    def bytes_per_second(self) -> float:
        """What the link brings; 0.0: not known yet."""
        if not self._seen:
            return 0.0
        (since, before), (now, came) = self._seen[0], self._seen[-1]
        return (came - before) / (now - since) if now - since >= LEAST_S else 0.0

    @property
    def epoch_seconds(self) -> float:
        """Of the swarm, while it did not wait; inf: not known yet."""
        return self._epoch_s

    @property
    def left(self) -> int:
        """Bytes that are to come."""
        return self._last.total - self._last.state + self._last.lacking

    def remaining_s(self) -> float:
        """Until everything is here, if no round waits; inf: never, or not known yet."""
        rate = self.bytes_per_second
        free = rate - self._last.result / self._epoch_s
        if self.left <= 0:
            return 0.0
        return self.left / free if free > 0 else math.inf

    def paced_s(self) -> float:
        """Until everything is here, if rounds wait; inf: not known yet."""
        rate = self.bytes_per_second
        return self.left / rate if rate > 0 else math.inf

    @property
    def held_s(self) -> float:
        """How long rounds may wait, in all."""
        rate = self.bytes_per_second
        return HELD * self._last.total / rate if rate > 0 else 0.0

    def close(self) -> bool:
        """What is lacking will be here in a moment, if rounds wait."""
        return self.paced_s() < CLOSE_S or self.left <= self._last.result

    def slips_in(self, rtt_s: float) -> bool:
        """Whether the next result is here long before the one after it, so that no round has to wait."""
        rate = self.bytes_per_second
        fetched = TRIPS * rtt_s + (self._last.result / rate if rate > 0 else 0.0)
        return not self.paced and fetched < MOST_OF_EPOCH * self._epoch_s

    def _has_to_wait(self, now: float) -> bool:
        rate, began = self.bytes_per_second, self._began_at
        if rate <= 0 or began is None or not self._last.result:
            return False
        allowed = ALLOWED * self._last.total / rate + self._epoch_s - (now - began)
        return self.remaining_s() > max(allowed, CLOSE_S)
