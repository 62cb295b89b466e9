"""Moves of this machine to another address: links that begin at the old one are dead, and nobody is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from p2pavg.membership.table.address import interface_addresses
from p2pavg.transport.links.link import Link


class Moves:
    """Compares the addresses of this machine's interfaces with those that they had before."""

    def __init__(self, addresses: Callable[[], Sequence[str]] = interface_addresses) -> None:
        """addresses: of the interfaces, now; an interface may have others that are not told."""
        self._addresses = addresses
        self._had = self._have = set(addresses())
        self.left: list[Link] = []  # that were stranded at the last move
        self.moved = False  # the addresses are others than at the look before

    def stranded(self, links: Iterable[Link]) -> list[Link]:
        """Look again; returns those of the links that begin at an address which an interface had, and has no
        longer.
        """
        now = set(self._addresses())
        self.moved, self._have = now != self._have, now
        gone, self._had = self._had - now, self._had | now
        stranded = [link for link in links if link.local_host in gone]
        self.left = stranded or self.left
        return stranded
