"""Who has how many of the places in a store: whoever has most gives way."""

from __future__ import annotations

from collections import OrderedDict

Place = tuple[bytes, bytes]  # key, prefix


class Shares:
    """Places by the network that took them, oldest first."""

    def __init__(self) -> None:
        self._places: dict[str, OrderedDict[Place, None]] = {}

    def add(self, owner: str, place: Place) -> None:
        """A place is taken."""
        self._places.setdefault(owner, OrderedDict())[place] = None

    def remove(self, owner: str, place: Place) -> None:
        """It is free again."""
        places = self._places.get(owner, OrderedDict())
        places.pop(place, None)
        if not places:
            self._places.pop(owner, None)

    def oldest_of_largest(self, newcomer: str) -> Place | None:
        """Which place goes to `newcomer`; None when no network has more than it would have then."""
        largest = max(self._places.values(), key=len, default=None)
        if largest is None or len(largest) <= len(self._places.get(newcomer, ())) + 1:
            return None
        return next(iter(largest))
