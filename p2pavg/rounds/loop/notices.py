"""What a person has to hear of what the machine decided about newcomers."""

from __future__ import annotations

import logging

from p2pavg.identity import short_id
from p2pavg.rounds.machine import actions as act

logger = logging.getLogger("p2pavg.rounds")


def tell(action: act.Hold | act.Orphaned) -> None:
    """One line."""
    match action:
        case act.Hold(peer, asked):
            logger.warning(
                "rounds wait for newcomer %s, for at most %.0f s in all: its link takes %.1f Mb/s, for "
                "%.1f MB of state and %.1f MB of results an epoch; longer epochs (a larger "
                "target_batch_size) or compression='int8' spare the wait",
                short_id(peer),
                asked.seconds,
                asked.link_bps / 1e6,
                asked.state_bytes / 1e6,
                asked.result_bytes / 1e6,
            )
        case act.Orphaned():
            logger.warning(
                "the members that have the state of this run are gone, and this peer has none of it; it "
                "waits for one of them to come back. To begin a run anew, start it without initial_peers"
            )
