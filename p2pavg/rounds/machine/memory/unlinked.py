"""Trainers that other peers name, and to which this peer has no living link."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from p2pavg.rounds.protocol.ballot import PeerId

# Seconds, and four round trips, until somebody who is named counts as living behind a broken link, if it is
# named again then: a link may be coming up; over a silent one others may have heard a little later.
NO_LINK_S, SILENT_S = 1.0, 2.0
# A peer that nobody named in this epoch, in the last one, and for so many seconds counts no more.
KEPT_EPOCHS, KEPT_S = 1, 5.0
MOST_NAMED = 64  # peers, as any peer may name whom it likes


@dataclass(slots=True)
class _Named:
    due: float  # from then on its name counts
    at: float  # when it was named last
    epoch: int  # where this peer stood then
    by: PeerId


class Unlinked:
    """Whom others follow, or have in their rounds, though this peer hears nothing of it."""

    def __init__(self) -> None:
        self._named: dict[PeerId, _Named] = {}

    def __bool__(self) -> bool:
        return bool(self._named)

    def names(self, by: PeerId, peer: PeerId, now: float, epoch: int, wait: float) -> float:
        """Somebody names a peer to which this one has no living link. wait: seconds until that counts.
        Returns when it counts.
        """
        named = self._named.get(peer)
        if named is not None:
            named.at, named.epoch, named.by = now, epoch, by
        elif len(self._named) < MOST_NAMED:
            named = self._named[peer] = _Named(now + wait, now, epoch, by)
        return math.inf if named is None else named.due

    def linked(self, peer: PeerId) -> None:
        """There is a living link to the peer."""
        self._named.pop(peer, None)

    def keep(self, peers: Collection[PeerId]) -> None:
        """These vote in a round that is forming: whoever else was named may be dead."""
        self._named = {peer: named for peer, named in self._named.items() if peer in peers}

    def expire(self, now: float, epoch: int) -> None:
        """This peer stands at another epoch: whom nobody names any more may be dead."""
        for peer, named in list(self._named.items()):
            if named.epoch < epoch - KEPT_EPOCHS and now > named.at + KEPT_S:
                del self._named[peer]

    @property
    def apart(self) -> frozenset[PeerId]:
        """All whose name counts."""
        return frozenset(peer for peer, named in self._named.items() if named.at >= named.due)

    def doubtful(self, now: float) -> set[PeerId]:
        """Who named somebody so long ago that it may follow somebody else by now."""
        return {named.by for named in self._named.values() if named.at < named.due <= now}
