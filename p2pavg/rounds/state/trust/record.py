"""What this process remembers of donors: who offered what then did not come, or was wrong."""

from __future__ import annotations

ABSENT = 1.0  # what was offered did not come: a link may have broken
WRONG = 8.0  # it came, and is not what was offered
MOST = 64.0
HALF_S = 60.0  # seconds after which half of it is forgotten


class Record:
    """Ranks donors, and shuts out none: whoever is the only one is asked again, whatever it did."""

    def __init__(self) -> None:
        self._marks: dict[bytes, tuple[float, float]] = {}  # by donor: how much, and when

    def failed(self, donor: bytes, now: float, weight: float) -> None:
        """weight: ABSENT or WRONG."""
        self._marks = {peer: mark for peer, mark in self._marks.items() if self.doubts(peer, now)}
        self._marks[donor] = min(MOST, self._left(donor, now) + weight), now

    def doubts(self, donor: bytes, now: float) -> int:
        """0: none; who has more is trusted less. One link that broke is forgotten after a minute."""
        return round(self._left(donor, now))

    def _left(self, donor: bytes, now: float) -> float:
        marks, since = self._marks.get(donor, (0.0, now))
        return float(marks * 0.5 ** ((now - since) / HALF_S))
