"""When members came to one point of a round, and when most of the others had. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from p2pavg.rounds.protocol.ballot import PeerId


class Arrivals:
    """Notes of whoever is there, in the order of time. A question costs the same however many there are: the
    leader of a large group asks one about each member whenever one arrives.
    """

    def __init__(self, among: Iterable[PeerId]) -> None:
        """among: the members whose majority counts."""
        self._among = frozenset(among)
        self._at: dict[PeerId, float] = {}
        self._order: list[float] = []  # of those whose majority counts

    def note(self, peer: PeerId, now: float) -> None:
        """The peer is there; its first arrival counts. now: never less than before."""
        if peer not in self._at:
            self._at[peer] = now
            if peer in self._among:
                self._order.append(now)

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._at

    def __getitem__(self, peer: PeerId) -> float:
        return self._at[peer]

    def most(self, but: PeerId) -> float | None:
        """When more than half of the members apart from `but` were there; None: they are not, or there are
        none.
        """
        last = (len(self._among) - (but in self._among)) // 2  # which of them makes the majority, from 0
        if (
            but in self._among
            and but in self._at
            and self._at[but] <= self._order[min(last, len(self._order) - 1)]
        ):
            last += 1
        return self._order[last] if last < len(self._order) else None
