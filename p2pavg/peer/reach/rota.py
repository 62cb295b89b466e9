"""Rota: which members are asked next about a peer that this one cannot link to. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol, TypeVar

MOST_ASKED = 8  # at once, about one peer
MOST_KNOWING = 4  # of these, while others are left: who knows the peer is not always of use
MOST_PEERS = (
    512  # about which members were asked: of those beyond, the one asked about longest ago is forgotten
)


class Member(Protocol):
    """Whoever may be asked: a link."""

    @property
    def peer_id(self) -> bytes: ...


M = TypeVar("M", bound=Member)


class Rota:
    """A few of those that knew the peer the last time come first, then those that were never asked, then
    those that were asked longest ago: so everybody is asked in the end, a few at a time.
    """

    def __init__(self) -> None:
        self._turns: OrderedDict[bytes, dict[bytes, int]] = OrderedDict()  # by peer: members, and their turn
        self._knew: dict[bytes, set[bytes]] = {}
        self._turn = 0

    def next(self, about: bytes, members: Iterable[M]) -> list[M]:
        """Whom to ask now. members: all that can be asked, the best first."""
        self._turn += 1
        able = list(members)
        ids = {member.peer_id for member in able}
        turns = {member: turn for member, turn in self._turns.get(about, {}).items() if member in ids}
        knew = self._knew.setdefault(about, set())
        knew &= ids
        order = sorted(able, key=lambda member: turns.get(member.peer_id, 0))
        knowing = [member for member in order if member.peer_id in knew]
        others = [member for member in order if member.peer_id not in knew]
        chosen = [*knowing[:MOST_KNOWING], *others, *knowing[MOST_KNOWING:]][:MOST_ASKED]
        turns |= {member.peer_id: self._turn for member in chosen}
        self._turns[about] = turns
        self._turns.move_to_end(about)
        if len(self._turns) > MOST_PEERS:
            forgotten, _ = self._turns.popitem(last=False)
            self._knew.pop(forgotten, None)
        return chosen

    def told(self, about: bytes, member: bytes, *, knows: bool) -> None:
        """What a member answered."""
        knew = self._knew.get(about)
        if knew is not None and knows:
            knew.add(member)
        elif knew is not None:
            knew.discard(member)

    def forget(self, about: bytes) -> None:
        """Nobody has to be asked about this peer any more."""
        self._turns.pop(about, None)
        self._knew.pop(about, None)
