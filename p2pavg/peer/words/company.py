"""Company: tells a person when this peer reaches nobody, hears nobody any more, or hears somebody again."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Set

from p2pavg.membership import PeerInfo
from p2pavg.membership.table.address import format_host_port
from p2pavg.peer.words.notice import tell
from p2pavg.printable import counted

logger = logging.getLogger("p2pavg.peer.peer")

ALONE_S = 2.0  # seconds without anybody, below which the person is told nothing
UNREACHED_S = 5.0  # seconds in which none of those in view could be linked
NAMED = 3  # addresses of these


class Company:
    """Compares who is heard now with who was heard before. Runs on the loop."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._before: Set[bytes] = frozenset()  # the peers that were heard at the last look
        self._alone_since: float | None = None
        self._told = False
        self._unreached_since: float | None = None
        self._told_of_unreached = False

    def look(self, heard: Set[bytes], left: Set[bytes], in_view: Collection[PeerInfo]) -> None:
        """heard: peers with a link from which something comes. left: who said that it leaves. in_view: the
        trainers that the table knows.
        """
        now = time.monotonic()
        self._look_beyond([] if heard or self._before else in_view, now)
        if heard:
            if self._told:
                tell("%s of run %r heard again", counted(len(heard), "peer"), self._run_id)
            self._before, self._alone_since, self._told = set(heard), None, False
            return
        self._before = self._before - left
        if not self._before or self._told:
            return
        if self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since >= ALONE_S:
            self._told = True
            logger.warning(
                "nobody of run %r is heard any more (%s before): this peer goes on alone, and tries to reach "
                "them again",
                self._run_id,
                counted(len(self._before), "peer"),
            )

    def _look_beyond(self, unreached: Collection[PeerInfo], now: float) -> None:
        """unreached: the trainers in view, while nobody was ever heard."""
        addresses = [
            format_host_port(host, port)
            for info in unreached
            if not info.client_only
            for host, port in info.addresses[:1]
        ]
        if not addresses or self._told_of_unreached:
            self._unreached_since = None
        elif self._unreached_since is None:
            self._unreached_since = now
        elif now - self._unreached_since >= UNREACHED_S:
            self._told_of_unreached = True
            logger.warning(
                "run %r has peers at %s, but none of them answers over TCP; open that port for TCP there, "
                "unless they have ended. This peer trains alone until one answers",
                self._run_id,
                ", ".join(addresses[:NAMED]) + (" and others" if len(addresses) > NAMED else ""),
            )
