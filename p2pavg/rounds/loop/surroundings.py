"""Surroundings: the peer in which the rounds run, as their driver sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from p2pavg.identity import Identity
from p2pavg.transport.engine import Engine
from p2pavg.transport.links.link import Link


class Surroundings(Protocol):
    """What the driver needs of the peer it lives in."""

    @property
    def peer_id(self) -> bytes: ...

    @property
    def identity(self) -> Identity: ...

    @property
    def engine(self) -> Engine: ...

    @property
    def links(self) -> Mapping[bytes, Link]: ...

    def standing_changed(self) -> None:
        """Epoch, lineage or role changed: the hello and the announcement must follow."""

    def broken(self) -> None:
        """Rounds cannot go on: leave the others to themselves."""
