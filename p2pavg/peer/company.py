"""Company: tells a person when this peer hears nobody any more, and when it hears somebody again."""

from __future__ import annotations

import logging
import time
from collections.abc import Set

from p2pavg.peer.notice import tell
from p2pavg.printable import counted

logger = logging.getLogger("p2pavg.peer.peer")

ALONE_S = 2.0  # seconds without anybody, below which the person is told nothing


class Company:
    """Compares who is heard now with who was heard before. Runs on the loop."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._before: Set[bytes] = frozenset()  # the peers that were heard at the last look
        self._alone_since: float | None = None
        self._told = False

    def look(self, heard: Set[bytes], left: Set[bytes]) -> None:
        """heard: peers with a link from which something comes. left: who said that it leaves."""
        now = time.monotonic()
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
