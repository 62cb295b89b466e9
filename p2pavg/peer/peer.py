"""Peer: one process's place in a swarm. Owns the event-loop thread and all that lives on it."""

from __future__ import annotations

import asyncio
import logging
import math
import select
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from p2pavg import codecs, kinds
from p2pavg.errors import ClosedError, ConfigurationError
from p2pavg.identity import Identity
from p2pavg.membership import PeerInfo
from p2pavg.membership.table.address import format_host_port
from p2pavg.peer import sigterm
from p2pavg.peer.loop_thread import LoopThread
from p2pavg.peer.publishing import Publisher
from p2pavg.peer.runtime import Runtime
from p2pavg.peer.settings import Settings
from p2pavg.peer.signature import takes
from p2pavg.peer.tensors import Averager
from p2pavg.peer.words import crowd
from p2pavg.report import RoundReport
from p2pavg.rounds.machine.rules.plausible import MOST_WEIGHT
from p2pavg.rounds.session import Session
from p2pavg.rounds.state.telling import Joined
from p2pavg.rounds.training import TrainingSpec
from p2pavg.rounds.turns import short_turns

logger = logging.getLogger("p2pavg.peer.peer")
CLOSE_NOTICE_S = 5.0
WAIT_BEAT_S = 0.05


class Peer:
    """One process's place in a swarm.

    Nothing happens before `start()` (or `async with`).

    Args:
        run_id: the training job's name; the same on all peers.
        initial_peers: "host:port" of any members; empty: start a new swarm; None: those in
            `P2PAVG_INITIAL_PEERS`, separated by commas.
        listen: "host:port" to bind. With the default the next free port is taken; port 0 is any free one.
        announce: the "host:port" at which others reach this peer, or several, best first, where that is not
            what they see of it.
        map_port: ask the gateway of this network to lead a port here (PCP, NAT-PMP, and UPnP with
            `p2pavg[upnp]`), and give it back at the end. None: in closed runs.
        client_only: others cannot open connections to this peer.
        region: where this peer is, for people and plans, such as "eu-west-1"; None: as `P2PAVG_REGION` says.
        name: how people call this peer in tables and in the monitor; None: as `P2PAVG_NAME` says, or else the
            host's name.
        compression: "none", "fp16", "bf16", "int8", "int4" or a `p2pavg.Codec`; the same on all peers.
        streams: TCP streams per link, 1 to 128, or "auto": as many as transfers call for.
        max_upload_mbps: most Mb/s that this peer sends, over all its links together; None: no limit.
        max_relay_mbps: most Mb/s that this peer carries for peers that have no way to each other; 0: none;
            None: a quarter of the upload that it has measured.
        plan: how the bytes of a round travel, when this peer leads it: "flat", "two-level" (within regions
            first), "cheapest", or "auto", whatever is predicted to be faster.
        prices: the path of a price table, as `p2pavg monitor --prices` takes; "cheapest" needs it.
        credentials: a file or text that `p2pavg credentials` made; None: what `P2PAVG_CREDENTIALS` names.
            With neither the run is open: whoever reaches a port can read gradients and take part.
        metrics: "host:port" at which this peer serves metrics for Prometheus, such as "127.0.0.1:9100", to
            whoever reaches that port; None: nowhere.
        on_round: called with the `RoundReport` of each round, on a background thread. What a peer lost by
            leaving is in `last_report`, after `close()`, and in `reports`.
        reports: a JSONL file to which each `RoundReport` is appended; None: what `P2PAVG_REPORTS` names.
        identity: a file that keeps this peer's key over restarts, made when it is missing; None: a fresh key.

    Raises:
        ConfigurationError: for arguments that cannot work.
        CredentialError: for credentials that are malformed, or of another run.
    """

    @takes(Settings)
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        settings.warn_if_open()
        self.run_id = settings.run_id
        self.compression = settings.compression
        self._publisher = Publisher(settings.reports_path, settings.on_round)
        self._thread: LoopThread | None = None
        self._runtime: Runtime | None = None
        self._session: Session | None = None
        self._averager: Averager | None = None
        self._closed = False

    # ------------------------------------------------------------------------------------- lifetime

    def start(self) -> Peer:
        """Open the ports and find the swarm; blocks until both are done.

        Returns:
            This peer.

        Raises:
            ClosedError: after `close()`.
            AddressInUseError: when the port that `listen` names is taken.
            UnreachableError: when none of the initial peers answers.
            IncompatiblePeerError: when they are of another version.
        """
        if self._closed:
            raise ClosedError("this peer was closed; build a new one")
        if self._runtime is not None:
            return self
        codec = codecs.prepare(self.compression)
        self._publisher.check()
        thread = LoopThread(f"p2pavg-{self.run_id}")
        runtime = Runtime(self._settings, self._own_identity(), self._publisher.publish, codec)
        try:
            thread.run(runtime.start())
        except BaseException:
            thread.stop()
            raise
        self._thread, self._runtime = thread, runtime
        self._finalizer = weakref.finalize(self, _abandon, thread, runtime)
        sigterm.watch(self)
        return self

    def close(self, notice_s: float = CLOSE_NOTICE_S) -> None:
        """Leave the swarm, tell the others so, and free ports and threads. May be called again.

        Args:
            notice_s: seconds that this may take at most, about.
        """
        kinds.check_number("notice_s", notice_s, 0.0, kinds.MOST_SECONDS)
        self._closed = True
        sigterm.forget(self)
        thread, runtime = self._thread, self._runtime
        if thread is None or runtime is None:
            return
        self._thread = None
        self._finalizer.detach()
        if self._averager is not None:
            self._averager.close()
        if self._session is not None:
            error = ClosedError("this peer is closed; build a new one")
            thread.loop.call_soon_threadsafe(_fail, runtime, self._session, error)
        try:
            thread.run(runtime.close(notice_s))
        finally:
            thread.stop()

    async def __aenter__(self) -> Peer:
        await asyncio.to_thread(self.start)
        sigterm.watch(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    # ---------------------------------------------------------------------------------------- facts

    @property
    def peer_id(self) -> bytes:
        """This peer's id: 20 bytes, the hash of its public key."""
        return self._running().peer_id

    @property
    def address(self) -> str:
        """This peer's address for others' `initial_peers`: "host:port"."""
        host, port = self._running().addresses()[0]
        return format_host_port(host, port)

    @property
    def peers(self) -> Mapping[bytes, PeerInfo]:
        """The other peers of the run now in view, by peer id."""
        return self._running().view.peers

    @property
    def last_report(self) -> RoundReport | None:
        """The report of the last epoch that this peer finished, or, once it has left, of what it lost then,
        with no members; None: there was none.
        """
        return None if self._session is None else self._session.last_report

    @property
    def engine_name(self) -> str:
        """The engine that moves the bytes: "pump" (native threads) or "python" (its twin)."""
        return self._running().engine_name

    @property
    def download(self) -> tuple[int, int, int] | None:
        """The last download of a state: (verified bytes, all bytes, donors); None: there was none."""
        driver = self._running().driver
        return None if driver is None else driver.states.downloader.progress

    @property
    def received_bytes(self) -> int:
        """Bytes that came over the data streams of all links that are up."""
        return self._running().received_bytes

    @property
    def joined(self) -> Joined | None:
        """How the last download of the swarm's state went; None: there was none, or it goes on."""
        driver = self._running().driver
        return None if driver is None else driver.states.joined

    def wait_for_peers(self, count: int = 1, timeout: float | None = None, *, enter: bool = False) -> int:
        """Block until `count` other peers train in the run and are linked.

        Call it once this peer trains, as a `CollaborativeOptimizer` makes it do.

        Args:
            count: how many peers to wait for, this one left out.
            timeout: seconds; None: as long as it takes.
            enter: a line on stdin, such as the Enter key makes, ends the wait as well; the end of stdin does
                not.

        Returns:
            How many other peers train and are linked now.
        """
        kinds.check_whole("count", count, 0, kinds.MOST_PEERS)
        if timeout is not None:
            kinds.check_number("timeout", timeout, most=math.inf)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        typed = _typed() if enter else None
        while (company := self._running().company()) < count:
            beginning = time.monotonic()
            if beginning >= deadline or (typed is not None and typed()):
                break
            time.sleep(WAIT_BEAT_S)
            self._note_waited(time.monotonic() - beginning)
        return company

    def cpu_seconds(self) -> float:
        """CPU seconds that averaging used so far: native threads, the event loop, and the callers of
        `all_reduce`.
        """
        runtime, thread = self._running(), self._thread
        assert thread is not None
        caller = 0.0 if self._averager is None else self._averager.cpu_seconds
        return runtime.engine.cpu_seconds() + thread.cpu_seconds() + caller

    # ------------------------------------------------------------------------------------- training

    def training(self, spec: TrainingSpec) -> Session:
        """Enter the run as a trainer; blocks until this peer is linked to the others.

        The caller then calls `arrive` with an empty contribution until the answer is KeepGoing: a newcomer
        gets the swarm's state by these calls, before its first step.

        Args:
            spec: what is trained, and how the training thread gives and takes its state.

        Returns:
            The training thread's side of the rounds.

        Raises:
            IncompatiblePeerError: when the swarm trains another model, or on other terms.
            ConfigurationError: when this peer trains already.
        """
        runtime, thread = self._running(), self._thread
        assert thread is not None
        if self._session is not None:
            raise ConfigurationError(
                "this peer already trains; use one Peer for each optimizer, under its own run_id"
            )
        session = Session(thread.loop, spec.start.epoch if spec.start else 0, runtime.engine.note_trainer)
        runtime.threads = crowd.threads_of_torch()
        thread.run(runtime.train(session, spec))
        self._session = session
        return session

    async def all_reduce(
        self,
        tensors: Sequence[Any] | Any,
        weight: float = 1.0,
        *,
        group_size: int | None = None,
        timeout: float = 60.0,
    ) -> RoundReport:
        """Average tensors over the group, in place. All members hold the same bits afterwards.

        Args:
            tensors: one tensor, or a sequence of them: contiguous or strided torch tensors on any device, or
                numpy arrays, of float32, float16 or bfloat16. Shapes are the same on all peers and in all
                calls of one peer.
            weight: this peer's weight in the mean, 0 to 1e12.
                A call of weight 0 brings nothing and gets the mean; it waits for somebody who has a weight.
            group_size: members to wait for, this peer included: no average over fewer is ever returned.
                None: all that are in the swarm now, which may be this peer alone.
            timeout: seconds until the call gives up, from its first moment: calls of one peer take turns,
                and waiting for the turn counts. A round that has begun is brought to its end.

        Returns:
            What the round measured.

        Raises:
            RoundFailedError: when the group is not complete in time; when somebody failed a round of it; when
                these tensors hold NaN or infinity, which the others then average without. The tensors are
                as they were.
            ConfigurationError: for tensors or arguments that cannot work.
            ClosedError: when the peer is closed.

        A call that is cancelled takes back what it declared, at once, and leaves the tensors as they were.
        """
        kinds.check_number("weight", weight, 0.0, MOST_WEIGHT)
        if group_size is not None:
            kinds.check_whole("group_size", group_size, 1, kinds.MOST_PEERS)
        kinds.check_number("timeout", timeout, most=math.inf)
        self._running()
        if self._averager is None:
            self._averager = Averager(self, self.compression)
        with short_turns():
            return await self._averager.average(tensors, weight, group_size, timeout)

    def set_target(self, samples: int | None) -> None:
        """Set how many samples make an epoch from now on.

        Args:
            samples: over the whole swarm; None: one for each peer that is linked now.
        """
        if samples is not None:
            kinds.check_whole("samples", samples, 1, kinds.MOST_SAMPLES)
        runtime, thread = self._running(), self._thread
        assert thread is not None
        thread.run(runtime.set_target(samples))

    # --------------------------------------------------------------------------------------- inside

    def _running(self) -> Runtime:
        if self._runtime is None or self._closed:
            raise ClosedError(
                "this peer is closed; build a new one"
                if self._closed
                else "this peer was not started; call start() or use async with"
            )
        return self._runtime

    def _note_waited(self, seconds: float) -> None:
        """The training thread waited for others before it computed: no calculation of the epoch."""
        runtime, thread = self._running(), self._thread
        if runtime.driver is not None and thread is not None:
            thread.loop.call_soon_threadsafe(runtime.driver.recorder.waited, seconds)

    def _own_identity(self) -> Identity:
        if self._settings.membership is not None:
            return self._settings.membership.identity
        path = self._settings.identity
        return Identity.generate() if path is None else Identity.load_or_create(path)


def _typed() -> Callable[[], bool] | None:
    """A function that says whether a line has come on stdin; None where nobody can type. The end of stdin is
    no line: a script that was started with `</dev/null`, or in the background, has nobody to press Enter.
    """
    try:
        descriptor = sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):
        return None
    ended = False

    def ready() -> bool:
        nonlocal ended
        if ended or not select.select([descriptor], [], [], 0.0)[0]:
            return False
        ended = not sys.stdin.readline()
        return not ended

    return ready


def _fail(runtime: Runtime, session: Session, error: BaseException) -> None:
    if runtime.driver is not None:
        runtime.driver.fail(error)
    else:
        session.fail(error)


def _abandon(thread: LoopThread, runtime: Runtime) -> None:
    """End a Peer that was garbage-collected, or outlives the interpreter, without close()."""
    try:
        thread.run(runtime.close(1.0))
        thread.stop()
    except Exception:
        logger.debug("closing an abandoned peer failed", exc_info=True)
