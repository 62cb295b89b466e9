"""When state gives way to gradients that leave this peer, and when it does not. Pure."""

from __future__ import annotations

MOST_S = 0.5  # that state waits at a time
RATIO = 0.5  # seconds that it may wait for each second in which it did not


class Yielding:
    """State waits while a round's gradients are on their way, but never for more than a third of the time:
    where rounds follow each other without a pause, it would wait for ever.
    """

    def __init__(self, now: float) -> None:
        self._left = MOST_S
        self._at = now
        self._waited = False

    def waits(self, now: float, moving: bool) -> bool:
        """Whether nothing may go out now. moving: gradients are on their way."""
        passed, self._at = now - self._at, now
        if self._waited:
            self._left = max(0.0, self._left - passed)
        else:
            self._left = min(MOST_S, self._left + RATIO * passed)
        # Once it is used up, the state goes on for a while, and not only for a moment.
        self._waited = moving and (self._left > 0 if self._waited else self._left >= MOST_S / 5)
        return self._waited
