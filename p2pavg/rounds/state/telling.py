"""What a newcomer says while it downloads: a line at its start, then more rarely, and its figures."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from p2pavg.printable import size
from p2pavg.rounds.state.projection import DownloadProgress, Projection

logger = logging.getLogger("p2pavg.state")

FIRST_S = 1.0
RARER = 2.5  # times as long between two lines as before


@dataclass(frozen=True, slots=True)
class Joined:
    """What it took to get in: seconds from the first question to the last result, and bytes."""

    epoch: int  # that this peer can take part in first
    seconds: float
    state_bytes: int
    result_bytes: int
    results: int


class Telling:
    """One download's lines. They are warnings: whoever configured no logging sees why nothing trains yet."""

    def __init__(self, now: float) -> None:
        self._began_at = now
        self._at = now + FIRST_S
        self._pause = FIRST_S
        self._paced = False

    def begins(self, epoch: int, nbytes: int, donors: int) -> None:
        """The donors have answered."""
        members = "1 member" if donors == 1 else f"{donors} members"
        logger.warning("joining: %s of state (epoch %d) come from %s", size(nbytes), epoch, members)

    def look(self, now: float, at: DownloadProgress, projection: Projection) -> None:
        """Say how far it is, if that is due."""
        if projection.paced and not self._paced:
            self._paced = True
            self._tell_paced(at, projection)
        if now < self._at:
            return
        self._pause *= RARER
        self._at = now + self._pause
        if not at.total and not at.lacking and not at.results:
            return  # nobody has offered anything yet
        remaining = projection.paced_s() if projection.paced else projection.remaining_s()
        end = (
            f"it ends in about {remaining:.0f} s" if math.isfinite(remaining) else "its end is not known yet"
        )
        logger.warning(
            "joining: %s of %s of state are here, %s of results, %s more wait; %.1f Mb/s, %s",
            size(at.state),
            size(at.total),
            size(at.results),
            size(at.lacking),
            8e-6 * projection.bytes_per_second,
            end,
        )

    def _tell_paced(self, at: DownloadProgress, projection: Projection) -> None:
        epoch_s = projection.epoch_seconds
        logger.warning(
            "joining: a result of %s every %.2f s (%.1f Mb/s) leaves too little of a link of %.1f Mb/s for "
            "%s of state: rounds wait for this peer, for at most %.0f s in all; longer epochs (a larger "
            "target_batch_size) or compression='int8' spare the wait",
            size(at.result),
            epoch_s,
            8e-6 * at.result / epoch_s,
            8e-6 * projection.bytes_per_second,
            size(at.total),
            projection.held_s,
        )

    def ends(self, now: float, epoch: int, at: DownloadProgress, results: int) -> None:
        """It is in."""
        logger.info(
            "joined at epoch %d after %.1f s: %s of state and %d results of %s",
            epoch,
            now - self._began_at,
            size(at.total),
            results,
            size(at.results),
        )
