"""Finding the nodes closest to a key: the decisions of an iterative lookup, without I/O."""

from __future__ import annotations

import enum

from p2pavg.membership.table.wire import Contact

MAX_CANDIDATES = 256
ENOUGH_ANSWERS = 3


class _State(enum.Enum):
    NEW = 1
    ASKED = 2
    SLOW = 3
    ANSWERED = 4
    FAILED = 5


class Shortlist:
    """Candidates by distance. A candidate that is slow to answer no longer holds the lookup back."""

    def __init__(self, target: bytes, own_id: bytes, k: int, parallel: int) -> None:
        self._target = int.from_bytes(target, "big")
        self._own_id = own_id
        self._k = k
        self._parallel = parallel
        self._contacts: dict[bytes, Contact] = {}
        self._states: dict[bytes, _State] = {}
        self._order: list[bytes] = []

    def add(self, contacts: list[Contact]) -> None:
        """Learn of contacts, verified or not; the first address heard for an id counts until it fails."""
        grew = False
        for contact in contacts:
            state = self._states.get(contact.id)
            if contact.id == self._own_id:
                continue
            if state is _State.FAILED and contact.address != self._contacts[contact.id].address:
                self._states[contact.id] = _State.NEW
                self._contacts[contact.id] = contact
            elif state is None and len(self._states) < MAX_CANDIDATES:
                self._states[contact.id] = _State.NEW
                self._contacts[contact.id] = contact
                grew = True
        if grew:
            self._order = sorted(self._contacts, key=lambda i: int.from_bytes(i, "big") ^ self._target)

    def next_to_ask(self) -> list[Contact]:
        """The contacts to ask now; they count as asked."""
        asked = sum(1 for state in self._states.values() if state is _State.ASKED)
        found = []
        for peer_id in self._front():
            if asked >= self._parallel:
                break
            if self._states[peer_id] is _State.NEW:
                self._states[peer_id] = _State.ASKED
                found.append(self._contacts[peer_id])
                asked += 1
        return found

    def waits_for(self) -> list[Contact]:
        """Those that keep the lookup from its end, once half of the k closest have answered."""
        front = self._front()
        there = sum(self._states[peer_id] is _State.ANSWERED for peer_id in front)
        if 2 * there < len(front):
            return []
        return [self._contacts[peer_id] for peer_id in front if self._states[peer_id] is _State.ASKED]

    def answered(self, peer_id: bytes) -> None:
        self._states[peer_id] = _State.ANSWERED

    def slow(self, peer_id: bytes) -> None:
        if self._states[peer_id] is _State.ASKED:
            self._states[peer_id] = _State.SLOW

    def failed(self, peer_id: bytes) -> None:
        self._states[peer_id] = _State.FAILED

    @property
    def finished(self) -> bool:
        """Whether the k closest candidates that are neither dead nor slow have answered."""
        front = self._front()
        if any(self._states[i] is not _State.ANSWERED for i in front):
            return False
        slow = sum(1 for state in self._states.values() if state is _State.SLOW)
        return slow == 0 or len(front) >= min(ENOUGH_ANSWERS, slow)

    def closest(self) -> list[Contact]:
        """The k closest that answered, closest first."""
        return [self._contacts[i] for i in self._order if self._states[i] is _State.ANSWERED][: self._k]

    def _front(self) -> list[bytes]:
        passed = (_State.SLOW, _State.FAILED)
        front = []
        for peer_id in self._order:
            if self._states[peer_id] not in passed:
                front.append(peer_id)
                if len(front) == self._k:
                    break
        return front
