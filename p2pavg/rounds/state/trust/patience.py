"""How long a donor is waited for: one that says that it is busy, and one that owes what it was asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

ANSWER_S = 8.0  # to a question for the state, and until a busy donor gets further
COPIED_BPS = 100e6  # bytes/s: a donor copies and hashes its state at least as fast, beside its training
SLOWEST_BPS = 62.5e3  # bytes/s: what is wanted comes at least as fast, on average
MOST_OWED = 2 << 20  # bytes before what is wanted, on the way from a donor whose rate is not known
MOST_RTT_S = 1.0  # of a link that is waited for
PAUSED_S = 0.5  # between two looks: for longer, this process was stopped, and nothing could come
STATE_BYTES = 16  # for each element of the gradient: parameters, and what an optimizer keeps


class Patience:
    """With one donor, from the first question on. A busy one says how large its state is, how much of it is
    copied, and how long it rests before it begins. As long as it gets further it is waited for, but for no
    longer than a state of the size that this peer expects may take, whatever it says.
    """

    def __init__(self, now: float, numel: int) -> None:
        """numel: of the gradient."""
        self._began_at = now
        self._until = now + ANSWER_S
        self._expected = STATE_BYTES * numel
        self._bytes = self._done = 0

    def busy(self, now: float, answer: Mapping[str, Any]) -> None:
        """It is, and this is what it says."""
        total, done, rest = answer.get("bytes"), answer.get("done"), answer.get("rest")
        if type(total) is int:
            self._bytes = max(self._bytes, min(total, self._expected))
        if type(rest) is float and math.isfinite(rest) and rest > 0:
            self._until = max(self._until, now + rest + ANSWER_S)
        if type(done) is int and done > self._done:
            self._done = done
            self._until = max(self._until, now + ANSWER_S)

    def left(self, now: float) -> float:
        """Seconds; 0.0 or less: it is over."""
        most = self._began_at + ANSWER_S + self._bytes / COPIED_BPS
        return min(self._until, most) - now


class Credit:
    """Seconds in which a donor has to bring something of what it owes. Only bytes that are wanted, and right,
    earn more: whatever else its link brings counts for nothing, and so does a little of it now and then.
    """

    def __init__(self, most: float) -> None:
        self.left = most

    def passed(self, seconds: float) -> None:
        """While it owed something."""
        self.left -= min(seconds, PAUSED_S)

    def brought(self, nbytes: int, most: float) -> None:
        """It did."""
        self.left = max(self.left, min(most, self.left + nbytes / SLOWEST_BPS))


def most_credit(rtt_s: float, owed: int, rate: float) -> float:
    """Seconds for a donor that owes so many bytes. rate: bytes/s that it has brought; 0.0: not known."""
    slowest = min(MOST_OWED / SLOWEST_BPS, owed / max(SLOWEST_BPS, rate / 4))
    return ANSWER_S + 4 * min(rtt_s, MOST_RTT_S) + slowest
