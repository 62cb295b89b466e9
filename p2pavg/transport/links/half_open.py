"""Half-open connections, whose handshake is not over, and the choice of the one to close when there are too
many.

A connection counts for its source and its source's network (see p2pavg.networks). A connection on which no
byte has arrived is *silent*: members send as soon as they are connected, so a source may have only a few
silent ones, and a further one closes its oldest. All half-open connections together have a bound, too. Above
it, one of the network with the most is closed, and within that network one of the source with the most: a
flood from however many addresses closes only connections of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from p2pavg.networks import network_of, source_of

MOST = 256  # connections
MOST_SILENT = 16  # silent connections of one source

T = TypeVar("T", bound=Hashable)  # identifies a connection


class HalfOpen(Generic[T]):
    def __init__(self) -> None:
        self._homes: dict[T, tuple[str, str]] = {}  # network and source
        self._sizes: Counter[str] = Counter()  # of networks
        # By network and source: connections, oldest first, and whether they are silent.
        self._networks: dict[str, dict[str, dict[T, bool]]] = {}

    def __len__(self) -> int:
        return len(self._homes)

    def add(self, connection: T, host: str) -> T | None:
        """Add an accepted connection. Returns the one to close for it, which counts until it is removed."""
        network, source = network_of(host), source_of(host)
        own = self._networks.setdefault(network, {}).setdefault(source, {})
        goes = None
        if sum(own.values()) >= MOST_SILENT:
            goes = _first(own)
        elif len(self._homes) >= MOST:
            goes = self._of_the_largest()
        self._homes[connection] = network, source
        self._sizes[network] += 1
        own[connection] = True
        return goes

    def _of_the_largest(self) -> T:
        """The connection to close, of the largest source in the largest network; of equals, a silent one."""
        most = max(self._sizes.values())
        largest = [self._networks[network] for network, size in self._sizes.items() if size == most]
        sources = next((found for found in largest if any(map(_silent, found.values()))), largest[0])
        most = max(map(len, sources.values()))
        return _first(_one(own for own in sources.values() if len(own) == most))

    def spoke(self, connection: T) -> None:
        """Note that a connection has begun its handshake."""
        network, source = self._homes[connection]
        self._networks[network][source][connection] = False

    def remove(self, connection: T) -> None:
        """Remove a connection whose handshake is over, or which is closed. Idempotent."""
        if connection not in self._homes:
            return
        network, source = self._homes.pop(connection)
        sources = self._networks[network]
        del sources[source][connection]
        if not sources[source]:
            del sources[source]
        self._sizes[network] -= 1
        if not sources:
            del self._networks[network], self._sizes[network]


def _silent(connections: dict[T, bool]) -> bool:
    return True in connections.values()


def _one(sources: Iterable[dict[T, bool]]) -> dict[T, bool]:
    found = list(sources)
    return next(filter(_silent, found), found[0])


def _first(connections: dict[T, bool]) -> T:
    """The oldest silent one, else the oldest."""
    return next((one for one, silent in connections.items() if silent), next(iter(connections)))
