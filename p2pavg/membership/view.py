"""The live view of one run: who is there now, kept fresh over a DHT that many runs may share."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from p2pavg.membership.address import is_loopback
from p2pavg.membership.dht import DHT, key_of
from p2pavg.membership.peerinfo import PeerInfo
from p2pavg.membership.record import SignedRecord
from p2pavg.membership.store import Held

logger = logging.getLogger("p2pavg.membership")

LIFETIME = 15.0
POLL_SECONDS = 1.0
LEAVE_SECONDS = 1.0
LEFT_LIFETIME = 5.0


class View:
    """The peers of run `run_id`. `on_change` is called on the loop after every change of `peers`."""

    def __init__(self, dht: DHT, run_id: str, *, lifetime: float = LIFETIME) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._dht = dht
        self._key = key_of("run", run_id)
        self._lifetime = lifetime
        self._own: PeerInfo | None = None
        self._held: dict[bytes, tuple[PeerInfo, Held]] = {}
        self._dead: dict[bytes, tuple[tuple[int, int], float]] = {}
        self._peers: Mapping[bytes, PeerInfo] = MappingProxyType({})
        self._loop = asyncio.get_running_loop()
        self._expiry: asyncio.TimerHandle | None = None
        self._unwatch = dht.watch(self._key, self._on_record)
        self._tasks = {asyncio.ensure_future(self._poll())}
        self._keeper: asyncio.Task[None] | None = None

    @property
    def peers(self) -> Mapping[bytes, PeerInfo]:
        """The live peers by id, without this one: a snapshot that later changes do not alter."""
        return self._peers

    async def announce(self, info: PeerInfo) -> None:
        """Publish `info` now, to the table and to every peer in view, and keep it fresh; call again to
        change it.
        """
        self._own = info
        if self._keeper is not None:
            self._keeper.cancel()
        await self._publish(info, self._lifetime)
        self._keeper = asyncio.ensure_future(self._keep_fresh(info))

    def report_dead(self, peer_id: bytes) -> None:
        """The transport lost this peer: it leaves the view at once, until a newer record of it appears."""
        held = self._held.get(peer_id)
        if held is not None:
            self._dead[peer_id] = (held[1].record.version, time.monotonic())
            self._update()

    def report_alive(self, peer_id: bytes) -> None:
        """The transport has a link to this peer: an earlier `report_dead` no longer counts."""
        if self._dead.pop(peer_id, None) is not None:
            self._update()

    async def leave(self) -> None:
        """Tell everybody that this peer leaves (they see it within a second), and stop following the run."""
        if self._own is not None:
            if self._keeper is not None:
                self._keeper.cancel()
            parting = replace(self._own, leaving=True)
            try:
                await asyncio.wait_for(self._publish(parting, LEFT_LIFETIME), LEAVE_SECONDS)
            except TimeoutError:
                logger.debug("some peers did not confirm that this one leaves")
            self._own = None
        self.close()

    def close(self) -> None:
        """Stop following the run without telling anybody."""
        self._unwatch()
        self._unwatch = lambda: None
        for task in (*self._tasks, self._keeper):
            if task is not None:
                task.cancel()
        if self._expiry is not None:
            self._expiry.cancel()

    async def refresh_now(self) -> None:
        """Read the run's members from the table now."""
        await self._dht.get(self._key)

    async def _publish(self, info: PeerInfo, lifetime: float) -> None:
        await asyncio.gather(self._dht.store(self._key, info.encode(), lifetime), self._push(info, lifetime))

    async def _push(self, info: PeerInfo, lifetime: float) -> None:
        await asyncio.sleep(0)  # the store above signs the record first
        targets = [(p.peer_id, address) for p in self._peers.values() for address in self._usable(p)[:1]]
        await self._dht.push(self._key, targets)

    async def _keep_fresh(self, info: PeerInfo) -> None:
        while True:
            await asyncio.sleep(self._lifetime / 3 * random.uniform(0.85, 1.0))
            await self._dht.store(self._key, info.encode(), self._lifetime)

    async def _poll(self) -> None:
        while True:
            await self._dht.get(self._key)
            await asyncio.sleep(POLL_SECONDS * random.uniform(0.8, 1.0))

    def _usable(self, info: PeerInfo) -> list[tuple[str, int]]:
        """Addresses in the order to try; a loopback address counts only for a peer of this same machine."""
        own = {host for host, _ in self._own.addresses} if self._own else set()
        same_machine = any(host in own for host, _ in info.addresses)
        usable = [a for a in info.addresses if same_machine or not is_loopback(a[0])]
        return usable or list(info.addresses)

    def _on_record(self, held: Held) -> None:
        peer_id = held.record.peer_id
        if peer_id == self._dht.identity.peer_id:
            return
        known = self._held.get(peer_id)
        if known is not None and known[1].record is held.record:
            self._update()
            return
        info = PeerInfo.decode(held.record.value, peer_id, held.record.incarnation)
        if info is None:
            logger.debug("ignored a malformed record of a peer")
            return
        self._held[peer_id] = (info, held)
        self._update()

    def _is_dead(self, record: SignedRecord, held: Held) -> bool:
        dead = self._dead.get(record.peer_id)
        if dead is None:
            return False
        version, reported = dead
        # a link of the chain revealed a whole lifetime after the report comes from a live peer
        if record.version > version or held.refreshed > reported + self._lifetime:
            del self._dead[record.peer_id]
            return False
        return True

    def _update(self) -> None:
        now = time.monotonic()
        for peer_id in [i for i, (_, held) in self._held.items() if held.expires <= now]:
            del self._held[peer_id]
            self._dead.pop(peer_id, None)
        peers = {
            peer_id: info
            for peer_id, (info, held) in self._held.items()
            if not info.leaving and not self._is_dead(held.record, held)
        }
        self._schedule_expiry((held.expires for _, held in self._held.values()), now)
        if peers != self._peers:
            self._peers = MappingProxyType(peers)
            self.on_change()

    def _schedule_expiry(self, times: Iterable[float], now: float) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        first = min(times, default=None)
        self._expiry = (
            None if first is None else self._loop.call_later(max(0.0, first - now) + 0.001, self._update)
        )
