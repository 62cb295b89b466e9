"""Shares of what strangers may hold at a node: how much each source and network has. Pure.

Addresses are what a stranger does not have for nothing, so what one network takes is counted to it (see
p2pavg.networks). Private addresses are those of one's own machines: only the bound on all together holds
there.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

from p2pavg.networks import is_private, network_of, source_of

T = TypeVar("T", bound=Hashable)  # what is held, such as a connection


class Shares(Generic[T]):
    """Who holds what. At most `most` in all, and of one source or network so many."""

    def __init__(self, *, most: int, of_network: int, of_source: int) -> None:
        self._most, self._of_network, self._of_source = most, of_network, of_source
        self._homes: dict[T, tuple[str, str]] = {}  # network and source
        self._networks: dict[str, dict[str, set[T]]] = {}  # by network and source

    def __len__(self) -> int:
        return len(self._homes)

    def add(self, held: T, host: str) -> None:
        """Somebody at `host` holds one more."""
        network, source = self._homes[held] = network_of(host), source_of(host)
        self._networks.setdefault(network, {}).setdefault(source, set()).add(held)

    def remove(self, held: T) -> None:
        """It is free again. Idempotent."""
        if held not in self._homes:
            return
        network, source = self._homes.pop(held)
        sources = self._networks[network]
        sources[source].discard(held)
        if not sources[source]:
            del sources[source]
        if not sources:
            del self._networks[network]

    def crowd(self, host: str) -> Collection[T]:
        """Those of which one has to go before somebody at `host` holds one more; empty: there is room.

        Where there is no room at all, it is one of the largest source in the largest network: a flood from
        however many addresses costs only its own.
        """
        sources = self._networks.get(network_of(host), {})
        own = sources.get(source_of(host), set())
        if not is_private(host):
            if len(own) >= self._of_source:
                return own
            if _size(sources) >= self._of_network:
                return max(sources.values(), key=len)
        if len(self._homes) >= self._most:
            return max(max(self._networks.values(), key=_size).values(), key=len)
        return ()


def _size(sources: dict[str, set[T]]) -> int:
    return sum(map(len, sources.values()))
