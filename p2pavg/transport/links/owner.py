"""The owner of links: what those that meet other peers need of their endpoint."""

from __future__ import annotations

from typing import Protocol

from p2pavg.credentials import Tls
from p2pavg.identity import Identity
from p2pavg.transport.links.carried import Way
from p2pavg.transport.links.greeting import Met
from p2pavg.transport.links.handshake import Hello, Party
from p2pavg.transport.links.link import Link, Opener
from p2pavg.transport.links.pairing import Pairing


class Owner(Protocol):
    """The endpoint, as dials and the reception use it: it checks peers, and makes links to them."""

    identity: Identity
    party: Party

    @property
    def pairing(self) -> Pairing: ...

    def tls(self, way: Way) -> Tls | None: ...

    def make_hello(self) -> Hello: ...

    def check(self, mine: Hello, theirs: Hello, expect: bytes | None = None) -> None: ...

    def establish(
        self, met: Met, address: tuple[str, int], *, dialled: bool, way: Way, opener: Opener | None = None
    ) -> Link: ...
