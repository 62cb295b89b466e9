"""The addresses of the peers in view. One that is announced counts once the peer has proven itself there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from p2pavg.membership.names import Names
from p2pavg.membership.peerinfo import PeerInfo
from p2pavg.membership.roster import Roster, SeenPeer
from p2pavg.membership.table.address import Address
from p2pavg.membership.table.ledger import AMPLIFICATION
from p2pavg.membership.table.node import Node
from p2pavg.membership.table.records.entries import PREFIX_BYTES, StoredRecord
from p2pavg.membership.table.wire import PING_BYTES, Contact, RequestKind

MAX_PROVING = 256
PROOF_SECONDS = 1.0  # that a newcomer waits for peers to prove themselves
FEW = 4  # members in view, below which each tries addresses that nobody vouches for: once for a record
TRIED_ADDRESSES = 6  # of one peer
DIAL_BYTES = 240  # what opening a connection sends before it is answered


class Places:
    """The places of one run's peers."""

    def __init__(
        self,
        node: Node,
        key: bytes,
        roster: Roster,
        addresses_of: Callable[[PeerInfo], list[Address]],
        near: Callable[[PeerInfo], list[Address]],
        found: Callable[[], None],
    ) -> None:
        """addresses_of: the addresses of a peer in the order to try. near: those of them that lead to it
        inside of a network that it shares with this peer. found: called when a host name that a peer
        announced has an address now.
        """
        self._node = node
        self._key = key
        self._roster = roster
        self._addresses_of = addresses_of
        self._near = near
        self._asked_inside: dict[bytes, list[Address]] = {}  # peer -> where it was asked, on its word alone
        self._names = Names(node.clock, found)
        self._heard_at: dict[bytes, Address] = {}
        self._proving: dict[bytes, asyncio.Task[None]] = {}
        self._tried: dict[
            bytes, bytes
        ] = {}  # peer -> its record, when its address was tried on nobody's word

    def close(self) -> None:
        """Ask nobody any more."""
        for task in self._proving.values():
            task.cancel()

    def hear(self, peer_id: bytes, address: Address) -> None:
        """Note the address from which a peer's beat came."""
        self._heard_at[peer_id] = address
        if len(self._heard_at) > 2 * len(self._roster) + 16:
            self._heard_at = {i: a for i, a in self._heard_at.items() if i in self._roster.members}

    def contacts(self, members: Iterable[SeenPeer]) -> list[Contact]:
        """The address to send to: where a peer has proven itself; else where it says it is, or was heard
        from.
        """
        found = []
        for member in members:
            address = self._address(member)
            if address is not None:
                found.append(Contact(member.info.peer_id, address))
        return found

    def _address(self, member: SeenPeer) -> Address | None:
        peer_id, held = member.info.peer_id, member.held
        ledger = self._node.rpc.ledger
        announced = [] if member.info.client_only else self._numeric(member.info)
        for address in announced:
            if ledger.is_home(address, peer_id):
                return address
        heard_at = self._heard_at.get(peer_id)
        if heard_at is not None and (member.info.client_only or ledger.is_proved(heard_at)):
            return heard_at
        return held.proved_at or (announced[0] if announced else None)

    def _numeric(self, info: PeerInfo) -> list[Address]:
        """The addresses of a peer that need no look-up any more, best first."""
        named = self._addresses_of(info)[:TRIED_ADDRESSES]
        found = [(numeric, port) for host, port in named for numeric in self._names.numeric(host)]
        return list(dict.fromkeys(found))[:TRIED_ADDRESSES]

    def addresses_to_dial(self, info: PeerInfo) -> list[Address]:
        """The addresses at which a connection to a peer may be opened now, best first."""
        if self._looks_inside(info):
            return []
        ledger, member = self._node.rpc.ledger, self._roster.members.get(info.peer_id)
        proved_at = None if member is None else member.held.proved_at
        addresses = self._numeric(info)
        found = [
            address
            for address in addresses
            if ledger.is_home(address, info.peer_id) or (proved_at is not None and proved_at[0] == address[0])
        ]
        if found or info.peer_id in self._proving:
            return found
        return [address for address in addresses if ledger.spend(address, DIAL_BYTES)]

    def _looks_inside(self, info: PeerInfo) -> bool:
        """Whether a peer behind the same router is being asked where it says that it is inside. It is asked
        there once, and answers in milliseconds or not at all.
        """
        peer_id, ledger = info.peer_id, self._node.rpc.ledger
        near = [address for address in self._near(info) if not ledger.is_home(address, peer_id)]
        if not near or peer_id in self._proving:
            return bool(near)
        if self._asked_inside.get(peer_id) == near or len(self._proving) >= MAX_PROVING:
            return False
        if len(self._asked_inside) > MAX_PROVING:
            self._asked_inside.clear()
        self._asked_inside[peer_id] = near
        for address in near:
            ledger.told(address, PING_BYTES / AMPLIFICATION + 1)
        self._start(peer_id, near)
        return True

    def asks_inside(self, peer_id: bytes) -> bool:
        """Whether a peer behind the same router is being asked where it is inside, to be dialled there."""
        return peer_id in self._proving and peer_id in self._asked_inside

    def missed(self, info: PeerInfo) -> None:
        """The peer was dialled in vain at all addresses."""
        for host, _ in info.addresses:
            self._names.doubt(host)

    def prove(self, info: PeerInfo, held: StoredRecord) -> None:
        """Have a peer prove itself where it says that it is."""
        peer_id = info.peer_id
        full = peer_id in self._proving or len(self._proving) >= MAX_PROVING
        if full or not self._roster.wants(peer_id[:PREFIX_BYTES]):
            return
        addresses = [held.told_at] if info.client_only and held.told_at else self._numeric(info)
        ledger = self._node.rpc.ledger
        home = next((address for address in addresses if ledger.is_home_now(address, peer_id)), None)
        if home is not None:
            self._node.store.prove(held, home)
            return
        if len(self._roster) < FEW and self._tried.get(peer_id) != held.record.encoded[-8:]:
            if len(self._tried) > MAX_PROVING:
                self._tried.clear()
            self._tried[peer_id] = held.record.encoded[-8:]
            for address in addresses:
                ledger.told(address, PING_BYTES / AMPLIFICATION + 1)
        addresses = [address for address in addresses if ledger.room(address) >= PING_BYTES]
        if addresses:
            self._start(peer_id, addresses)

    def _start(self, peer_id: bytes, addresses: list[Address]) -> None:
        task = self._proving[peer_id] = asyncio.ensure_future(self._prove(peer_id, addresses))
        task.add_done_callback(lambda _: self._proving.pop(peer_id, None))

    async def _prove(self, peer_id: bytes, addresses: list[Address]) -> None:
        rpc, store = self._node.rpc, self._node.store

        async def ask(address: Address) -> None:
            if await rpc.ask(address, RequestKind.PING, [], expected=peer_id, prove=True) is not None:
                held = store.lookup(self._key, peer_id[:PREFIX_BYTES])
                if held is not None and held.record.peer_id == peer_id and held.proved_at is None:
                    store.prove(held, address)

        await asyncio.gather(*(ask(address) for address in addresses))

    async def proofs(self) -> None:
        """Wait until all that were asked have proven themselves, but no longer than a newcomer can."""
        if self._proving:
            await asyncio.wait(list(self._proving.values()), timeout=PROOF_SECONDS)
