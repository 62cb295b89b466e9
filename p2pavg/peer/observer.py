"""Observer: tells a person what happens around this peer and is not its own doing. On the loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Set

from p2pavg.peer import crowd
from p2pavg.peer.company import Company
from p2pavg.peer.notice import tell
from p2pavg.printable import counted
from p2pavg.rounds.loop.hello import trains
from p2pavg.transport.links.budget import MAX_LINKS
from p2pavg.transport.links.link import Link

logger = logging.getLogger("p2pavg.peer.peer")


class Observer:
    """Where this peer joined, who is heard, from where links begin, whose threads are too many."""

    def __init__(
        self,
        run_id: str,
        links: Mapping[bytes, Link],
        is_here: Callable[[str], bool],
        stands: Callable[[], tuple[int, bool]],
        threads: int,
    ) -> None:
        """links: by peer, a live view. is_here: whether an address is one of this machine. stands: (epoch,
        whether the state is missing). threads: that the training thread computes with; 0: does not matter.
        """
        self._run_id = run_id
        self._links = links
        self._stands = stands
        self._joins = self._company_now() > 0  # else it begins the run
        self._is_here = is_here
        self._threads = threads
        self._company = Company(run_id)
        self._left: set[bytes] = set()  # who said that it leaves
        self._from: dict[bytes, str] = {}  # by peer, the host of this side of the last link
        self._moves: set[tuple[str, str]] = set()  # from where to where, as was told
        for link in links.values():
            self.link_up(link)
        self.standing_changed()

    def standing_changed(self) -> None:
        """This peer stands elsewhere, or has another role. Once it has the run's state, it has joined."""
        epoch, missing = self._stands()
        if self._joins and not missing:
            self._joins = False
            company = counted(self._company_now(), "peer")
            tell("joined run %r at epoch %d, with %s", self._run_id, epoch, company)

    def beat(self, silent: Set[bytes]) -> None:
        """Now and then. silent: peers with a link from which nothing is heard."""
        self.standing_changed()
        heard = {peer for peer, link in self._links.items() if trains(link.hello)} - silent
        self._company.look(heard, self._left)

    def _company_now(self) -> int:
        return sum(trains(link.hello) for link in self._links.values())

    def leaves(self, peer: bytes) -> None:
        """It says so itself."""
        self._left.add(peer)
        if len(self._left) > MAX_LINKS:
            self._left = {peer}

    def link_up(self, link: Link) -> None:
        """A link began."""
        self._left.discard(link.peer_id)
        self._look_for_a_move(link)
        self._look_for_a_crowd()

    def _look_for_a_move(self, link: Link) -> None:
        """A link to the same peer begins at another address of this machine than the last."""
        moved = (self._from.get(link.peer_id, link.local_host), link.local_host)
        if len(self._from) > MAX_LINKS:
            self._from.clear()
        self._from[link.peer_id] = link.local_host
        if moved[0] != moved[1] and moved not in self._moves:
            self._moves.add(moved)
            logger.warning(
                "this machine's address has changed from %s to %s; its links are opened anew", *moved
            )

    def _look_for_a_crowd(self) -> None:
        """Peers of this machine have too many threads: once."""
        here = sum(trains(link.hello) and self._is_here(link.address[0]) for link in self._links.values())
        told = crowd.advice(1 + here, self._threads, crowd.cores())
        if told is not None:
            self._threads = 0
            logger.warning("%s", told)
