"""Links that are refused: peers that want none to this one, and peers to which this one wants none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from p2pavg.errors import CredentialError, IdentityInUseError, P2PAvgError
from p2pavg.identity import short_id
from p2pavg.rounds.loop.hello import vet
from p2pavg.transport.links.budget import MAX_LINKS
from p2pavg.transport.links.handshake import Refusal

logger = logging.getLogger("p2pavg.peer.peer")

REVOKED = "the run's owner has revoked these credentials; ask the owner for a new invitation"


def gives_way(shut_out: int, peers: int, *, later: bool, proven: bool) -> bool:
    """Whether this process ends, as `shut_out` of `peers` refuse it for another process of its identity.

    Of two such processes the one that more peers refuse ends; of equals, the one that began later. Where
    peers prove who they are, the later one ends at the first refusal. In an open run anybody could claim the
    identity.
    """
    return 2 * shut_out > peers or (later and (proven or 2 * shut_out == peers))


class LinkRefusals:
    """What follows when other peers refuse this one's dials (`of`), and whom this one refuses (`vet`)."""

    def __init__(
        self,
        others: Callable[[], set[bytes]],
        incarnation: Callable[[], int],
        fail: Callable[[P2PAvgError], None],
        *,
        proven: bool,
    ) -> None:
        """others: returns the trainers in view or linked. incarnation: returns when this process began. fail:
        ends training with an error. proven: whether peers prove who they are.
        """
        self._others = others
        self._incarnation = incarnation
        self._fail = fail
        self._proven = proven
        self.trains = False  # False: this peer still enters, and the caller of `train` gets the errors
        self.met: list[P2PAvgError] = []
        self.distrusted: list[P2PAvgError] = []  # of peers whose certificates, or this one's, are rejected
        self._former: set[bytes] = set()  # members that the run's authority has revoked
        self._warned_of: dict[bytes, str] = {}  # by peer: the warning that was logged of it
        self._shut_out: set[bytes] = set()  # peers that refuse this process for another one of its identity

    def refused(self, peer_id: bytes, error: P2PAvgError) -> None:
        """Take note that a peer wants no link to this one, and why."""
        if not self.trains and isinstance(error, CredentialError):
            self.distrusted.append(error)  # that peer may be no member any more: the other peers decide
        elif not self.trains:
            self.met.append(error)
        elif isinstance(error, IdentityInUseError):
            self._shut_out_by(peer_id, error)
        elif self._warned_of.get(peer_id) != str(error):
            if len(self._warned_of) >= MAX_LINKS:
                self._warned_of.clear()
            self._warned_of[peer_id] = str(error)
            logger.warning("peer %s cannot take part: %s", short_id(peer_id), error)

    def vet(self, facts: Mapping[str, Any]) -> None:
        """Raises Refusal, or ProtocolError, for a peer that gets no link. facts: of its hello."""
        if facts.get("peer") in self._former:
            raise Refusal("credentials", REVOKED)
        vet(facts)

    def revoked(self, peer_ids: Iterable[bytes], own: bytes) -> None:
        """Take note that the run's authority has revoked these members."""
        self._former.update(peer_ids)
        for peer_id in peer_ids:
            logger.warning("peer %s is no member any more: the run's owner has revoked it", short_id(peer_id))
        if own in self._former:
            error = CredentialError(REVOKED)
            self.distrusted.append(error)
            self._fail(error)

    def linked(self, peer_id: bytes) -> None:
        """Take note that this peer has a link after all."""
        self._shut_out.discard(peer_id)

    def _shut_out_by(self, peer_id: bytes, error: IdentityInUseError) -> None:
        """Take note that another process of this identity has a link to that peer.

        That happens at a restart, when this process was stopped for so long that it counted as dead, or when
        two parts of a swarm meet.
        """
        if peer_id not in self._shut_out:
            logger.warning("peer %s keeps this one out: %s", short_id(peer_id), error)
        self._shut_out.add(peer_id)
        if gives_way(
            len(self._shut_out),
            len(self._others() | self._shut_out),
            later=0 < error.since < self._incarnation(),
            proven=self._proven,
        ):
            self._fail(error)
