"""How fast the streams of a link may send, once its path has shown that it is full. Pure.

Streams that do not know their path send whole windows at once, all of them together: what the queue before
the narrowest hop cannot hold is lost, and the rest waits in it. So after losses, or long queues, a link's
streams are held to twice what all of them were seen to deliver. Twice, because the last ones to have
something left should still fill the path, and because a path that became faster should be noticed.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from p2pavg.transport.engine import StreamStats

ROUNDS_KEPT = 16
_HEADROOM = 2.0
_SEGMENT_BYTES = 1448  # of TCP, between clouds as at home
_LOSS, _FEW_SEGMENTS = 0.005, 8  # less may be chance
_QUEUE_RTTS, _QUEUE_S = 1.5, 0.02  # round trips under load that take longer have waited in a queue
_ENOUGH_BYTES = 256 << 10  # what is sent before tells nothing of a queue
_LEAST_CHANGE = 1.25  # ratio of a wanted rate to the one set, below which setting it is not worth the calls


class LinkPace:
    """One direction of one link."""

    def __init__(self) -> None:
        self._best: deque[float] = deque(maxlen=ROUNDS_KEPT)  # bytes/s delivered, a round each
        self._current = 0.0
        self._before: tuple[int, int] | None = None  # (bytes sent, segments sent again) when a round began
        self._full = False
        self._set = 0.0
        self._streams: frozenset[int] = frozenset()

    def observe(self, sent: int, rtt_s: float, streams: Sequence[StreamStats]) -> float | None:
        """When a round begins to transfer, and while it does. sent: bytes handed to the kernel so far. rtt_s:
        of the idle path.

        Returns what each stream may send from now on, in bytes/s; None: no change.
        """
        if not streams:
            return None
        self._current = max(self._current, sum(row.delivery_rate_bps for row in streams) / 8)
        self._full = self._full or self._is_full(sent, rtt_s, streams)
        rate = max((self._current, *self._best))
        if not self._full or rate <= 0:
            return None
        wanted, numbers = _HEADROOM * rate / len(streams), frozenset(row.stream for row in streams)
        if numbers == self._streams and self._set / _LEAST_CHANGE < wanted < self._set * _LEAST_CHANGE:
            return None
        self._set, self._streams = wanted, numbers
        return wanted

    def _is_full(self, sent: int, rtt_s: float, streams: Sequence[StreamStats]) -> bool:
        again = sum(row.retransmits for row in streams)
        before = self._before = self._before or (sent, again)
        lost = again - before[1]
        if lost > _FEW_SEGMENTS and lost * _SEGMENT_BYTES > _LOSS * (sent - before[0]):
            return True
        loaded = [row.rtt_s for row in streams if row.unacked_bytes]
        enough = sent - before[0] > _ENOUGH_BYTES and loaded
        return bool(enough) and statistics.median(loaded) > _QUEUE_RTTS * rtt_s + _QUEUE_S

    def round_over(self) -> float | None:
        """No round transfers any more: whatever else the streams carry is not held back. Returns as
        `observe`.
        """
        if self._current > 0:
            self._best.append(self._current)
        self._current = 0.0
        self._before = None
        if not self._set:
            return None
        self._set, self._streams = 0.0, frozenset()
        return math.inf
