"""What donors say of the results that follow on a state: the word of each counts for itself alone. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from p2pavg.errors import StateError
from p2pavg.rounds.state.results import ResultHead

MOST_KNOWN = 1 << 16  # that one donor may tell of before they are fetched


class Heads:
    """The results that are known and not fetched yet. What follows on a lineage may be told of differently:
    then the head that most donors tell of comes first, and the others stand in for it.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, dict[bytes, ResultHead]] = {}  # by what they follow on, by where they lead
        self._tellers: dict[bytes, list[bytes]] = {}  # by the lineage that it leads to
        self._told: dict[bytes, set[bytes]] = {}  # by donor: what its results follow on
        self._lost = set[bytes]()  # donors

    def tell(self, donor: bytes, head: ResultHead) -> bool:
        """A donor keeps it. Of results that follow on the same, its first word counts; that of a donor that
        was lost does not. Returns whether nobody has told of one that follows on the same. Raises StateError.
        """
        told = self._told.setdefault(donor, set())
        if donor in self._lost or head.before in told:
            return False
        if len(told) >= MOST_KNOWN:
            raise StateError("a donor tells of more results than there can be")
        told.add(head.before)
        self._tellers.setdefault(head.lineage, []).append(donor)
        heads = self._known.setdefault(head.before, {})
        heads.setdefault(head.lineage, head)
        return sum(len(self._tellers[lineage]) for lineage in heads) == 1

    def after(self, before: bytes) -> ResultHead | None:
        """The result that follows on `before`, as most donors tell; of as many, as it was told first."""
        heads = self._known.get(before, {}).values()
        return max(heads, key=lambda head: len(self._tellers[head.lineage]), default=None)

    def tellers(self, head: ResultHead) -> Sequence[bytes]:
        """The donors that keep it, less those that were lost."""
        return tuple(self._tellers.get(head.lineage, ()))

    def lost(self, donor: bytes) -> None:
        """It keeps nothing any more, or not what it told of."""
        self._lost.add(donor)
        for tellers in self._tellers.values():
            if donor in tellers:
                tellers.remove(donor)

    def refuted(self, head: ResultHead) -> bool:
        """None of those who told of it has it; whether another one that follows on the same may be had."""
        self._tellers[head.lineage].clear()
        instead = self.after(head.before)
        return instead is not None and bool(self._tellers[instead.lineage])

    def fetched(self, head: ResultHead) -> None:
        """It is here: nothing else can follow on the same any more."""
        for lineage in self._known.pop(head.before):
            self._tellers.pop(lineage)
        for told in self._told.values():
            told.discard(head.before)
