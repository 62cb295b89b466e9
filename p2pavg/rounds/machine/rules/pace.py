"""How far a peer will be soon: samples come in steps, and the last step tells when the next ends. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TOLERANCE = 0.25  # of a step: samples that are due so soon count as counted
STOP_EARLY = 0.5  # of a step: rather than begin another step, a peer waits so long for the others
OVERDUE_STEPS = 2.0  # steps: a peer whose next step takes longer is not counted on
DELAY_S = 0.3  # seconds: the age that a report may have


@dataclass(frozen=True, slots=True)
class Pace:
    """One training thread's steps. Times are seconds of the clock of the peer that watches."""

    seconds: float = 0.0  # of one step; 0.0: unknown
    samples: int = 0  # of one step
    since: float = 0.0  # when the step under way began

    def boundary(self, now: float) -> float:
        """When the step under way ends; `now` if the end is overdue or unknown."""
        return max(now, self.since + self.seconds)

    def more(self, at: float, now: float) -> int:
        """Samples that the training thread will have counted until `at`, beyond those that it told."""
        if self.seconds <= 0 or now > self.since + OVERDUE_STEPS * self.seconds + DELAY_S:
            return 0
        return self.samples * max(0, int((at - self.since) / self.seconds + TOLERANCE))

    def coming(self, at: float, since: float) -> int:
        """Samples that the training thread will count until `at`, in steps from `since` on, if nobody stops
        it.
        """
        return self.samples * max(0, int((at - since) / self.seconds)) if self.seconds > 0 else 0


UNKNOWN = Pace()


def own_share(samples: Sequence[int], rank: int, target: int, step: int) -> int:
    """Samples of `target` that this rank will bring if all bring their last shares, in whole steps, one at
    least.
    """
    total, step = sum(samples), max(1, step)
    share = target * samples[rank] / total if total else 0.0
    return min(target, max(1, round(share / step)) * step)
