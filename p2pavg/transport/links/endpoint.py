"""The endpoint: one peer's listening port, and its links to other peers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from p2pavg.credentials import Credentials, SelfSigned, Tls
from p2pavg.errors import ClosedError, ProtocolError
from p2pavg.identity import Identity, short_id
from p2pavg.membership.table.carrying.streams import Take
from p2pavg.report.wire import Wire
from p2pavg.transport.engine import Engine
from p2pavg.transport.links import handshake, listening, proofs
from p2pavg.transport.links import raw_socket as wire
from p2pavg.transport.links.budget import MAX_LINKS, Budget
from p2pavg.transport.links.carried import Carried, CountedSocket, Way
from p2pavg.transport.links.dials import Dials
from p2pavg.transport.links.greeting import Met
from p2pavg.transport.links.handshake import Hello, Refusal
from p2pavg.transport.links.link import Link, Message, Opener
from p2pavg.transport.links.pairing import Pairing
from p2pavg.transport.links.reception import Reception
from p2pavg.transport.links.repair import Repairs
from p2pavg.transport.links.streams.keeper import MOST_ACCEPTED, StreamKeeper
from p2pavg.transport.links.streams.tuner import StreamCounts
from p2pavg.transport.links.upkeep import keep_up
from p2pavg.transport.paths import PathFacts, Paths

logger = logging.getLogger("p2pavg.transport")
RELAYED_STREAMS = 2  # data streams of a link that a third peer carries, within that peer's cap


class EndpointEvents(Protocol):
    """The endpoint calls these methods on the event loop; they must be quick."""

    def link_up(self, link: Link) -> None:
        """A peer is linked: messages and chunks may be sent. Its first data stream may still be on its
        way.
        """

    def link_down(self, link: Link, reason: str) -> None:
        """A link is closed: called once for each link_up, except when the endpoint closes."""

    def message(self, link: Link, message: Message) -> None:
        """A control message arrived. The method may raise ProtocolError; the link is then closed."""


class Endpoint:
    """Links to other peers, by peer id. Engine events go to the engine's own listener, which passes
    `stream_closed` on to this object's method of the same name.
    """

    def __init__(
        self,
        identity: Identity,
        run_id: str,
        engine: Engine,
        hello: dict[str, Any],
        streams: int | None,
        events: EndpointEvents,
        credentials: Credentials | None,
        vet: Callable[[Mapping[str, Any]], None],
        paths: Paths,
    ) -> None:
        """Use `start`."""
        self._paths = paths
        self._credentials = credentials
        self.party = handshake.Party.of(run_id, closed=credentials is not None)
        self._without = SelfSigned(identity)
        self.hello = hello
        self.port = 0
        self.identity = identity
        self._run_id = run_id
        self._engine = engine
        self._streams = streams
        self._events = events
        self._incarnation = time.time_ns()
        self._loop = asyncio.get_running_loop()
        self._links: dict[bytes, Link] = {}
        self._by_id: dict[int, Link] = {}
        self._by_tag: dict[bytes, Link] = {}
        self._keepers: dict[int, StreamKeeper] = {}
        self._numbers = itertools.count(1)
        self._pairing = Pairing(identity.peer_id, self._links)
        self._budget = Budget()
        self._vet = vet
        self._carried = Carried()
        self._dials = Dials(self, self._carried.socket)
        self._carrying: dict[int, Link] = {}  # the links with data streams
        self._counts = StreamCounts(engine, self._carrying, self.set_streams) if streams is None else None
        self._repairs = Repairs(engine, self._by_id, self._replace_stream)
        self._closed = False

    @classmethod
    async def start(
        cls,
        identity: Identity,
        *,
        run_id: str,
        listen_host: str,
        listen_port: int,
        port_is_default: bool,
        engine: Engine,
        hello: dict[str, Any],
        streams: int | None,
        events: EndpointEvents,
        credentials: Credentials | None = None,
        vet: Callable[[Mapping[str, Any]], None] = lambda facts: None,
        paths: Paths | None = None,
    ) -> Endpoint:
        """Listen. A taken port raises AddressInUseError, but with port_is_default the next free one is used.

        hello: the facts that a handshake tells other peers; every handshake reads the map anew, so that it
        may be updated. The transport knows "schema" (bytes: peers with different ones are refused; empty fits
        all), "terms" (a map: named values that must be equal), "data" (False: no data streams on this side's
        links). streams: data streams per link; None: as many as transfers call for. credentials: speak with
        members of the run only, under TLS; None: an open run. vet: raises ProtocolError for facts that no
        correct peer tells at a handshake. paths: the measurements of earlier runs; None: there are none.
        """
        known = Paths(None) if paths is None else paths
        endpoint = cls(identity, run_id, engine, hello, streams, events, credentials, vet, known)
        sock = listening.bind(listen_host, listen_port, port_is_default=port_is_default)
        endpoint.reception = Reception(endpoint, endpoint._budget, endpoint._by_tag, engine)
        endpoint._listener = listening.Listener(sock, endpoint.reception.welcome, endpoint._carried)
        endpoint.port = endpoint._listener.port
        endpoint._ticker = endpoint._loop.create_task(
            keep_up(engine, endpoint._ping_all, endpoint._repairs, endpoint._counts, endpoint.remember)
        )
        return endpoint

    reception: Reception
    _listener: listening.Listener
    _ticker: asyncio.Task[None]

    @property
    def links(self) -> Mapping[bytes, Link]:
        """Links whose control connection is up, by peer id."""
        return self._links

    def carried(self) -> Mapping[bytes | None, Wire]:
        """Traffic of all connections so far, by peer id; None: the peer has not proved its id."""
        found = dict(self._carried.by_peer())
        for link in self._links.values():
            found[link.peer_id] = found.get(link.peer_id, Wire()) + self._engine.wire(link.id)
        return found

    def set_streams(self, link: Link, streams: int) -> None:
        """Set how many data streams this side wants; the larger wish of both sides counts. Never blocks."""
        if link.closed or link.streams_wanted == streams:
            return
        link.streams_wanted = streams
        if link.id in self._keepers:
            self._keepers[link.id].check()
        else:
            link.send({"t": "_streams", "n": streams})

    def stream_closed(self, link: int, stream: int, reason: str) -> None:
        """Engine event: a stream was lost; this side opens another one in its place."""
        if link in self._by_id:
            peer = short_id(self._by_id[link].peer_id)
            logger.debug("stream %d of the link to %s closed: %s", stream, peer, reason)
        if link in self._keepers:
            self._keepers[link].check()

    def attach(self, table: Take) -> None:
        """Pass connections of the table that come to this port on to `table`; until then they are closed."""
        self.reception.table = table

    async def dial(self, host: str, port: int) -> CountedSocket:
        """Open a plain connection, counted with the others of this peer. Raises OSError."""
        return await wire.dial(host, port, self._carried.socket)

    async def close(self) -> None:
        """Close the port and all links, without events. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._ticker.cancel()
        await self._dials.close()
        await self._listener.close()
        self.remember()
        for link in list(self._links.values()):
            link.close("this peer leaves")

    # -- dialling

    async def connect(
        self, host: str, port: int, *, expect: bytes | None = None, timeout: float, anew: bool = False
    ) -> Link:
        """Return the link to the peer at host:port, an existing one where there is one.

        expect: the other peer's id, when known. anew: replace a link that exists but is silent. Raises
        UnreachableError (no peer answers, or another one than expected), IncompatiblePeerError (another run,
        model or version), ConfigurationError (the address is this peer's own, or belongs to a second live
        process of a linked peer), IdentityInUseError (this process is such a second one).
        """
        if self._closed:
            raise ClosedError("this peer is closed")
        if expect is not None and expect in self._links and not anew:
            return self._links[expect]
        return await self._dials.connect((host, port), expect, timeout, anew=anew)

    async def greet(self, sock: CountedSocket, expect: bytes, opener: Opener, timeout: float) -> Link:
        """Return the link to a peer over a connection that was not made by dialling; `sock.way` says how it
        was made. The other side has given its end to `welcome`. opener: makes the connections of data
        streams. An existing link is replaced when it is silent, or when a third peer carries it but not this
        connection.

        Raises like `connect`.
        """
        return await self._dials.greet(sock, expect, opener, timeout)

    def welcome(self, sock: CountedSocket) -> None:
        """Take a connection that did not come through the listening port; the other side speaks first."""
        if self._closed:
            sock.close()
        else:
            self._listener.admit(sock, sock.getpeername()[0])

    # -- for dials and the reception

    def tls(self, way: Way) -> Tls | None:
        """The TLS of a control connection; None: no TLS, in an open run whose link no third peer carries."""
        return self._without if self._credentials is None and way is Way.RELAYED else self._credentials

    @property
    def peer_id(self) -> bytes:
        """This peer's id."""
        return self.identity.peer_id

    @property
    def pairing(self) -> Pairing:
        """The rule that decides which of two connections to one peer is kept."""
        return self._pairing

    def make_socket(self, *args: Any, **options: Any) -> CountedSocket:
        """Make a socket whose traffic is counted; the arguments are those of socket.socket."""
        return self._carried.socket(*args, **options)

    def check(self, mine: Hello, theirs: Hello, expect: bytes | None = None) -> None:
        """Raises Refusal when this peer makes no link with the other one, whoever that one proves to be."""
        handshake.check(mine, theirs, expect)
        if len(self._links) >= MAX_LINKS and theirs.peer_id not in self._links:
            raise Refusal(
                "full", f"that peer has {MAX_LINKS} links, the most that it keeps; name another one"
            )
        self._vet(theirs.facts)

    # -- links

    @property
    def incarnation(self) -> int:
        """When this process began, in nanoseconds of its wall clock."""
        return self._incarnation

    def make_hello(self) -> Hello:
        """The hello of this peer for one other peer."""
        return handshake.make_hello(self.identity, self._run_id, self.port, self._incarnation, self.hello)

    def establish(
        self,
        met: Met,
        address: tuple[str, int],
        *,
        dialled: bool,
        way: Way,
        opener: Opener | None = None,
    ) -> Link:
        """Two peers have met: there is a link."""
        theirs = met.listener if dialled else met.dialler
        connection = met.connection
        link = Link(
            next(self._numbers),
            theirs.peer_id,
            theirs.facts,
            address,
            dialled=dialled,
            secret=proofs.link_secret(met.dialler, met.listener),
            connection=connection,
            rtt_s=met.rtt_s,
            on_close=self._link_closed,
            party=self.party,
            way=way,
            opener=opener,
        )
        if way is Way.DIRECT:
            link.prior = self._paths.known(connection.local_host, link.address[0], link.rtt_min)
        self._links[link.peer_id] = link
        self._by_id[link.id] = link
        carries = self.hello.get("data") is not False and theirs.facts.get("data") is not False
        if carries:
            self._by_tag[proofs.link_tag(link.secret)] = link
            link.streams_wanted = self._streams or 0
            if way is Way.RELAYED:
                link.streams_wanted = RELAYED_STREAMS
            else:
                self._carrying[link.id] = link
        if carries and dialled:
            self._keepers[link.id] = StreamKeeper(link, self._engine, self._carried)
        elif link.streams_wanted:
            link.send({"t": "_streams", "n": link.streams_wanted})
        if self._counts is not None:
            self._counts.links_changed()
        self._pairing.arrived(link)
        self._events.link_up(link)
        connection.start(
            lambda message: self._received(link, message),
            link.close,
            lambda nbytes: self._pause_s(link, nbytes),
        )
        return link

    def _pause_s(self, link: Link, nbytes: int) -> float:
        """For how many seconds reading from the link pauses after a message of so many bytes."""
        pause = self._budget.pause_s(link.peer_id, nbytes, time.monotonic())
        if pause > 0 and not link.slowed:
            link.slowed = True
            logger.warning(
                "peer %s sends far more messages than it needs; they are read more slowly",
                short_id(link.peer_id),
            )
        return pause

    def remember(self) -> None:
        """Keep the measurements of the paths for later runs."""
        for link in self._carrying.values():
            self._learn(link)
        self._paths.save()

    def _learn(self, link: Link) -> None:
        if link.way is Way.DIRECT:
            streams = self._counts.settled(link) if self._counts is not None else 0
            facts = PathFacts(link.rtt_min, link.brings_bps, streams, time.time())
            self._paths.learn(link.local_host, link.address[0], facts)

    def _link_closed(self, link: Link, reason: str) -> None:
        if link.id in self._carrying:
            self._learn(link)
        if self._links.get(link.peer_id) is link:
            del self._links[link.peer_id]
        self._by_id.pop(link.id, None)
        self._carrying.pop(link.id, None)
        self._by_tag.pop(proofs.link_tag(link.secret), None)
        keeper = self._keepers.pop(link.id, None)
        if keeper is not None:
            keeper.close()
        self._carried.add(link.peer_id, self._engine.wire(link.id))
        self._engine.detach(link.id)
        if not self._closed:
            if self._counts is not None:
                self._counts.links_changed()
            self._events.link_down(link, reason)

    def _received(self, link: Link, message: Message) -> None:
        kind = message.get("t")
        if kind == "_ping":
            if not isinstance(message.get("at"), int):
                raise ProtocolError("a ping without a time")
            link.send({"t": "_pong", "at": message["at"]})
        elif kind == "_pong":
            link.ponged(message.get("at"))
        elif kind == "_alive":
            link.reply(message, {"t": "_yes"})
        elif kind == "_streams":
            wanted = message.get("n")
            if not isinstance(wanted, int) or not 0 <= wanted <= MOST_ACCEPTED:
                raise ProtocolError("a wish for an impossible number of streams")
            link.streams_asked = wanted
            if link.id in self._keepers:
                self._keepers[link.id].check()
        elif kind == "_resend":
            self._repairs.asked(link, message)
        elif not link.take_answer(message):
            self._events.message(link, message)

    def _replace_stream(self, link: Link, stream: int) -> None:
        self._engine.detach(link.id, stream)
        if link.id in self._keepers:
            self._keepers[link.id].check()

    def _ping_all(self) -> None:
        for link in list(self._links.values()):
            link.ping()
            if link.id in self._keepers:
                self._keepers[link.id].check()
