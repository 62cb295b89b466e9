"""The maker of links, as dials and the reception need it: it checks peers, and makes links to them."""

from __future__ import annotations

from typing import Protocol

from p2pavg.credentials import Tls
from p2pavg.identity import Identity
from p2pavg.transport.links.carried import Way
from p2pavg.transport.links.greeting import Met
from p2pavg.transport.links.handshake import Hello, Party
from p2pavg.transport.links.link import Link, Opener
from p2pavg.transport.links.pairing import Pairing


class LinkMaker(Protocol):
    """The endpoint, for connections that may become links."""

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
