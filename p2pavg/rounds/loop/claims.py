"""Claims: what a peer draws without a lease is told to all that it has links to, so that they draw
elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from p2pavg.errors import ProtocolError
from p2pavg.rounds.training import Drawing
from p2pavg.transport.links.link import Link

KINDS = frozenset({"claims"})


class Claims:
    """On the loop thread."""

    def __init__(self, links: Mapping[bytes, Link], drawing: Drawing | None) -> None:
        """links: by peer, a live view. drawing: what this peer holds of the data; None: it has no sampler."""
        self._links = links
        self._drawing = drawing

    def tell(self) -> None:
        """They changed: all must know."""
        for link in self._links.values():
            self.meet(link)

    def meet(self, link: Link) -> None:
        """A link came up, or the claims changed."""
        if self._drawing is not None and (claims := self._drawing.claims()):
            link.send({"t": "claims", "runs": claims})

    def message(self, link: Link, message: Mapping[str, Any]) -> None:
        """One of `KINDS`. Raises ProtocolError when it is malformed."""
        if self._drawing is None:
            return
        try:
            self._drawing.heard(link.peer_id, message.get("runs"))
        except ValueError as error:
            raise ProtocolError(f"a peer told of malformed claims ({error})") from None
