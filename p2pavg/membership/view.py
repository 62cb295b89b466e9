"""The live view of one run: who is there now, kept fresh over a DHT that many runs may share."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from p2pavg.membership.peerinfo import PeerInfo
from p2pavg.membership.pulse import WAKE_SECONDS, Pulse
from p2pavg.membership.roster import Member, Roster
from p2pavg.membership.table.address import is_loopback
from p2pavg.membership.table.dht import DHT, key_of
from p2pavg.membership.table.seal import Seal
from p2pavg.membership.table.store import Held

logger = logging.getLogger("p2pavg.membership")

LIFETIME = 15.0
LEAVE_SECONDS = 0.9
LAZY_VIEW = 16
MOVE_SECONDS = 2.0


class View:
    """The peers of run `run_id`. `on_change` is called on the loop after every change of `peers`.

    Runs of up to about 128 peers are seen whole; of larger ones every peer sees a sample of that size. In
    runs of over 16 a peer's epoch, lineage and rate may lag, by up to 0.3 s times the number of peers.
    """

    def __init__(
        self, dht: DHT, run_id: str, *, lifetime: float = LIFETIME, run_key: bytes | None = None
    ) -> None:
        """run_key: 32 secret bytes of a closed run: only who has them finds and reads its records."""
        self.on_change: Callable[[], None] = lambda: None
        self._dht = dht
        self._key = key_of("run", run_id) if run_key is None else key_of("closed run", run_id, run_key)
        self._seal = None if run_key is None else Seal(run_key)
        self._lifetime = lifetime
        self._own: PeerInfo | None = None
        self._found_addresses: tuple[tuple[str, int], ...] = ()
        self._next_move = 0.0
        self._announcing: asyncio.Future[None] | None = None
        self._dead: dict[bytes, tuple[tuple[int, int], float]] = {}
        self._peers: Mapping[bytes, PeerInfo] = MappingProxyType({})
        self._loop = asyncio.get_running_loop()
        self._expiry: asyncio.TimerHandle | None = None
        self._roster = Roster(dht.identity.peer_id, lifetime)
        beat_key = None if run_key is None else hmac.digest(run_key, b"beats", hashlib.sha256)
        self._pulse = Pulse(dht, self._key, lifetime, self._roster, self._addresses_of, self._tick, beat_key)
        self._unwatch = dht.watch(self._key, self._on_record)

    @property
    def peers(self) -> Mapping[bytes, PeerInfo]:
        """The live peers by id, without this one: a snapshot that later changes do not alter."""
        return self._peers

    async def announce(self, info: PeerInfo) -> None:
        """Publish `info`, to the table and to every peer in view, and keep it fresh; call again to change it.

        A change of nothing but epoch, lineage and rate is told at once only in a small view. Addresses that
        equal the DHT's `external_addresses` follow them from then on.
        """
        before, self._own = self._own, info
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
            self._pulse.value = self._encode(replace(self._own, leaving=True))
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
        if self._announcing is not None:
            self._announcing.cancel()
        if self._expiry is not None:
            self._expiry.cancel()

    async def refresh_now(self) -> None:
        """Read the run's members now: from the table, and from members that it names."""
        await self._pulse.read()

    def _encode(self, info: PeerInfo) -> bytes:
        value = info.encode()
        return value if self._seal is None else self._seal.close(value, info.peer_id)

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
        own = {host for host, _ in self._own.addresses} if self._own else set()
        same_machine = any(host in own for host, _ in info.addresses)
        usable = [a for a in info.addresses if same_machine or not is_loopback(a[0])]
        return usable or list(info.addresses)

    def _on_record(self, held: Held) -> None:
        peer_id = held.record.peer_id
        if peer_id == self._dht.identity.peer_id:
            return
        known = self._roster.members.get(peer_id)
        if known is not None and known.held is held:
            if peer_id in self._dead:
                self._update()  # the refresh may show that it lives after all
            return
        value: bytes | None = held.record.value
        if self._seal is not None:
            value = self._seal.open(held.record.value, peer_id)
        info = None if value is None else PeerInfo.decode(value, peer_id, held.record.incarnation)
        if info is None:
            logger.debug("ignored a malformed record of a peer")
        elif self._roster.put(info, held, self._dht.clock()):
            if info.leaving:
                self._roster.remove(peer_id)
            elif known is None:
                self._pulse.grew()
            self._update()

    def _is_dead(self, peer_id: bytes, member: Member) -> bool:
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
