"""Ways into a table: the initial peers, asked until one of them answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from p2pavg import __version__
from p2pavg.errors import IdentityInUseError, IncompatiblePeerError, UnreachableError
from p2pavg.identity import OWN_IDENTITY, short_id
from p2pavg.membership.table.address import Address, format_host_port, resolve
from p2pavg.membership.table.node import Node
from p2pavg.membership.table.wire import VERSION, Contact

JOIN_RETRY_SECONDS = 0.2


class WaysIn:
    """Finds a node of the table among the initial peers."""

    def __init__(self, node: Node, initial_peers: Sequence[Address], tasks: set[asyncio.Future[Any]]) -> None:
        """tasks: where work under way is kept, to be cancelled when the node stops."""
        self._node = node
        self._initial_peers = initial_peers
        self._tasks = tasks
        self.answered: list[Contact] = []  # initial peers, this node left out

    async def find(self, timeout: float) -> Contact | None:
        """Ask until one initial peer answers. Two that name each other and start together both get through.

        Returns None when all initial peers are this node itself. Raises IdentityInUseError when nobody but
        another process of this identity answers a node that is no way in itself, IncompatiblePeerError when
        initial peers are of another version, UnreachableError when none answers.
        """
        deadline = self._node.clock() + timeout
        unresolved: list[str] = []
        while True:
            addresses: list[Address] = []
            for host, port in self._initial_peers:
                found = await resolve(host, port)
                addresses += found
                for address in found:
                    self._node.rpc.ledger.proved(address)  # the user named it
                if not found:
                    unresolved.append(host)
            way_in = await self._first_answer(list(dict.fromkeys(addresses)))
            if way_in is not None and way_in.id != self._node.identity.peer_id:
                self.answered.append(way_in)
                return way_in
            ourselves = way_in is not None
            if way_in is not None and self._node.rpc.client_only:
                raise IdentityInUseError(
                    f"another process uses the identity of peer {short_id(way_in.id)}, at "
                    f"{format_host_port(*way_in.address)}; {OWN_IDENTITY}"
                )
            if ourselves and len(addresses) == 1:
                return None  # this node, or another process of its identity: peers that train find out
            if self._node.clock() >= deadline:
                break
            await asyncio.sleep(JOIN_RETRY_SECONDS)
        names = ", ".join(format_host_port(host, port) for host, port in self._initial_peers)
        if self._node.rpc.other_version is not None:
            raise IncompatiblePeerError(
                f"the nodes at {names} speak version {self._node.rpc.other_version} of the table, this one "
                f"(p2pavg {__version__}) version {VERSION}; install the same p2pavg version everywhere"
            )
        hint = f"; no address is known for {unresolved[0]}" if unresolved else ""
        hint += "; one of them is this peer's own" if ourselves else ""
        raise UnreachableError(
            f"none of the initial peers answered, over UDP or TCP ({names}){hint}; check that one of them "
            f"runs and that its port is open, for TCP at least"
        )

    async def _first_answer(self, addresses: list[Address]) -> Contact | None:
        """The first contact to answer; this node itself only when nobody else does."""
        pings = {asyncio.ensure_future(self._node.ask_where(address, tries=2)) for address in addresses}
        self._tasks |= pings
        ourselves = None
        while pings:
            done, pings = await asyncio.wait(pings, return_when=asyncio.FIRST_COMPLETED)
            self._tasks -= done
            for contact in (ping.result() for ping in done):
                if contact is not None and contact.id != self._node.identity.peer_id:
                    for ping in pings:
                        ping.add_done_callback(self._answered_later)
                    return contact
                ourselves = contact or ourselves
        return ourselves

    def _answered_later(self, ping: asyncio.Future[Contact | None]) -> None:
        self._tasks.discard(ping)
        contact = None if ping.cancelled() else ping.result()
        if contact is not None and contact.id != self._node.identity.peer_id:
            self.answered.append(contact)
