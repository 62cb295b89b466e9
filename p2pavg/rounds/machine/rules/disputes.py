"""Whom results that differ show to be at fault where two members gave each other a part, and one word stands
against another. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pavg.rounds.protocol.ballot import PeerId

Pair = tuple[PeerId, PeerId]

KEPT_EPOCHS = 64  # a dispute is remembered so long


class Disputes:
    """Pairs of an owner and a deputy with different results of a part, where all others have that of the one
    from whom they have the part. One of the two lied or computed wrong, and what the members know is the same
    whichever it was. If one member is at fault in all disputes, it has a part in each: so whoever is in
    dispute with several, each of them with it alone, is at fault. Until then the two contribute, and neither
    owns parts or is a deputy.
    """

    def __init__(self) -> None:
        self._partners: dict[PeerId, dict[PeerId, int]] = {}  # in dispute with whom, and the last epoch of it

    def add(self, pairs: Iterable[Pair], epoch: int) -> tuple[set[Pair], set[PeerId]]:
        """Those of the pairs that were in dispute already, neither at fault; and who is at fault."""
        self._forget(epoch)
        found = set(pairs)
        known = {(a, b) for a, b in found if b in self._partners.get(a, ())}
        for a, b in found:
            self._partners.setdefault(a, {})[b] = epoch
            self._partners.setdefault(b, {})[a] = epoch
        at_fault = {peer for pair in found for peer in pair if self._is_at_fault(peer)}
        return {pair for pair in known if not at_fault.intersection(pair)}, at_fault

    def open(self, epoch: int) -> set[PeerId]:
        """Who is in dispute with somebody that may not be the one at fault."""
        self._forget(epoch)
        return {
            peer
            for peer, partners in self._partners.items()
            if any(not self._is_at_fault(partner) for partner in partners)
        }

    def _is_at_fault(self, peer: PeerId) -> bool:
        partners = self._partners[peer]
        return len(partners) > 1 and all(len(self._partners[partner]) == 1 for partner in partners)

    def _forget(self, epoch: int) -> None:
        for peer, partners in list(self._partners.items()):
            kept = {other: at for other, at in partners.items() if epoch - at < KEPT_EPOCHS}
            if kept:
                self._partners[peer] = kept
            else:
                del self._partners[peer]
