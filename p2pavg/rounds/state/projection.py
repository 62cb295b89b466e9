"""When a newcomer will be in, from its link and how fast results come; whether rounds must wait. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

EPOCHS_KNOWN = 8  # whose times tell how long one is
WINDOW_S = 3.0  # the link's rate is the best of the last seconds
RATE_S, RATE_TRIPS = 1.0, 4  # over so long, and so many round trips: what a lost packet held back is in it
LEAST_S, LEAST_TRIPS = 0.4, 2  # of a transfer, and round trips, before anything is said of its rate
BEGUN_BYTES = 16 << 10  # that came: the state is on its way, and not only words
GROWS = 1.5  # a link that brought so many times as much lately as before is not at its rate yet
PROBE_S, PROBE_TRIPS = 0.5, 4  # after so long, and so many round trips, it is taken for what it brings
FITS = 0.5  # of a link that results may take: no round waits for a newcomer whose state comes beside them
ALLOWED = 2.0  # times the state's own time, and an epoch, that a newcomer may take before rounds wait for it
HELD = (
    1.5  # times the time of the state, or of the results that it lacks where they are more: rounds may wait
)
HELD_S = 2.0  # so long in all, and so many seconds, however fast it comes: round trips, and loading
SPARE = 1  # results that it may lack when a round begins, while its state is on its way
FAR_TRIPS = 2  # round trips that last longer than an epoch: results would pile up before it can say a word
RELEASED = 0.7  # times as long as it may take, which it then expects to need: rounds need not wait any more
TRIPS = (
    3  # round trips from a COMMIT to a newcomer that has its result and says so, streams' windows included
)
MOST_OF_EPOCH = 0.6  # that this may take: who is late by a moment lacks the next result, and so on for ever
CLOSE_S = 0.5  # what is lacking takes less: rounds may wait for the rest
LEAST_ALLOWED_S = 1.0  # that a newcomer may take, however late it is already
TRIED_EPOCHS, TRIED_S = 2.0, 1.0  # how long it tries to get in without a round that waits for it
ENDS_S = 3.0  # of a newcomer for which rounds wait anyway: none begins before it has everything


class EpochTimes:
    """When the last epochs ended, those in which rounds waited for somebody left out."""

    def __init__(self) -> None:
        self._ended: deque[float] = deque(maxlen=EPOCHS_KNOWN)

    def add(self, now: float) -> None:
        """An epoch has ended."""
        self._ended.append(now)

    @property
    def usual_s(self) -> float:
        """Seconds of an epoch lately; 0.0: not known."""
        ended = list(self._ended)
        return max(1e-3, median(b - a for a, b in pairwise(ended))) if len(ended) > 1 else 0.0


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


def from_the_start(epoch_s: float, rtt_s: float) -> Wish | None:
    """What is asked for a newcomer as soon as it asks for the state; None: nothing, it says so itself when it
    knows more. epoch_s: 0.0: not known.
    """
    if not 0 < epoch_s < FAR_TRIPS * rtt_s:
        return None
    # The newcomer begins to look at its link a round trip later, and its word takes half of one to arrive.
    return Wish(0, PROBE_S + (PROBE_TRIPS + FAR_TRIPS) * rtt_s)


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
        self._owed = 0  # bytes that it lacked of results when rounds had to wait first
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
        self._last = at
        if self._began_at is None:
            if not at.total and not at.results:
                return
            self._began_at = now
        self._look(now, received)
        if math.isinf(self._epoch_s) and epochs >= 1 and epochs_s > 0:
            self._epoch_s = epochs_s / epochs
        late = now - self._began_at > PROBE_S + PROBE_TRIPS * self._rtt_s
        self._knows = self._knows or (self.bytes_per_second > 0 and (late or not self._grows()))
        self.paced = self._knows and self._has_to_wait(now)
        if self.paced and not self._owed:
            self._owed = at.lacking

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
        """What the link brings; 0.0: not known yet. The best that it brought over some round trips: a stream
        that waits for a lost packet hands on nothing meanwhile, and all of it then.
        """
        if not self._seen:
            return 0.0
        span = self._seen[-1][0] - self._seen[0][0]
        if span < max(LEAST_S, LEAST_TRIPS * self._rtt_s):
            return 0.0
        span = min(span, max(RATE_S, RATE_TRIPS * self._rtt_s))
        best, first = 0.0, 0
        for now, came in self._seen:
            while first + 1 < len(self._seen) and now - self._seen[first + 1][0] >= span:
                first += 1
            since, before = self._seen[first]
            if now - since >= span:
                best = max(best, (came - before) / (now - since))
        return best

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
        return HELD_S + (HELD * max(self._last.total, self._owed) / rate if rate > 0 else 0.0)

    def wish(self, now: float, *, loaded: bool) -> Wish | None:
        """What to ask of the rounds; None: nothing. loaded: the state is here, and in use.

        Until the link's rate is known they wait as if it were slow, for a moment: the results of that time
        would have to come over a slow link, too. So they do for a peer that has its state, or needs none, and
        lacks several results: where epochs are short, these become hundreds before it knows its link. Near
        its end they wait for all of it, since each further result would cost such a link more than an epoch
        takes.
        """
        if self.paced:
            self._ends = self._ends or loaded or self.paced_s() < ENDS_S
            return Wish(0 if self._ends else SPARE, self.held_s)
        probing = Wish(SPARE, PROBE_S + PROBE_TRIPS * self._rtt_s)
        outrun = self.left > self._last.result and 2 * self._epoch_s < probing.seconds
        if not self._knows and (outrun if loaded else self._last.total):
            return from_the_start(self._epoch_s, self._rtt_s) or probing
        if not loaded or not self._close():
            return None
        self._close_at = now if self._close_at is None else self._close_at
        tried_in_vain = now >= self._close_at + TRIED_S + TRIED_EPOCHS * self._epoch_s
        return None if self._slips_in() and not tried_in_vain else Wish(0, self.held_s)

    def _close(self) -> bool:
        """What is lacking will be here in a moment, if rounds wait."""
        return self.paced_s() < CLOSE_S or 0 < self.left <= self._last.result

    def _slips_in(self) -> bool:
        """Whether the next result is here long before the one after it, so that no round has to wait. Not
        before the link is known: a peer that was level and missed a round by a moment would miss each one.
        """
        rate = self.bytes_per_second
        if rate <= 0:
            return False
        return TRIPS * self._rtt_s + self._last.result / rate < MOST_OF_EPOCH * self._epoch_s

    def _has_to_wait(self, now: float) -> bool:
        rate, began = self.bytes_per_second, self._began_at
        if rate <= 0 or began is None or not self._last.result:
            return False
        if self._last.result / self._epoch_s <= (RELEASED if self.paced else 1.0) * FITS * rate:
            return False
        allowed = max(LEAST_ALLOWED_S, ALLOWED * self._last.total / rate + self._epoch_s - (now - began))
        return self.remaining_s() > (RELEASED * allowed if self.paced else allowed)
