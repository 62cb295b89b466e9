"""How far a peer will be soon: samples come in steps, and the last one tells when the next ends. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TOLERANCE = 0.25  # of a step: samples due so soon count as there
STOP_EARLY = 0.5  # of a step: a peer waits so long for the others rather than begin another step
OVERDUE_STEPS = 2.0  # steps: a peer whose next step takes longer is not counted on
DELAY_S = 0.3  # seconds: a report may be so old


@dataclass(slots=True)
class Pace:
    """One training thread's steps. Times are seconds of the clock of the peer that watches."""

    seconds: float = 0.0  # of one step; 0.0: unknown
    samples: int = 0  # of one step
    since: float = 0.0  # when the step under way began

    def boundary(self, now: float) -> float:
        """When its step ends; `now` if that is overdue or unknown."""
        return max(now, self.since + self.seconds)

    def more(self, at: float, now: float) -> int:
        """Samples that it will have counted until `at` beyond those that it told."""
        if self.seconds <= 0 or now > self.since + OVERDUE_STEPS * self.seconds + DELAY_S:
            return 0
        return self.samples * max(0, int((at - self.since) / self.seconds + TOLERANCE))


def own_share(samples: Sequence[int], rank: int, target: int, step: int) -> int:
    """Samples of `target` that this rank will bring if all bring their last shares, in whole steps, one at
    least.
    """
    total, step = sum(samples), max(1, step)
    share = target * samples[rank] / total if total else 0.0
    return min(target, max(1, round(share / step)) * step)
