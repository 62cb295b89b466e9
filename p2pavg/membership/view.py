"""The live view of one run: who is there now, kept fresh over a DHT that many runs may share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

from p2pavg.credentials import Credentials
from p2pavg.membership.closed import ClosedRun
from p2pavg.membership.peerinfo import PeerInfo
from p2pavg.membership.places import Places
from p2pavg.membership.pulse import WAKE_SECONDS, Pulse
from p2pavg.membership.revoking import Revoking
from p2pavg.membership.roster import Roster, SeenPeer
from p2pavg.membership.table.address import Address, behind_one_router, is_link_local, is_loopback
from p2pavg.membership.table.dht import DHT
from p2pavg.membership.table.record import SignedRecord, key_of
from p2pavg.membership.table.records.entries import StoredRecord
from p2pavg.membership.table.wire import Contact

logger = logging.getLogger("p2pavg.membership")

LIFETIME = 15.0
LEAVE_SECONDS = 0.9
LAZY_VIEW = 16
MOVE_SECONDS = 2.0
HEARING_SECONDS = 0.02  # between two looks for peers of which new members had spoken


class View:
    """The peers of run `run_id`. `on_change` is called on the loop after every change of `peers`.

    Runs of up to about 128 peers are seen whole; of larger ones every peer sees a sample of that size. In
    runs of over 16 a peer's epoch, lineage and rate may lag, by up to 0.3 s times the number of peers.
    """

    def __init__(
        self,
        dht: DHT,
        run_id: str,
        *,
        lifetime: float = LIFETIME,
        credentials: Credentials | None = None,
    ) -> None:
        """credentials: of a closed run: only who has them finds and reads its records."""
        self.on_change: Callable[[], None] = lambda: None
        self.on_revoked: Callable[[list[bytes]], None] = lambda peer_ids: None
        self._dht = dht
        self._closed_run = None if credentials is None else ClosedRun(credentials)
        if self._closed_run is None:
            self._key = key_of("run", run_id)
        else:
            self._key = key_of("closed run", run_id, self._closed_run.run_key)
        self._lifetime = lifetime
        self._own: PeerInfo | None = None
        self._found_addresses: tuple[tuple[str, int], ...] = ()
        self._next_move = 0.0
        self._announcing: asyncio.Future[None] | None = None
        self._dead: dict[bytes, tuple[tuple[int, int], float]] = {}
        self._peers: Mapping[bytes, PeerInfo] = MappingProxyType({})
        self._loop = asyncio.get_running_loop()
        self._expiry: asyncio.TimerHandle | None = None
        self._newly: set[bytes] = set()  # peers whose earlier words are to be heard
        self._hearing: asyncio.TimerHandle | None = None
        self._roster = Roster(dht.identity.peer_id, lifetime)
        self._places = Places(dht.node, self._key, self._roster, self._addresses_of, self._near, self._update)
        self._revoking: Revoking | None = None
        if self._closed_run is not None:
            self._revoking = Revoking(
                dht.node, self._key, self._closed_run, self._everybody, self._on_revoked
            )
        self._pulse = Pulse(dht, self._key, lifetime, self._roster, self._places, self._tick, self._revoking)
        self._unwatch = dht.watch(self._key, self._on_record, self._is_ours)

    @property
    def peers(self) -> Mapping[bytes, PeerInfo]:
        """The live peers by id, without this one: a snapshot that later changes do not alter."""
        return self._peers

    def quiet_s(self, peer_id: bytes) -> float:
        """Seconds since a peer in view last said that it is there, by those that hold its record."""
        held = self._roster.members[peer_id].held
        return max(0.0, held.record.lifetime - (held.expires - self._dht.clock()))

    async def announce(self, info: PeerInfo) -> None:
        """Publish `info`, to the table and to every peer in view, and keep it fresh; call again to change it.

        A change of nothing but epoch, lineage and rate is told at once only in a small view. Addresses that
        equal the DHT's `external_addresses` follow them from then on.
        """
        before, self._own = self._own, info
        self._dht.node.announced = frozenset(host for host, _ in info.addresses)
        self._found_addresses = tuple(self._dht.external_addresses())
        lazy = before is not None and len(self._roster) > LAZY_VIEW and info.differs_only_in_progress(before)
        self._pulse.value = self._encode(info)
        if not lazy:
            await self._pulse.publish()

    def report_dead(self, peer_id: bytes) -> None:
        """The transport lost this peer: it leaves the view at once, until a newer record of it appears."""
        member = self._roster.members.get(peer_id)
        if member is not None:
            self._dead[peer_id] = (member.held.record.version, self._dht.clock())
            self._update()

    def report_alive(self, peer_id: bytes) -> None:
        """The transport has a link to this peer: an earlier `report_dead` no longer counts."""
        if self._dead.pop(peer_id, None) is not None:
            self._update()

    async def leave(self) -> None:
        """Tell everybody that this peer leaves (they see it within a second), and stop following the run."""
        if self._own is not None:
            self._pulse.value = self._encode(replace(self._own, departing=True))
            self._own = None
            try:
                await asyncio.wait_for(self._pulse.publish(), LEAVE_SECONDS)
            except TimeoutError:
                logger.debug("some peers did not confirm that this one leaves")
        self.close()

    def close(self) -> None:
        """Stop following the run without telling anybody."""
        self._unwatch()
        self._unwatch = lambda: None
        self._pulse.close()
        self._places.close()
        if self._revoking is not None:
            self._revoking.close()
        if self._announcing is not None:
            self._announcing.cancel()
        for timer in (self._expiry, self._hearing):
            if timer is not None:
                timer.cancel()

    async def refresh_now(self) -> None:
        """Read the run's members now: from the table, and from members that it names."""
        await self._pulse.read()
        if self._hearing is not None:
            self._hearing.cancel()
            self._hear()

    def addresses_to_dial(self, info: PeerInfo) -> list[Address]:
        """Where a connection to a peer may be opened now, best first: where it has proven itself; and, a few
        times, where members say that it has. Empty: it is being asked.
        """
        found = self._places.addresses_to_dial(info)
        member = self._roster.members.get(info.peer_id)
        if not found and member is not None:
            self._places.prove(info, member.held)
        if member is not None and not info.client_only and not self._places.asks_inside(info.peer_id):
            # A machine may not know of an address that it has, as one of the other family; whoever named
            # it as a way in does.
            homes = [contact.address for contact in self._places.contacts([member])]
            proven = [home for home in homes if self._dht.node.rpc.is_proven(info.peer_id, home)]
            found += [home for home in proven if home not in found]
        return found

    def announced_by(self, peer_id: bytes) -> tuple[Address, ...]:
        """The addresses that a peer announces, some of which may be names; none: it is not in view."""
        info = self._peers.get(peer_id)
        return () if info is None else info.addresses

    def missed(self, info: PeerInfo) -> None:
        """The peer was dialled in vain: a name that it announced may have another address by now."""
        self._places.missed(info)

    def contacts(self, peer_ids: Collection[bytes]) -> list[Contact]:
        """The addresses at which those of these peers that are in view receive datagrams."""
        members = self._roster.members
        return self._places.contacts([members[peer_id] for peer_id in peer_ids if peer_id in members])

    def is_revoked(self, peer_id: bytes) -> bool:
        """Whether the run's authority has said that this peer is no member any more."""
        return self._closed_run is not None and peer_id in self._closed_run.revoked

    async def revoke(self, statements: bytes) -> int:
        """Tell everybody in view what the authority says of former members; how many have confirmed it."""
        return 0 if self._revoking is None else await self._revoking.revoke(statements)

    def _encode(self, info: PeerInfo) -> bytes:
        value = info.encode()
        return value if self._closed_run is None else self._closed_run.close(value, info.peer_id)

    def _everybody(self) -> list[Contact]:
        return self._places.contacts(self._roster.members.values())

    def _is_ours(self, record: SignedRecord) -> bool:
        """Whether a record, which anybody may bring, is one of this run's."""
        if self._closed_run is None or record.peer_id == self._dht.identity.peer_id:
            return True
        return self._closed_run.open(record.value, record.peer_id) is not None

    def _on_revoked(self, peer_ids: list[bytes]) -> None:
        for peer_id in peer_ids:
            if peer_id in self._roster.members:
                self._roster.remove(peer_id)
        self._update()
        self.on_revoked(peer_ids)

    def _tick(self) -> None:
        """Announce anew when others turn out to see this peer elsewhere than it was found before."""
        own, now = self._own, self._dht.clock()
        if own is None or own.addresses != self._found_addresses or now < self._next_move:
            return
        addresses = tuple(self._dht.external_addresses())
        if set(addresses) != set(own.addresses):
            self._next_move = now + MOVE_SECONDS
            self._announcing = asyncio.ensure_future(self.announce(replace(own, addresses=addresses)))

    def _addresses_of(self, info: PeerInfo) -> list[tuple[str, int]]:
        """Addresses in the order to try; a loopback address counts only for a peer of this same machine."""
        own = self._own.addresses if self._own else ()
        same_machine = any(host in {host for host, _ in own} for host, _ in info.addresses)
        told = [a for a in info.addresses if not is_link_local(a[0])]
        usable = [a for a in told if same_machine or not is_loopback(a[0])]
        near = self._near(info)
        return [*near, *(a for a in usable if a not in near)] or told

    def _near(self, info: PeerInfo) -> list[tuple[str, int]]:
        own = self._own.addresses if self._own else self._dht.external_addresses()  # not announced yet
        return behind_one_router(info.addresses, own)

    def _on_record(self, held: StoredRecord) -> None:
        peer_id = held.record.peer_id
        if peer_id == self._dht.identity.peer_id:
            return
        known = self._roster.members.get(peer_id)
        if known is not None and known.held is held:
            if peer_id in self._dead:
                self._update()  # the refresh may show that it lives after all
            return
        value: bytes | None = held.record.value
        if self._closed_run is not None:
            value = self._closed_run.open(held.record.value, peer_id)
        info = None if value is None else PeerInfo.decode(value, peer_id, held.record.incarnation)
        if info is None:
            logger.debug("ignored a malformed record of a peer")
            return
        hearsay = held.told_at is not None and not self._roster.members.keys().isdisjoint(held.tellers)
        if held.proved_at is None and not info.departing:
            self._places.prove(info, held)  # it may be a replay, or name an address of somebody else
        if known is None and held.proved_at is None and not hearsay:
            return
        if self._roster.put(info, held, self._dht.clock()):
            if info.departing:
                self._roster.remove(peer_id)
            elif known is None:
                self._pulse.grew()
                self._hear_of(peer_id)
            self._update()

    def _hear_of(self, teller: bytes) -> None:
        """A peer came into view: its word counts now, also what it said before, of others."""
        self._newly.add(teller)
        if self._hearing is None:
            self._hearing = self._loop.call_later(HEARING_SECONDS, self._hear)

    def _hear(self) -> None:
        """Take the peers of which those say that came into view lately: those alone, so that a chain of
        strangers that vouch for each other costs one look at a time.
        """
        self._hearing = None
        tellers, self._newly = self._newly, set()
        for held in self._dht.node.store.live(self._key, self._dht.clock()) if tellers else ():
            if held.record.peer_id not in self._roster.members and not tellers.isdisjoint(held.tellers):
                self._on_record(held)

    def _is_dead(self, peer_id: bytes, member: SeenPeer) -> bool:
        dead = self._dead.get(peer_id)
        if dead is None:
            return False
        version, reported = dead
        # a link of the chain revealed a whole lifetime after the report comes from a live peer
        if member.held.record.version > version or member.held.refreshed > reported + self._lifetime:
            del self._dead[peer_id]
            return False
        return True

    def _update(self) -> None:
        now = self._dht.clock()
        slept = self._pulse.slept(now)
        for peer_id in [] if slept else self._roster.expire(now):
            self._dead.pop(peer_id, None)
        members = self._roster.members
        peers = {peer_id: m.info for peer_id, m in members.items() if not self._is_dead(peer_id, m)}
        if self._expiry is not None:
            self._expiry.cancel()
        first = min((m.held.expires for m in members.values()), default=None)
        if first is not None:
            pause = max(WAKE_SECONDS / 4 if slept else 0.0, first - now) + 0.001
            self._expiry = self._loop.call_later(pause, self._update)
        if peers != self._peers:
            self._peers = MappingProxyType(peers)
            self.on_change()
