"""What a person has to hear of what the machine decided."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from p2pavg.identity import short_id
from p2pavg.printable import size
from p2pavg.rounds.machine import actions as act
from p2pavg.transport.links.carried import Way
from p2pavg.transport.links.link import Link

logger = logging.getLogger("p2pavg.rounds")


def tell(action: act.Hold | act.Stretch | act.Orphaned) -> None:
    """One line."""
    match action:
        case act.Hold(peer, asked):
            logger.warning(
                "rounds wait for newcomer %s, for at most %.0f s in all: its link takes %.1f Mb/s, for "
                "%s of state and %s of results an epoch; longer epochs (a larger "
                "target_batch_size) or compression='int8' spare the wait",
                short_id(peer),
                asked.seconds,
                asked.link_bps / 1e6,
                size(asked.state_bytes),
                size(asked.result_bytes),
            )
        case act.Stretch(spacing):
            logger.warning(
                "epochs count more samples than target_batch_size, and rounds are at least %.3g s apart: a "
                "round costs $%.4g of egress, and max_egress_usd_per_hour is %g",
                spacing.seconds,
                spacing.dollars,
                spacing.usd_per_hour,
            )
        case act.Orphaned():
            logger.warning(
                "the members that have the state of this run are gone, and this peer has none of it; it "
                "waits for one of them to come back. To begin a run anew, start it without initial_peers"
            )


class RelayNotice:
    """Says once to which peers gradients take a relay, because nobody else reaches both."""

    def __init__(self, me: bytes) -> None:
        self._me = me
        self._told: set[bytes] = set()

    def opened(self, attempt: act.OpenJob, links: Mapping[bytes, Link]) -> None:
        """A transfer is prepared."""
        peers = [seat.peer for seat in attempt.members]
        needed = attempt.plan.neighbours(peers.index(self._me), len(peers))
        for peer in sorted({peers[rank] for rank in needed} - self._told):
            if peer in links and links[peer].way is Way.RELAYED:
                self._told.add(peer)
                logger.warning(
                    "gradients between this peer and %s travel through a member that relays them within its "
                    "cap, as nobody else reaches both; an open or forwarded port of one of the two is faster",
                    short_id(peer),
                )
