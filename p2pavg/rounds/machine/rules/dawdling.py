"""Which leaders keep a member waiting, round after round, for longer than rounds need. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from p2pavg.rounds.protocol.ballot import PeerId

KEPT = 8  # rounds of each leader that are remembered
MOST_SLOW = 5  # of these, the last two among them, may take too long: a slow member is left out before
SLACK_S = 0.5  # seconds that a round may wait, whatever is measured
STEPS = 1.0  # own steps that a round may wait: for those that come to their boundary later
TRANSFERS = 2.0  # own transfers that a round may wait: for those whose links are slower
USUAL = 2.0  # times as long as under other leaders


@dataclass(slots=True)
class _Led:
    waited: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    slow: deque[bool] = field(default_factory=lambda: deque(maxlen=KEPT))


class Dawdling:
    """How long this peer waited in the rounds of each leader, the transfer itself left out.

    A leader that waits for slow members is no slower than the next one: whoever loses the lead without a
    reason leaves behind what the others may take, so that leads do not go round and round.
    """

    def __init__(self) -> None:
        self._led: dict[PeerId, _Led] = {}

    def add(self, leader: PeerId, waited: float, allowed: float) -> None:
        """A round of this leader ended after so many seconds of waiting. allowed: what explains itself."""
        led = self._led.setdefault(leader, _Led())
        led.waited.append(waited)
        led.slow.append(waited > allowed + USUAL * self.usual(leader))

    def usual(self, leader: PeerId) -> float:
        """Seconds of waiting in rounds that others led; 0.0 while nobody else has led one."""
        others = [seconds for peer, led in self._led.items() if peer != leader for seconds in led.waited]
        return median(others) if others else 0.0

    def is_slow(self, leader: PeerId) -> bool:
        """Whether this peer says of the leader that it keeps others waiting, and goes on with it."""
        led = self._led.get(leader)
        return led is not None and sum(led.slow) >= MOST_SLOW and led.slow[-1] and led.slow[-2]

    def relieve(self, leader: PeerId) -> None:
        """It leads no more. If it comes to lead again, it is judged by its rounds since."""
        led = self._led.get(leader)
        if led is not None:
            led.slow.clear()


def allowed(rtt: float, step: float, transfer: float) -> float:
    """Seconds that a round may keep a member waiting whose own step and transfer took so long."""
    return SLACK_S + 4 * rtt + STEPS * step + TRANSFERS * transfer
