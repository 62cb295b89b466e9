"""The distributed hash table that peers find each other in. Every node is equal; any one of them is a way
in.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from p2pavg.errors import ConfigurationError
from p2pavg.identity import Identity
from p2pavg.membership.table.address import (
    WILDCARDS,
    Address,
    bind,
    family_of,
    interface_addresses,
    is_loopback,
    normalise,
    own_addresses,
    parse_host_port,
    resolve,
)
from p2pavg.membership.table.carrying.streams import Dial, Streams, Take, dial_plainly
from p2pavg.membership.table.dialling_back import (
    Connect,
    DialBack,
    Reachability,
    find_reachability,
    is_reached_at,
    reaches_itself,
    tcp_connect,
)
from p2pavg.membership.table.node import Node
from p2pavg.membership.table.publish import Publication
from p2pavg.membership.table.reading import Reading
from p2pavg.membership.table.record import KEY_BYTES, Record, SignedRecord
from p2pavg.membership.table.records.entries import StoredRecord
from p2pavg.membership.table.ways_in import WaysIn
from p2pavg.membership.table.whereabouts import announceable
from p2pavg.membership.table.wire import Contact
from p2pavg.networks import is_private, is_public, network_of
from p2pavg.report.wire import Wire

logger = logging.getLogger("p2pavg.membership")

K = 8
JOIN_TIMEOUT = 5.0
UPKEEP_SECONDS = 2.0
PURGE_SECONDS = 30.0
REJOIN_LOST = 8
FIRST_REFRESH_SECONDS = 4.0
REFRESH_GROWTH = 3.0
GROWTH = 8  # a table grows when an eighth of its nodes is new
LONGEST_REFRESH_SECONDS = 150.0
REVIEW_SECONDS = 60.0  # between two looks at where this node is
REVIEWED = 4  # observers asked then; all, when one of them says something new


class DHT:
    """One node, on the event loop that started it; all methods belong to that loop's thread."""

    def __init__(
        self,
        node: Node,
        host: str,
        port: int,
        initial_peers: Sequence[Address],
        connect: Connect,
        incarnation: int,
    ) -> None:
        self.port = port
        self.node = node
        self._host = host
        self._initial_peers = list(initial_peers)
        self._publications: dict[bytes, Publication] = {}
        self._incarnation = incarnation
        self._closed = False
        self._tasks: set[asyncio.Future[Any]] = set()
        self._refresh_interval = FIRST_REFRESH_SECONDS
        self._next_refresh = float("inf")
        self._grown = 0  # contacts that are new since the last refresh
        self._next_review = float("-inf")
        self._reviewing: asyncio.Future[None] | None = None
        self._odd: set[str] = set()  # where some saw it at the last review, and it was not held to be
        self.mapped: Address | None = None  # a port of the gateway that leads to this node's
        self._tried: Mapping[Address, bool] = {}  # at the last look: where others got through, and where not
        self._own: Callable[[], list[str]] = lambda: own_addresses(host)
        self.on_moved: Callable[[], None] = lambda: None  # others see this node elsewhere than before
        self._ways_in = WaysIn(node, self._initial_peers, self._tasks)
        self.observers: Callable[[], list[Contact]] = list  # peers that this one has links with
        self.is_dialled: Callable[[], bool] = lambda: False  # whether others' links to this peer are up
        self._dialler = DialBack(connect, node.clock)
        node.dial = self._dialler.dial
        node.on_new_contact.add(self._on_new_contact)

    @classmethod
    async def start(
        cls,
        identity: Identity,
        *,
        host: str,
        port: int,
        initial_peers: Sequence[Address] = (),
        client_only: bool = False,
        k: int = K,
        join_timeout: float = JOIN_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
        open_endpoint: Callable[[asyncio.DatagramProtocol], Address] | None = None,
        connect: Connect = tcp_connect,
        incarnation: int | None = None,
        dial: Dial = dial_plainly,
        attach: Callable[[Take], None] | None = None,
    ) -> DHT:
        """Open UDP `port` (0: any free one) on `host` and join the table of any of `initial_peers`.

        initial_peers: (host, port), where the host may be a name. Without any this node is the first of a
        new table. `join_timeout` is in seconds.
        Raises `AddressInUseError` when the port is taken, `UnreachableError` when initial peers are given and
        none answers, `IncompatiblePeerError` when those that do are of another version. A simulation passes
        its own `clock`, `connect` and, instead of a socket, `open_endpoint`, which connects a datagram
        protocol to an address. `incarnation` tells this life of the identity from earlier ones; by default
        milliseconds of the wall clock, and a clock that went back does no harm. Where UDP does not get
        through, connections made by `dial` carry the table; `attach` is given what takes those that come to
        the TCP port of the same number, if this node has one.
        """
        node = Node(identity, k=k, client_only=client_only, clock=clock)
        if open_endpoint is None:
            bound = bind(host, port)
            await asyncio.get_running_loop().create_datagram_endpoint(lambda: node.rpc, sock=bound)
            here = frozenset(interface_addresses())
            node.rpc.carrier.is_here = lambda host: host in here or is_loopback(host)
            node.whereabouts.hosts = [own for own in own_addresses(host) if is_public(own)]
            port = normalise(bound.getsockname())[1]
            streams = Streams(node.rpc.stream_received, 0 if attach is None or client_only else port, dial)
            node.rpc.carrier.streams = streams
            if attach is not None:
                attach(streams.take)
        else:
            host, port = open_endpoint(node.rpc)
        node.bound = host, port
        if incarnation is None:
            incarnation = time.time_ns() // 1_000_000
        dht = cls(node, host, port, initial_peers, connect, incarnation)
        if open_endpoint is not None and host in WILDCARDS:
            dht._own = list  # this machine is none of the simulation's
        try:
            if initial_peers:
                await dht._join(join_timeout)
        except BaseException:
            await dht.stop()
            raise
        dht._spawn(dht._upkeep())
        return dht

    @property
    def ways_in(self) -> list[Contact]:
        """The initial peers that answered."""
        return self._ways_in.answered

    @property
    def identity(self) -> Identity:
        return self.node.identity

    @property
    def clock(self) -> Callable[[], float]:
        """Monotonic seconds, by which everything here expires."""
        return self.node.clock

    @property
    def contacts(self) -> int:
        """The number of nodes in this node's routing table."""
        return len(self.node.contacts)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of payload sent and received so far, over UDP and TCP."""
        return self.node.rpc.carrier.bytes_sent, self.node.rpc.carrier.bytes_received

    @property
    def is_deaf(self) -> bool:
        """Whether UDP is of no use to this node, so that it takes part over TCP."""
        return self.node.rpc.carrier.is_deaf

    @property
    def wire(self) -> Wire:
        """Bytes over UDP, with the headers of IP and UDP."""
        return self.node.rpc.carrier.wire

    async def store(self, key: bytes, value: bytes, lifetime: float) -> bool:
        """Publish this node's record under `key`, replacing its earlier one, for `lifetime` seconds.

        `value` has at most 840 bytes. Storing the same value again refreshes the record, which costs a tenth
        of the bytes. True when at least one node holds the record (a node alone holds it itself).
        """
        return await self.publication(key).publish(value, lifetime)

    async def get(self, key: bytes) -> dict[bytes, Record]:
        """Every peer's newest verified, unexpired record under `key`, by peer id, this node's own
        included.
        """
        await Reading(self.node, key).run()
        return self.known(key)

    def known(self, key: bytes) -> dict[bytes, Record]:
        """The records under `key` that this node holds; it asks nobody."""
        now = self.node.clock()
        return {held.record.peer_id: held.as_record(now) for held in self.node.store.live(key, now)}

    def watch(
        self,
        key: bytes,
        callback: Callable[[StoredRecord], None],
        vet: Callable[[SignedRecord], bool] = lambda record: True,
    ) -> Callable[[], None]:
        """Call back whenever a new version or refresh of a record under `key` arrives; returns the
        function that ends it. vet: which records are taken under the key.
        """
        return self.node.store.watch(key, callback, vet)

    async def introduce(self, address: str) -> bool:
        """Learn of a node of another table, or of this one: the tables merge. False when nobody answers
        there.
        """
        host, port = parse_host_port(address)
        for numeric in await resolve(host, port):
            self.node.rpc.ledger.proved(numeric)
            contact = await self.node.ask_where(numeric)
            if contact is not None and contact.id != self.identity.peer_id:
                await self.node.find(self.identity.peer_id, via=[contact])
                return True
        return False

    def external_addresses(self) -> list[Address]:
        """The addresses at which others reach this node, or most likely do: as they saw it, or the machine's.

        Addresses that hold on one link or one machine alone are among them only where there is no other.
        """
        if is_loopback(self._host):
            return [(self._host, self.port)]
        return announceable(self.node.whereabouts.hosts, self._own(), self.port, self.mapped, self._tried)

    def review_address(self) -> None:
        """Something suggests that this machine's address changed: ask others now where they see it."""
        if not self._closed and (self._reviewing is None or self._reviewing.done()):
            self.node.rpc.carrier.ways.changed()  # another network may pass UDP
            self._reviewing = self._spawn(self._review())

    async def reviewed(self) -> None:
        """Ask others where they see this node, and wait for what they say."""
        self.review_address()
        if self._reviewing is not None:
            await asyncio.wait([self._reviewing])

    async def check_reachability(self, *, in_haste: bool = False) -> Reachability:
        """Have others open a TCP connection to the port that the gateway leads here, and to this node's own,
        where they see it; takes up to 3 seconds, or twice that when the first one fails. in_haste: one that
        works will do.
        """
        ports = [self.port] if self.mapped is None else [self.mapped[1], self.port]
        found = await find_reachability(self.node, ports, in_haste=in_haste)
        self._tried = found.tried or self._tried
        return found

    def become_client_only(self) -> None:
        """From now on this node only asks: others no longer list it as a contact."""
        self.node.rpc.client_only = True
        if self.node.rpc.carrier.streams is not None:
            self.node.rpc.carrier.streams.listens_at(0)

    def become_reachable(self, port: int) -> None:
        """Others open connections to this node's TCP port after all, and may list it as a contact."""
        self.node.rpc.client_only = False
        if self.node.rpc.carrier.streams is not None:
            self.node.rpc.carrier.streams.listens_at(port)

    async def stop(self) -> None:
        """Close the socket and end all work. Records that this node published expire by themselves."""
        self._closed = True
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._dialler.close()
        self.node.close()

    # joining

    async def _join(self, timeout: float) -> None:
        way_in = await self._ways_in.find(timeout)
        if way_in is not None:
            self._spawn(self._find_neighbours(way_in))

    async def _find_neighbours(self, way_in: Contact) -> None:
        await self.node.find(self.identity.peer_id, via=[way_in])

    # upkeep

    async def _upkeep(self) -> None:
        """Stay findable: refresh the table, forget the dead, try again whom we lost (so partitions heal)."""
        self._next_refresh = self.node.clock() + random.uniform(0.5, 1.0)
        next_purge = self.node.clock() + PURGE_SECONDS
        far = False  # its own neighbourhood and a random one in turn
        while True:
            await asyncio.sleep(UPKEEP_SECONDS * random.uniform(0.8, 1.2))
            now = self.node.clock()
            if now >= self._next_review or (not self.node.whereabouts.voices and self.observers()):
                self.review_address()
            await (self._probe_one_lost() if self.contacts else self._rejoin())
            if now >= self._next_refresh:
                await self.node.find(self.node.random_target() if far else self.identity.peer_id)
                far = not far
                self._grown = 0
                self._refresh_interval = min(REFRESH_GROWTH * self._refresh_interval, LONGEST_REFRESH_SECONDS)
                self._next_refresh = now + self._refresh_interval * random.uniform(0.8, 1.2)
            if now >= next_purge:
                self.node.store.purge(now)
                next_purge = now + PURGE_SECONDS

    async def _rejoin(self) -> None:
        """Ask the initial peers again, and some lost nodes, as nobody is left in the table."""
        found = await asyncio.gather(*(resolve(host, port) for host, port in self._initial_peers))
        addresses = [address for several in found for address in several]
        addresses += [contact.address for contact in self.node.lost.values()][-REJOIN_LOST:]
        for address in addresses:
            self.node.rpc.ledger.proved(address)
        await asyncio.gather(*(self.node.ask_where(address) for address in dict.fromkeys(addresses)))

    async def _review(self) -> None:
        """Ask a few observers where they see this node; where most say something new, have them try it."""
        self._next_review = self.node.clock() + REVIEW_SECONDS * random.uniform(0.8, 1.2)
        known = [voice.observer for voice in self.node.whereabouts.voices]
        others = [c for c in self.observers() or self._ways_in.answered if self.node.whereabouts.speaks(c)]
        asked = list({network_of(c.address[0]): c for c in (*others, *known)}.values())
        random.shuffle(asked)
        before = self.node.whereabouts.hosts
        for some in (asked[:REVIEWED], asked[REVIEWED:]):
            await asyncio.gather(*(self.node.ask_where(c.address, expected=c.id) for c in some))
            odd = {voice.host for voice in self.node.whereabouts.voices}.difference(before)
            if not odd:
                self._odd = odd
                return
        await self._adopt_candidate()
        news, self._odd = not odd <= self._odd, odd
        if news or self.node.whereabouts.hosts != before:
            self.on_moved()

    async def _adopt_candidate(self) -> None:
        whereabouts, own = self.node.whereabouts, interface_addresses()
        host = whereabouts.candidate(own)
        if host is None or is_loopback(self._host):
            return
        if host in own or self.node.rpc.client_only or await self._is_mine(host):
            whereabouts.adopt(host, keep=self.is_dialled())
            logger.info("others see this peer at %s now", host)
        else:
            logger.info("others see this peer at %s, where they do not reach it: it is not announced", host)

    async def _is_mine(self, host: str) -> bool:
        """Whether this node is reached at a new host, as others say. While it reaches itself at one where it
        is known to be, the word of others does not suffice: it has to reach itself at the new one, too.
        """
        kind = family_of(host), is_private(host)
        known = [own for own in self.node.whereabouts.hosts if (family_of(own), is_private(own)) == kind]
        tried = [reaches_itself(self.node, each, self.port) for each in (*known, host)]
        *before, now = await asyncio.gather(*tried)
        if any(before) and not now:
            return False
        return await is_reached_at(self.node, host, self.port)

    async def _probe_one_lost(self) -> None:
        addresses = [(contact.id, contact.address) for contact in self.node.lost.values()]
        if addresses:
            peer_id, address = random.choice(addresses)
            await self.node.ping(address, expected=peer_id, tries=2)

    def _on_new_contact(self) -> None:
        """A table that grows looks around sooner; one that gains a node now and then does not."""
        self._grown += 1
        if GROWTH * self._grown >= self.contacts:
            self._refresh_interval = FIRST_REFRESH_SECONDS
            self._next_refresh = min(self._next_refresh, self.node.clock() + FIRST_REFRESH_SECONDS)

    def publication(self, key: bytes) -> Publication:
        """This node's record under `key`, for callers that keep it fresh themselves."""
        if len(key) != KEY_BYTES:
            raise ConfigurationError(f"a key has {KEY_BYTES} bytes, not {len(key)}; make one with key_of")
        publication = self._publications.get(key)
        if publication is None:
            publication = self._publications[key] = Publication(self.node, key, self._incarnation)
        return publication

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
