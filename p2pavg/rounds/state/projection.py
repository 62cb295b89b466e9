"""When a newcomer will be in, from its link and how fast results come; whether rounds must wait. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

WINDOW_S = 3.0  # the link's rate is that of the last seconds
LEAST_S, LEAST_TRIPS = 0.4, 2  # of a transfer, and round trips, before anything is said of its rate
BEGUN_BYTES = 16 << 10  # that came: the state is on its way, and not only words
GROWS = 1.5  # a link that brought so many times as much lately as before is not at its rate yet
PROBE_S, PROBE_TRIPS = 0.5, 4  # after so long, and so many round trips, it is taken for what it brings
ALLOWED = 2.0  # times the state's own time, and an epoch, that a newcomer may take before rounds wait for it
HELD = 1.5  # times the state's own time that rounds may wait for it, in all, and
HELD_S = 2.0  # so many seconds, however fast the state comes: round trips, and loading
SPARE = 1  # results that it may lack when a round begins, while its state is on its way
RELEASED = 0.7  # times as long as it may take, which it then expects to need: rounds need not wait any more
TRIPS = 2  # round trips from a COMMIT to a newcomer that has its result and says so
MOST_OF_EPOCH = 0.9  # that this may take
CLOSE_S = 1.0  # what is lacking takes less: rounds may wait for the rest
TRIED_EPOCHS, TRIED_S = 2.0, 1.0  # how long it tries to get in without a round that waits for it
ENDS_S = 3.0  # of a newcomer for which rounds wait anyway: none begins before it has everything


@dataclass(frozen=True, slots=True)
class DownloadProgress:
    """How far a download is. Bytes."""

    state: int  # verified
    total: int  # of the state
    results: int  # that came
    lacking: int  # of results that are known and not here
    result: int  # of one epoch


@dataclass(frozen=True, slots=True)
class Wish:
    """What rounds are asked for."""

    spare: int  # results that the newcomer may lack when one begins
    seconds: float  # how long they may wait, in all


class Projection:
    """One newcomer's link and its swarm."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()  # (time, bytes that the links brought)
        self._before: int | None = None  # what they had brought when the state was asked for
        self._began_at: float | None = None
        self._last = DownloadProgress(0, 0, 0, 0, 0)
        self._epoch_s = math.inf
        self._rtt_s = 0.0
        self._knows = False  # what the link brings
        self._close_at: float | None = None  # since when it needs a moment between two rounds, and no more
        self._ends = False  # no round begins any more
        self.paced = False  # rounds have to wait

    def swarm(self, epoch_s: float, rtt_s: float) -> None:
        """epoch_s: of an epoch, as the donors know it; 0.0: they do not. rtt_s: to the farthest of them."""
        self._epoch_s = epoch_s or math.inf
        self._rtt_s = rtt_s

    def observe(self, now: float, at: DownloadProgress, received: int, epochs: int, epochs_s: float) -> None:
        """received: what the links to all donors have brought, whatever it was. epochs: that the swarm was
        seen to make in `epochs_s` seconds, in case the donors do not know.
        """
        if self._began_at is None:
            if not at.total and not at.results:
                return
            self._began_at = now
        self._last = at
        self._look(now, received)
        if math.isinf(self._epoch_s) and epochs >= 1 and epochs_s > 0:
            self._epoch_s = epochs_s / epochs
        late = now - self._began_at > PROBE_S + PROBE_TRIPS * self._rtt_s
        self._knows = self._knows or (self.bytes_per_second > 0 and (late or not self._grows()))
        self.paced = self._knows and self._has_to_wait(now)

    def _look(self, now: float, received: int) -> None:
        if self._before is None or (self._seen and received < self._seen[-1][1]):  # a link broke
            self._before = received
            self._seen.clear()
        if not self._seen and received < self._before + BEGUN_BYTES:
            return
        self._seen.append((now, received))
        while len(self._seen) > 2 and now - self._seen[1][0] > WINDOW_S:
            self._seen.popleft()

    def _grows(self) -> bool:
        """Its streams have yet to find their windows."""
        (since, first), (now, last) = self._seen[0], self._seen[-1]
        at, half = next(seen for seen in self._seen if seen[0] >= (since + now) / 2)
        return (last - half) * (at - since) > GROWS * (half - first) * (now - at)

    @property
    def bytes_per_second(self) -> float:
        """What the link brings; 0.0: not known yet."""
        if not self._seen:
            return 0.0
        (since, before), (now, came) = self._seen[0], self._seen[-1]
        enough = now - since >= max(LEAST_S, LEAST_TRIPS * self._rtt_s)
        return (came - before) / (now - since) if enough else 0.0

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
        return HELD_S + (HELD * self._last.total / rate if rate > 0 else 0.0)

    def wish(self, now: float, *, loaded: bool) -> Wish | None:
        """What to ask of the rounds; None: nothing. loaded: the state is here, and in use.

        Until the link's rate is known they wait as if it were slow, for a moment: the results of that time
        would have to come over a slow link, too. Near its end they wait for all of it, since each further
        result would cost such a link more than an epoch takes.
        """
        if self.paced:
            self._ends = self._ends or loaded or self.paced_s() < ENDS_S
            return Wish(0 if self._ends else SPARE, self.held_s)
        if not self._knows and self._last.total and not loaded:
            return Wish(SPARE, PROBE_S + PROBE_TRIPS * self._rtt_s)
        if not loaded or not self._close():
            return None
        self._close_at = now if self._close_at is None else self._close_at
        tried_in_vain = now >= self._close_at + TRIED_S + TRIED_EPOCHS * self._epoch_s
        return None if self._slips_in() and not tried_in_vain else Wish(0, self.held_s)

    def _close(self) -> bool:
        """What is lacking will be here in a moment, if rounds wait."""
        return self.paced_s() < CLOSE_S or self.left <= self._last.result

    def _slips_in(self) -> bool:
        """Whether the next result is here long before the one after it, so that no round has to wait."""
        rate = self.bytes_per_second
        fetched = TRIPS * self._rtt_s + (self._last.result / rate if rate > 0 else 0.0)
        return fetched < MOST_OF_EPOCH * self._epoch_s

    def _has_to_wait(self, now: float) -> bool:
        rate, began = self.bytes_per_second, self._began_at
        if rate <= 0 or began is None or not self._last.result:
            return False
        allowed = max(CLOSE_S, ALLOWED * self._last.total / rate + self._epoch_s - (now - began))
        return self.remaining_s() > (RELEASED * allowed if self.paced else allowed)
