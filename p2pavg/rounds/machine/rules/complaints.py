"""Who is at fault when a member complains of another: one word against one costs both. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from p2pavg.rounds.protocol.ballot import PeerId

MOST_VAGUE = 2  # complaints that name nobody, which one member may make in an epoch


class Complaints:
    """What members said of each other in the attempt under way, and whose complaints nobody seconded so far.

    A complaint is seconded when another member or the leader makes the same one, or the author blames itself.
    """

    def __init__(self, leader: PeerId) -> None:
        self._leader = leader
        self._accusers: dict[PeerId, set[PeerId]] = {}
        self._unseconded: set[PeerId] = set()  # authors of complaints that nobody seconded
        self._yielded: Counter[PeerId] = Counter()  # member -> how often it was the one of two that left
        self._vague: Counter[PeerId] = Counter()  # author -> its complaints that name nobody, in this epoch

    def new_attempt(self) -> None:
        self._accusers.clear()

    def new_epoch(self) -> None:
        self._accusers.clear()
        self._vague.clear()

    @property
    def open(self) -> bool:
        """Whether a complaint is not judged yet."""
        return bool(self._accusers)

    def vague(self, author: PeerId) -> bool:
        """A member complains and names nobody. Returns whether it has done so too often in this epoch."""
        self._vague[author] += 1
        return self._vague[author] > MOST_VAGUE

    def add(self, author: PeerId, accused: PeerId) -> bool:
        """Add a complaint. Returns whether it is seconded."""
        self._accusers.setdefault(accused, set()).add(author)
        return accused in self._seconded()

    def settle(self, done: Collection[PeerId]) -> None:
        """These members are DONE and lack nothing: what they said of each other, as when their link broke
        behind the last chunk, is void.
        """
        for accused, authors in list(self._accusers.items()):
            if accused in done:
                authors.difference_update(done)
                if not authors:
                    del self._accusers[accused]

    def _seconded(self) -> set[PeerId]:
        return {
            accused
            for accused, authors in self._accusers.items()
            if len(authors) > 1 or self._leader in authors or accused in authors
        }

    def judge(self) -> tuple[PeerId, ...]:
        """Whom to leave out.

        Where one word stands against one, both members leave, and the author is remembered: the author's next
        complaint that nobody seconds counts against the author alone. Of two that complain of each other, as
        when a link broke, the one leaves that left less often.
        """
        at_fault = self._seconded()
        for accused, author in self._pairs():
            if accused in at_fault or author in at_fault:
                continue
            if accused in self._accusers.get(author, ()):
                leaves = min((accused, author), key=lambda peer: (self._yielded[peer], peer))
                self._yielded[leaves] += 1
                at_fault.add(leaves)
            elif author in self._unseconded or accused == self._leader:
                at_fault.add(author)
            else:
                self._unseconded.add(author)
                at_fault.update((accused, author))
        self._accusers.clear()
        return tuple(sorted(at_fault))

    def _pairs(self) -> Iterable[tuple[PeerId, PeerId]]:
        return sorted((accused, author) for accused, authors in self._accusers.items() for author in authors)
