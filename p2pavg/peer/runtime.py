"""Place: everything of one peer that lives on its event loop. Links, membership and rounds meet here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from p2pavg import codecs, outline
from p2pavg.errors import (
    AddressInUseError,
    CredentialError,
    IdentityInUseError,
    P2PAvgError,
    ProtocolError,
    UnreachableError,
)
from p2pavg.identity import Identity, short_id
from p2pavg.membership import DHT, PeerInfo, View
from p2pavg.membership.table.address import is_loopback
from p2pavg.peer import advice, crowd
from p2pavg.peer.arrival import Arrival
from p2pavg.peer.dialling import Dialler
from p2pavg.peer.settings import Settings
from p2pavg.report import RoundReport
from p2pavg.report.compact import CompactReport
from p2pavg.report.status import Status
from p2pavg.rounds.loop.driver import Driver
from p2pavg.rounds.loop.hello import trains, vet
from p2pavg.rounds.loop.planning import planner
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.measure.link_meter import LinkMeter
from p2pavg.rounds.measure.recorder import Recorder
from p2pavg.rounds.measure.status import WATCH, Watching, status
from p2pavg.rounds.protocol.lineage import first_lineage
from p2pavg.rounds.protocol.roles import Role
from p2pavg.rounds.session import Session
from p2pavg.rounds.training import Start, TrainingSpec
from p2pavg.transport.engine import Engine
from p2pavg.transport.engines import make_engine
from p2pavg.transport.links import handshake
from p2pavg.transport.links.budget import MAX_LINKS
from p2pavg.transport.links.endpoint import Endpoint
from p2pavg.transport.links.handshake import Party
from p2pavg.transport.links.link import Link

logger = logging.getLogger("p2pavg.peer.peer")

PORTS_TRIED = 64
EARLY_BYTES = 1 << 20  # of messages that wait for the start of the rounds
ANNOUNCE_INTERVAL_S = 1.0
REVOKED = "the run's owner has revoked these credentials; ask the owner for a new invitation"
HEARTBEAT_S = 0.1


def gives_way(shut_out: int, peers: int, *, later: bool, proven: bool) -> bool:
    """Whether this process ends when `shut_out` of `peers` keep it out for another process of its identity.

    Of two such processes the one that more peers keep out ends, of equals the one that began later. Where
    peers prove who they are, the later one ends at the first word; in an open run anybody could say so.
    """
    return 2 * shut_out > peers or (later and (proven or 2 * shut_out == peers))


class Place:
    """One peer's links, table node, view and, once it trains, rounds. All methods run on the loop."""

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        publish: Callable[[RoundReport], None],
        codec: codecs.Codec,
    ) -> None:
        self.settings = settings
        self._codec = codec
        self._identity = identity
        self.driver: Driver | None = None
        self.watching = Watching(self._status)
        self._last: RoundReport | None = None
        self._publish = publish
        self._refusals: list[P2PAvgError] = []
        self._warned_of: dict[bytes, str] = {}  # what was said of a peer that cannot take part
        self._distrusted: list[P2PAvgError] = []  # of peers whose certificates, or ours, are not accepted
        self._former: set[bytes] = set()  # members that the run's authority has revoked
        self._shut_out: set[bytes] = set()  # by whom, because another process uses this one's identity
        self._early: list[tuple[Link, dict[str, Any]]] = []  # from peers that were faster than our start
        self._early_bytes = 0
        self.threads = 0  # that the training thread computes with; 0: does not matter
        self._announcing: asyncio.Task[None] | None = None
        self._spec: TrainingSpec | None = None
        self._arrival: Arrival | None = None
        self._closing: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Open the ports and join the table. Raises P2PAvgError with what to do."""
        self._engine = make_engine(self, self._codec, encrypted=self.settings.credentials is not None)
        try:
            await self._open_ports()
        except BaseException:
            self._engine.close()
            raise
        self._engine.set_heartbeat(HEARTBEAT_S)
        if self.settings.upload_bps is not None:
            self._engine.set_upload_limit(self.settings.upload_bps / 8)
        credentials = self.settings.credentials
        self.view = View(self.dht, self.settings.run_id, credentials=credentials)
        self.view.on_revoked = self._revoked
        self.dht.observers = lambda: self.view.contacts(self.links)
        self.dht.is_dialled = lambda: any(not link.dialled for link in self.links.values())
        self._dialler = Dialler(self.endpoint, self.view, self._refused)
        self.view.on_change = self._look

    async def _open_ports(self) -> None:
        """TCP and UDP on one number; when the default is taken, the next on which both are free."""
        settings = self.settings
        hello: dict[str, Any] = {
            "schema": b"",
            "role": "watcher",
            "client_only": settings.client_only,
            "region": settings.region,
        }
        port = settings.port
        for attempt in range(PORTS_TRIED):
            self.endpoint = await Endpoint.start(
                self.identity,
                run_id=settings.run_id,
                listen_host=settings.host,
                listen_port=port,
                port_is_default=settings.port_is_default,
                engine=self._engine,
                hello=hello,
                streams=settings.streams,
                events=self,
                credentials=settings.credentials,
                vet=self._vet,
            )
            try:
                self.dht = await DHT.start(
                    self.identity,
                    host=settings.host,
                    port=self.endpoint.port,
                    initial_peers=settings.initial_peers,
                    client_only=settings.client_only,
                )
                return
            except AddressInUseError:
                taken = self.endpoint.port
                await self.endpoint.close()
                if attempt == PORTS_TRIED - 1 or not (settings.port_is_default or settings.port == 0):
                    raise
                port = 0 if settings.port == 0 else taken + 1
            except UnreachableError as error:
                await self.endpoint.close()
                party = Party.of(settings.run_id, closed=settings.credentials is not None)
                raise await advice.silent(settings.initial_peers, party, error) from None
            except BaseException:
                await self.endpoint.close()
                raise

    # ------------------------------------------------------------------------------- for the driver

    @property
    def peer_id(self) -> bytes:
        """This peer's id."""
        return self.identity.peer_id

    @property
    def identity(self) -> Identity:
        """This peer's key pair."""
        return self._identity

    @property
    def engine(self) -> Engine:
        """What moves the chunks."""
        return self._engine

    @property
    def engine_name(self) -> str:
        """Which engine: "pump" or "python"."""
        return type(self._engine).__name__.removesuffix("Engine").lower()

    @property
    def received_bytes(self) -> int:
        """What the data streams of all links that are up have brought."""
        return sum(self._engine.traffic(link.id)[1] for link in self.links.values())

    @property
    def links(self) -> Mapping[bytes, Link]:
        """Links whose control connection is up, by peer id."""
        return self.endpoint.links

    def company(self) -> int:
        """How many others that train are linked now."""
        return sum(trains(link.hello) for link in self.links.values())

    def standing_changed(self) -> None:
        """Epoch, lineage or role changed: tell newcomers and watchers."""
        driver = self.driver
        if driver is None:
            return
        machine = driver.machine
        if self._arrival is not None:
            self._arrival.look()
        self.endpoint.hello.update(
            epoch=machine.epoch,
            lineage=machine.lineage,
            role=machine.role.value,
            total=machine.total_samples,
            leader=machine.leader or b"",
        )
        if self._announcing is None or self._announcing.done():
            self._announcing = asyncio.get_running_loop().create_task(self._announce())

    async def _announce(self) -> None:
        info = self._info()
        await self.view.announce(info)
        await asyncio.sleep(ANNOUNCE_INTERVAL_S)
        while not self._closed and (latest := self._info()) != info:
            info = latest
            await self.view.announce(info)
            await asyncio.sleep(ANNOUNCE_INTERVAL_S)

    def _info(self) -> PeerInfo:
        driver, spec, last = self.driver, self._spec, self._last
        assert driver is not None
        assert spec is not None
        return PeerInfo(
            peer_id=self.peer_id,
            addresses=tuple(self.addresses()),
            client_only=self.settings.client_only,
            region=self.settings.region,
            epoch=driver.machine.epoch,
            lineage=driver.machine.lineage,
            role="trainer",
            model=spec.schema,
            samples_per_second=last.local_samples / last.seconds_total
            if last and last.seconds_total
            else 0.0,
            report=b"" if last is None else CompactReport.of(last).encode(),
            name=self.settings.name,
            joining=driver.machine.role is Role.JOINER,
        )

    def broken(self) -> None:
        """The driver cannot go on: what others see of this peer ends."""
        self._closing = asyncio.get_running_loop().create_task(self.close(0.0))

    def _finished(self, report: RoundReport) -> None:
        """An epoch's report is made."""
        self._last = report
        self.watching.report(report)
        self._publish(report)

    def _status(self) -> Status:
        """What watchers are told each second."""
        driver = self.driver
        assert driver is not None
        links = driver.recorder.links()
        return status(driver.machine, links, region=self.settings.region, moving=driver.moving)

    def addresses(self) -> Sequence[tuple[str, int]]:
        """(host, port) under which others reach this peer, best first."""
        if self.settings.announce is not None:
            return [self.settings.announce]
        return [(host, self.endpoint.port) for host, _ in self.dht.external_addresses()]

    def _is_here(self, host: str) -> bool:
        """Whether an address is one of this machine."""
        return is_loopback(host) or any(host == own for own, _ in self.addresses())

    # -------------------------------------------------------------------------------------- joining

    async def train(self, session: Session, spec: TrainingSpec) -> None:
        """Enter the run: link to everybody who trains in it, then open the rounds. Raises
        IncompatiblePeerError.
        """
        codec = codecs.get(spec.compression)
        fresh = Start(0, first_lineage(self.settings.run_id.encode(), spec.initial_digest))
        start = spec.start or fresh
        self.endpoint.hello.update(
            schema=spec.schema,
            outline=outline.pack(spec.outline),
            terms={
                "target_batch_size": spec.target_batch_size,
                "compression": codecs.label(codec),
                "model": ", ".join(spec.describe) or f"{spec.numel} values",
                **spec.terms,
            },
            epoch=start.epoch,
            lineage=start.lineage,
            role=Role.TRAINER.value,
            total=start.history[-1].total if start.history else 0,
            leader=b"",
        )
        await asyncio.gather(self.view.refresh_now(), self._learn_reachability())
        self._spec = spec  # from here on it dials, and tells whether it can be dialled
        self._look()
        await self._dialler.first_links(lambda: bool(self._refusals))
        if not self.links and not self._refusals:
            self._refusals += self._distrusted or await advice.ask(
                self.endpoint, self.settings.initial_peers, self.settings.run_id
            )
        if self._refusals:
            raise self._refusals[0]
        if not self.links:
            trainers = [info for info in self.view.peers.values() if info.role == "trainer"]
            advice.warn_of_unreachable(trainers, self.settings.run_id)
        role = Role.TRAINER
        others = [link.hello for link in self.links.values() if link.hello.get("role") == Role.TRAINER.value]
        for facts in others:
            if facts["epoch"] > start.epoch or (start.epoch == 0 and facts["lineage"] != start.lineage):
                role = Role.JOINER
        machine = Machine(
            me=self.peer_id,
            run_id=self.settings.run_id,
            epoch=start.epoch,
            lineage=start.lineage,
            history=start.history,
            role=role,
            target=spec.target_batch_size,
            plan=planner(lambda: spec.exact(machine.epoch) or spec.numel),
            client_only=self.settings.client_only,
            now=time.monotonic(),
            weighted=spec.weighted,
            life=time.time_ns(),
        )
        region = self.settings.region
        meter = LinkMeter(
            self._engine,
            region,
            self._is_here,
            carried=self.endpoint.carried,
            table=lambda: self.dht.wire,
        )
        run_id = self.settings.run_id
        recorder = Recorder(run_id, self.peer_id, codec.name, meter, self._finished, region=region)
        recorder.on_trace = self.watching.event
        driver = self.driver = Driver(self, session, spec, machine, recorder)
        session.connect(driver)
        driver.start()
        for link in list(self.links.values()):
            if trains(link.hello):
                driver.link_up(link)
        early, self._early = self._early, []
        for link, message in early:
            if self.links.get(link.peer_id) is not link:
                continue
            try:
                self.message(link, message)
            except ProtocolError as error:
                link.close(str(error))
        self._arrival = Arrival(
            run_id,
            lambda: (machine.epoch, machine.role is Role.JOINER),
            self.company,
            lambda: driver.states.downloader.progress,
        )
        self._arrival.begin()
        self.standing_changed()

    async def _learn_reachability(self) -> None:
        """Work as client_only, and say so, when others try and cannot open a connection to this peer."""
        if self.settings.client_only or self.settings.announce is not None:
            return
        found = await self.dht.check_reachability()
        if found.reachable is False:
            logger.warning("%s", found.advice)
            self.dht.become_client_only()
            self.settings = replace(self.settings, client_only=True)
            self.endpoint.hello["client_only"] = True

    async def set_target(self, samples: int | None) -> None:
        """Samples that make an epoch; None: one for every trainer now linked and this peer."""
        driver = self.driver
        if driver is not None:
            trainers = sum(link.hello.get("role") == Role.TRAINER.value for link in self.links.values())
            driver.set_target(1 + trainers if samples is None else samples)

    def _look(self) -> None:
        """Dial who has no link. A peer that does not train dials nobody."""
        if self._spec is not None:
            self._dialler.look()

    def _refused(self, peer_id: bytes, error: P2PAvgError) -> None:
        if self.driver is None and isinstance(error, CredentialError):
            self._distrusted.append(error)  # perhaps it is no member any more: the others decide
        elif self.driver is None:
            self._refusals.append(error)
        elif isinstance(error, IdentityInUseError):
            self._shut_out_by(peer_id, error)
        elif self._warned_of.get(peer_id) != str(error):
            if len(self._warned_of) >= MAX_LINKS:
                self._warned_of.clear()
            self._warned_of[peer_id] = str(error)
            logger.warning("peer %s cannot take part: %s", short_id(peer_id), error)

    def _vet(self, facts: Mapping[str, Any]) -> None:
        """Raises Refusal, or ProtocolError, for a peer that gets no link."""
        if facts.get("peer") in self._former:
            raise handshake.Refusal("credentials", REVOKED)
        vet(facts)

    def _revoked(self, peer_ids: list[bytes]) -> None:
        """The run's authority says that these are no members any more: their links end at once."""
        self._former.update(peer_ids)
        for peer_id in peer_ids:
            logger.warning("peer %s is no member any more: the run's owner has revoked it", short_id(peer_id))
            link = self.links.get(peer_id)
            if link is not None:
                link.close("the run's owner has revoked its credentials")
        if self.peer_id in self._former:
            error = CredentialError(REVOKED)
            self._distrusted.append(error)
            if self.driver is not None:
                self.driver.fail(error)

    def _shut_out_by(self, peer_id: bytes, error: IdentityInUseError) -> None:
        """Another process of this identity has a link to that peer: at a restart, when this process was
        stopped for so long that it counted as dead, or when two parts of a swarm met.
        """
        if peer_id not in self._shut_out:
            logger.warning("peer %s keeps this one out: %s", short_id(peer_id), error)
        self._shut_out.add(peer_id)
        trainers = {peer for peer, info in self.view.peers.items() if info.role == "trainer"}
        ends = gives_way(
            len(self._shut_out),
            len((trainers | self.links.keys() | self._shut_out) - {self.peer_id}),
            later=0 < error.since < self.endpoint.incarnation,
            proven=self.settings.credentials is not None,
        )
        if ends and self.driver is not None:
            self.driver.fail(error)

    # --------------------------------------------------------------------------- events of the links

    def link_up(self, link: Link) -> None:
        """Endpoint event."""
        self.view.report_alive(link.peer_id)
        self._shut_out.discard(link.peer_id)
        self._look_for_a_crowd()
        if self.driver is not None and trains(link.hello):
            self.driver.link_up(link)

    def _look_for_a_crowd(self) -> None:
        """Tell once that peers of this machine have too many threads."""
        here = sum(trains(link.hello) and self._is_here(link.address[0]) for link in self.links.values())
        told = None if self._spec is None else crowd.advice(1 + here, self.threads, crowd.cores())
        if told is not None:
            self.threads = 0
            logger.warning("%s", told)

    def link_down(self, link: Link, reason: str) -> None:
        """Endpoint event."""
        if self._closed:
            return
        self.view.report_dead(link.peer_id)
        self.dht.review_address()  # it may be this machine whose address changed
        self._dialler.link_down(link)
        self.watching.link_down(link)
        if self.driver is not None:
            self.driver.link_down(link, reason)
        self._look()

    def message(self, link: Link, message: dict[str, Any]) -> None:
        """Endpoint event. Raises ProtocolError, on which the endpoint drops the link."""
        if self.driver is None:
            self._early_bytes += len(handshake.pack(message))
            if self._early_bytes <= EARLY_BYTES:
                self._early.append((link, message))
            return
        if message.get("t") == WATCH:
            self.watching.watch(link)
            return
        self.driver.message(link, message)

    def stream_closed(self, link: int, stream: int, reason: str) -> None:
        """Engine event; the endpoint opens the stream again."""
        self.endpoint.stream_closed(link, stream, reason)

    def job_done(self, transfer: int, digests: tuple[bytes, ...]) -> None:
        """Engine event."""
        if self.driver is not None:
            self.driver.job_done(transfer, digests)

    def job_refused(self, transfer: int, rank: int, why: str) -> None:
        """Engine event."""
        if self.driver is not None:
            self.driver.job_refused(transfer, rank, why)

    def blob_chunk(self, transfer: int, chunk: int) -> None:
        """Engine event."""
        if self.driver is not None:
            self.driver.blob_chunk(transfer, chunk)

    def blob_sent(self, link: int, transfer: int, chunk: int) -> None:
        """Engine event."""
        if self.driver is not None:
            self.driver.blob_sent(link, transfer)

    # --------------------------------------------------------------------------------------- leaving

    async def close(self, notice_s: float) -> None:
        """Leave the run, telling everybody, and free all ports. Idempotent."""
        if self._closed:
            if self._closing is not None and self._closing is not asyncio.current_task():
                await asyncio.wait([self._closing])
            return
        driver = self.driver
        if driver is not None:
            driver.feed(ev.Leave(notice_s))
            try:
                await asyncio.wait_for(driver.farewell.left.wait(), notice_s)
            except TimeoutError:
                logger.info("left the run in the middle of a round")
            await driver.states.saved()
        self._closed = True
        self._dialler.close()
        if self._announcing is not None:
            self._announcing.cancel()
        self.watching.close()
        if self._arrival is not None:
            self._arrival.close()
        if driver is not None:
            driver.close()
        try:
            await self.view.leave()
        finally:
            await self.endpoint.close()
            await self.dht.stop()
            self._engine.close()
