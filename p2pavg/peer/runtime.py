"""Runtime: everything of one peer that lives on its event loop. Links, membership and rounds meet here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from p2pavg import codecs
from p2pavg.errors import P2PAvgError
from p2pavg.identity import Identity
from p2pavg.membership import PeerInfo, View
from p2pavg.peer import announcing, mapping
from p2pavg.peer.announcing import Announcer, record_of
from p2pavg.peer.dialling import Dialler
from p2pavg.peer.engine_reports import EngineReports
from p2pavg.peer.entering import EarlyMessages, build_machine, first_links, role_among
from p2pavg.peer.outlook import Outlook
from p2pavg.peer.ports import open_ports
from p2pavg.peer.reach.introductions import Introductions
from p2pavg.peer.reach.moves import Moves
from p2pavg.peer.reach.reachability import OwnAddresses
from p2pavg.peer.refusals import LinkRefusals
from p2pavg.peer.settings import Settings
from p2pavg.peer.words.observer import Observer
from p2pavg.report import RoundReport
from p2pavg.rounds.loop.driver import Driver
from p2pavg.rounds.loop.hello import trains
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.measure.link_meter import LinkMeter
from p2pavg.rounds.measure.recorder import Recorder
from p2pavg.rounds.measure.status import WATCH
from p2pavg.rounds.protocol.lineage import first_lineage
from p2pavg.rounds.protocol.roles import Role
from p2pavg.rounds.session import Session
from p2pavg.rounds.training import RunStart, TrainingSpec
from p2pavg.transport.engine import Engine
from p2pavg.transport.engines import make_engine
from p2pavg.transport.links.link import Link

logger = logging.getLogger("p2pavg.peer.peer")

RELAYED_SHARE = 0.25  # of the measured upload
UNMEASURED_RELAY_BPS = 10e6  # until gradients have flowed
HEARTBEAT_S = 0.2  # a third of the shortest silence that counts: two lost in a row are none
BEAT_S = 0.25


class Runtime:
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
        self._reports = EngineReports()
        self._outlook = Outlook(settings, identity.peer_id, publish, self.company)
        self._refusals = LinkRefusals(
            self._others,
            lambda: self.endpoint.incarnation,
            self._fail,
            proven=settings.membership is not None,
        )
        self._early = EarlyMessages()
        self._timer: asyncio.TimerHandle | None = None
        self._unheard = False  # there are links to trainers, and nothing comes over any of them
        self.threads = 0  # how many the training thread computes with; 0: it uses an accelerator
        self._announcer: Announcer | None = None
        self._spec: TrainingSpec | None = None
        self._closing: asyncio.Task[None] | None = None
        self._observer: Observer | None = None
        self._moves = Moves()
        self._closed = False

    async def start(self) -> None:
        """Open the ports and join the table. Raises P2PAvgError with what to do."""
        wished = bool(self.settings.map_port)
        maps_port = self.settings.maps_port and mapping.is_of_use(self.settings.bind[0], wished=wished)
        await self._outlook.start()
        self._engine = make_engine(self._reports, self._codec, encrypted=self.settings.membership is not None)
        try:
            self.endpoint, self.dht = await open_ports(
                self.settings, self.identity, self._engine, self, self._refusals.vet
            )
        except BaseException:
            self._engine.close()
            await self._outlook.close()
            raise
        self._reports.endpoint = self.endpoint
        self._reachability = OwnAddresses(self.settings, self.endpoint, self.dht, self._reach_changed)
        if maps_port:
            self._reachability.map_port(wished=wished)
        self._engine.set_heartbeat(HEARTBEAT_S)
        if self.settings.upload_bps is not None:
            self._engine.set_upload_limit(self.settings.upload_bps / 8)
        credentials = self.settings.membership
        self.view = View(self.dht, self.settings.run_id, credentials=credentials)
        self.view.on_revoked = self._revoked
        self.dht.observers = lambda: self.view.contacts(self.links)
        self.dht.is_dialled = lambda: any(not link.dialled for link in self.links.values())
        self._introductions = Introductions(
            self.endpoint, self._relay_bps, self._is_hidden, self.view.announced_by
        )
        self._dialler = Dialler(
            self.endpoint,
            self.view,
            self._refusals.refused,
            self._apart,
            meet=self._introductions.meet,
            is_hidden=self._is_hidden,
        )
        self.view.on_change = self._look

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
        """The engine, which moves the chunks."""
        return self._engine

    @property
    def engine_name(self) -> str:
        """The name of the engine: "pump" or "python"."""
        return type(self._engine).__name__.removesuffix("Engine").lower()

    @property
    def received_bytes(self) -> int:
        """Bytes that came over the data streams of all links that are up."""
        return sum(self._engine.traffic(link.id)[1] for link in self.links.values())

    @property
    def links(self) -> Mapping[bytes, Link]:
        """Links whose control connection is up, by peer id."""
        return self.endpoint.links

    def company(self) -> int:
        """How many other trainers are linked now; once this peer trains, those that its rounds wait for."""
        if self.driver is None:
            return sum(trains(link.hello) for link in self.links.values())
        return self.driver.machine.company

    def standing_changed(self) -> None:
        """Tell newcomers and watchers that epoch, lineage or role of this peer changed."""
        driver = self.driver
        if driver is None:
            return
        machine = driver.machine
        if self._observer is not None:
            self._observer.standing_changed()
        announcing.stand(self.endpoint.hello, machine)
        self._announce()

    def _announce(self) -> None:
        if self._announcer is not None:
            self._announcer.changed()

    def _reach_changed(self) -> None:
        """Others reach this peer in another way than before: tell them, and dial whom it has to dial now."""
        self._announce()
        self._look()

    def _record(self) -> PeerInfo:
        driver, spec = self.driver, self._spec
        assert driver is not None
        assert spec is not None
        machine, hidden = driver.machine, self._is_hidden()
        where = self.addresses()
        told = record_of(
            self.peer_id, self.settings, where, machine, spec, self._outlook.last, client_only=hidden
        )
        return replace(told, udp=not self.dht.is_deaf)

    def broken(self) -> None:
        """Leave the run at once: the driver cannot go on."""
        self._closing = asyncio.get_running_loop().create_task(self.close(0.0))

    def _relay_bps(self) -> float:
        """bit/s that this peer relays at most."""
        if self.settings.relay_bps is not None:
            return self.settings.relay_bps
        measured = 0.0 if self.driver is None else self.driver.upload_bps
        return measured * RELAYED_SHARE or UNMEASURED_RELAY_BPS

    def addresses(self) -> Sequence[tuple[str, int]]:
        """(host, port) under which others reach this peer, best first."""
        return self._reachability.addresses()

    def _is_hidden(self) -> bool:
        """Whether nobody can open a connection to this peer."""
        return self._reachability.client_only

    # -------------------------------------------------------------------------------------- joining

    async def train(self, session: Session, spec: TrainingSpec) -> None:
        """Enter the run: link to everybody who trains in it, then open the rounds. Raises
        IncompatiblePeerError.
        """
        fresh = RunStart(0, first_lineage(self.settings.run_id.encode(), spec.initial_digest))
        start = spec.start or fresh
        announcing.enter(self.endpoint.hello, spec, start)
        await asyncio.gather(self.view.refresh_now(), self._reachability.learn())
        self._spec = spec  # from here on this peer dials, and learns whether it can be dialled
        self._look()
        await first_links(self._dialler, self._refusals, self.endpoint, self.view, self.settings)
        role = role_among(self.links.values(), start)
        me, run_id = self.peer_id, self.settings.run_id
        machine, planner = build_machine(self.settings, me, spec, start, role, client_only=self._is_hidden())
        region, prices = self.settings.region or "", self.settings.price_table
        meter = LinkMeter(
            self._engine,
            region,
            self._reachability.is_here,
            carried=self.endpoint.carried,
            table=lambda: self.dht.wire,
        )
        codec = codecs.get(spec.compression).name
        recorder = Recorder(
            run_id, me, codec, meter, self._outlook.finished, region=region, device=spec.device
        )
        recorder.on_trace = self._outlook.watching.event
        recorder.cost = lambda: planner.cost
        recorder.relayed = lambda: self._introductions.relayed_bytes
        driver = self.driver = self._reports.driver = Driver(self, session, spec, machine, recorder)
        introductions = self._introductions
        self._outlook.trains(driver, self._reachability.in_words, lambda: introductions.relayed_bytes)
        self._refusals.trains = True
        session.connect(driver)
        driver.start()
        driver.feed(ev.Apart(self._dialler.apart))
        for link in list(self.links.values()):
            if trains(link.hello):
                driver.link_up(link)
        self._early.deliver(self.links, self.message)
        self._observer = Observer(
            run_id,
            self.links,
            self._reachability.is_here,
            lambda: (machine.epoch, machine.role is Role.JOINER),
            lambda: self.view.peers.values(),
            self.threads,
            None if prices is None else lambda regions: prices.unmatched({region, *regions}),
        )
        self._announcer = Announcer(self.view, self._record)
        self._beat()
        self.standing_changed()

    async def set_target(self, samples: int | None) -> None:
        """Set the samples that make an epoch; None: one for each trainer that is linked now, and one for this
        peer.
        """
        driver = self.driver
        if driver is not None:
            trainers = sum(link.hello.get("role") == Role.TRAINER.value for link in self.links.values())
            driver.set_target(1 + trainers if samples is None else samples)

    def _beat(self) -> None:
        """Look at what no event tells: who is silent, and who cannot be linked."""
        driver, observer = self.driver, self._observer
        if self._closed or driver is None or observer is None:
            return
        if gone := self._moves.stranded(self.links.values()):
            driver.feed(ev.Moved())
            for link in gone:
                link.close("this machine has another address now")
        if self._moves.moved:
            self._reachability.moved()
        self._reachability.beat()
        silent = driver.machine.silent
        training = {peer for peer, link in self.links.items() if trains(link.hello)}
        unheard = bool(training) and silent.issuperset(training)
        if unheard and not self._unheard:
            self.dht.review_address()  # this machine's address may have changed
        self._unheard = unheard
        observer.beat(silent)
        self._dialler.beat(silent)
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def _apart(self, peers: frozenset[bytes]) -> None:
        """Tell the rounds which trainers this peer cannot link to, though others can."""
        if self.driver is not None:
            self.driver.feed(ev.Apart(peers))

    def _look(self) -> None:
        """Dial the trainers without a link. A peer that does not train dials nobody."""
        if self._spec is not None:
            self._dialler.look()

    def _others(self) -> set[bytes]:
        """The ids of the trainers in view and of all linked peers."""
        trainers = {peer for peer, info in self.view.peers.items() if info.role == "trainer"}
        return (trainers | self.links.keys()) - {self.peer_id}

    def _revoked(self, peer_ids: list[bytes]) -> None:
        """Close the links of members that the run's authority has revoked."""
        self._refusals.revoked(peer_ids, own=self.peer_id)
        for peer_id in peer_ids:
            if peer_id in self.links:
                self.links[peer_id].close("the run's owner has revoked its credentials")

    def _fail(self, error: P2PAvgError) -> None:
        if self.driver is not None:
            self.driver.fail(error)

    # --------------------------------------------------------------------------- events of the links

    def link_up(self, link: Link) -> None:
        """Endpoint event."""
        self.view.report_alive(link.peer_id)
        self._refusals.linked(link.peer_id)
        if self._observer is not None:
            self._observer.link_up(link)
        if self.driver is not None and trains(link.hello):
            self.driver.link_up(link)

    def link_down(self, link: Link, reason: str) -> None:
        """Endpoint event."""
        if self._closed:
            return
        # Who only helps says nothing new when it lives after all, and whom this peer left is not dead.
        if trains(link.hello) and link not in self._moves.left:
            self.view.report_dead(link.peer_id)
        self.dht.review_address()  # the address of this machine may have changed
        self._dialler.link_down(link)
        self._introductions.link_down(link)
        self._outlook.watching.link_down(link)
        if self.driver is not None:
            self.driver.link_down(link, reason)
        self._look()

    def message(self, link: Link, message: dict[str, Any]) -> None:
        """Endpoint event. Raises ProtocolError, on which the endpoint drops the link."""
        if self._introductions.message(link, message):
            return
        if message.get("t") == "departing" and self._observer is not None:
            self._observer.leaves(link.peer_id)
        if self.driver is None:
            self._early.add(link, message)
            return
        if message.get("t") == WATCH:
            self._outlook.watching.watch(link)
            return
        self.driver.message(link, message)

    # --------------------------------------------------------------------------------------- departure

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
                await asyncio.wait_for(driver.departure.left.wait(), notice_s)
            except TimeoutError:
                logger.info("left the run in the middle of a round")
            await driver.states.saved()
        self._closed = True
        self._dialler.close()
        self._introductions.close()
        if self._announcer is not None:
            self._announcer.close()
        self._outlook.watching.close()
        if self._timer is not None:
            self._timer.cancel()
        if driver is not None:
            driver.close()
        try:
            await self.view.leave()
        finally:
            await self._outlook.close()
            await self._reachability.close()
            await self.endpoint.close()
            await self.dht.stop()
            self._engine.close()
