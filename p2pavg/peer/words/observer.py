"""Observer: tells a person what changes around this peer: who comes, goes and falls silent. On the loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Set

from p2pavg.membership import PeerInfo
from p2pavg.peer.words import crowd
from p2pavg.peer.words.company import Company
from p2pavg.peer.words.notice import tell
from p2pavg.printable import counted
from p2pavg.rounds.loop.hello import trains
from p2pavg.transport.links.budget import MAX_LINKS
from p2pavg.transport.links.link import Link

logger = logging.getLogger("p2pavg.peer.peer")


class Observer:
    """Tells where this peer joined, who is heard, when its address moves, whose threads are too many."""

    def __init__(
        self,
        run_id: str,
        links: Mapping[bytes, Link],
        is_here: Callable[[str], bool],
        stands: Callable[[], tuple[int, bool]],
        in_view: Callable[[], Collection[PeerInfo]],
        threads: int,
        misplaced: Callable[[Collection[str]], str | None] | None = None,
    ) -> None:
        """links: a live view, by peer. is_here: whether an address is one of this machine. stands: returns
        this peer's epoch, and whether it still lacks the state. in_view: returns the peers of the run that
        the table knows. threads: how many the training thread computes with; 0: it uses an accelerator.
        misplaced: what to tell of the regions of the other peers and prices, if there is anything.
        """
        self._run_id = run_id
        self._links = links
        self._stands = stands
        self._joins = self._company_now() > 0  # False: this peer begins the run, or told where it joined
        self._has_state = False
        self._is_here = is_here
        self._threads = threads
        self._misplaced = misplaced
        self._in_view = in_view
        self._company = Company(run_id)
        self._left: set[bytes] = set()  # peers that said that they leave
        self._from: dict[bytes, str] = {}  # by peer, the host of this side of the last link
        self._moves: set[tuple[str, str]] = set()  # moves that were told: (old host, new host)
        for link in links.values():
            self.link_up(link)
        self.standing_changed()

    def standing_changed(self) -> None:
        """Tell once that this peer has joined, when it has the run's state."""
        epoch, missing = self._stands()
        if missing and not self._has_state:
            self._joins = self._joins or self._company_now() > 0
        elif not missing:
            self._has_state = True
        if self._joins and not missing:
            self._joins = False
            company = counted(self._company_now(), "peer")
            tell("joined run %r at epoch %d, with %s", self._run_id, epoch, company)

    def beat(self, silent: Set[bytes]) -> None:
        """Compare who is heard; called several times a second. silent: linked peers that send nothing."""
        self.standing_changed()
        heard = {peer for peer, link in self._links.items() if trains(link.hello)} - silent
        trainers = [info for info in self._in_view() if info.role == "trainer"]
        self._company.look(heard, self._left, trainers)
        if self._misplaced is not None and heard:
            told, self._misplaced = self._misplaced({info.region for info in trainers}), None
            if told is not None:
                logger.warning("%s", told)

    def _company_now(self) -> int:
        return sum(trains(link.hello) for link in self._links.values())

    def leaves(self, peer: bytes) -> None:
        """Note that this peer said it leaves."""
        self._left.add(peer)
        if len(self._left) > MAX_LINKS:
            self._left = {peer}

    def link_up(self, link: Link) -> None:
        """Look whether the new link shows a move of this machine, or a crowd on it."""
        self._left.discard(link.peer_id)
        self.standing_changed()
        self._look_for_a_move(link)
        self._look_for_a_crowd()

    def _look_for_a_move(self, link: Link) -> None:
        """Tell when links to one peer begin at another address of this machine than before."""
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
        """Tell once that the peers of this machine compute with more threads than it has cores."""
        here = sum(trains(link.hello) and self._is_here(link.address[0]) for link in self._links.values())
        told = crowd.advice(1 + here, self._threads, crowd.cores())
        if told is not None:
            self._threads = 0
            logger.warning("%s", told)
