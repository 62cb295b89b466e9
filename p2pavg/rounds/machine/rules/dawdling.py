"""The leaders that keep a member waiting, round after round, for longer than rounds need. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from p2pavg.rounds.protocol.ballot import PeerId

KEPT = 8  # rounds of each leader that are remembered
MOST_SLOW = 5  # of these, the last two among them, may take too long: a slow member is left out before
LEAST_SLOW = 2  # of a leader that was relieved for it again and again: one less each time
SLACK_S = 0.5  # seconds that a round may wait, whatever is measured
STEPS = 1.0  # own steps that a round may wait, for members that come to their boundary later
TRANSFERS = 2.0  # own transfers that a round may wait, for members whose links are slower
USUAL = 2.0  # times as long as under other leaders


@dataclass(slots=True)
class _Led:
    waited: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    slow: deque[bool] = field(default_factory=lambda: deque(maxlen=KEPT))
    relieved: int = 0  # times; as many rounds as are kept, none of them slow, make up for one


class Dawdling:
    """How long this peer waited in the rounds of each leader, the transfer itself left out.

    A leader that waits for slow members is no slower than the next one: whoever loses the lead without a
    reason leaves behind what the others may take, so that leads do not go round and round.
    """

    def __init__(self) -> None:
        self._led: dict[PeerId, _Led] = {}

    def add(self, leader: PeerId, waited: float, allowed: float) -> None:
        """A round of this leader ended after so many seconds of waiting. allowed: seconds that need no
        reason.
        """
        led = self._led.setdefault(leader, _Led())
        led.waited.append(waited)
        led.slow.append(waited > allowed + USUAL * self.usual(leader))
        if led.relieved and len(led.slow) == KEPT and not any(led.slow):
            led.relieved -= 1
            led.slow.clear()

    def usual(self, leader: PeerId) -> float:
        """Seconds of waiting in rounds that other peers led; 0.0 while no other peer has led one."""
        others = [seconds for peer, led in self._led.items() if peer != leader for seconds in led.waited]
        return median(others) if others else 0.0

    def is_slow(self, leader: PeerId) -> bool:
        """Whether the leader keeps this peer waiting, and goes on doing so."""
        led = self._led.get(leader)
        if led is None:
            return False
        return sum(led.slow) >= max(LEAST_SLOW, MOST_SLOW - led.relieved) and led.slow[-1] and led.slow[-2]

    def relieve(self, leader: PeerId) -> None:
        """The leader leads no more. If the same peer leads again later, only its rounds from then on
        are judged, by less patience.
        """
        led = self._led.get(leader)
        if led is not None:
            led.slow.clear()
            led.relieved += 1


def allowed(rtt: float, step: float, transfer: float) -> float:
    """Seconds for which a round may keep a member waiting, given how long the member's step and
    transfer took.
    """
    return SLACK_S + 4 * rtt + STEPS * step + TRANSFERS * transfer
