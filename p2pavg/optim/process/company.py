"""Peers that a launcher starts together begin together: `P2PAVG_PEERS` says how many they are."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from p2pavg import kinds
from p2pavg.printable import counted

log = logging.getLogger("p2pavg.optim.process.company")
VARIABLE = "P2PAVG_PEERS"
WAIT_S = 60.0  # for those that were started with this one


def wanted() -> int:
    """How many peers begin together; 1: nobody said. Raises ConfigurationError."""
    return kinds.whole_of(VARIABLE, os.environ.get(VARIABLE, "1"), 1, kinds.MOST_PEERS)


def await_company(peers: int, wait: Callable[[int, float], int]) -> None:
    """Wait until `peers` are there, this one among them. Says so where they do not come.

    wait: as `Peer.wait_for_peers`.
    """
    if peers > 1 and (company := wait(peers - 1, WAIT_S)) < peers - 1:
        there = f"{counted(company + 1, 'peer')} {'are' if company else 'is'}"
        log.warning(
            "only %s there of the %d that were started together, after %.0f s: training begins without the "
            "others, which join when they come",
            there,
            peers,
            WAIT_S,
        )
