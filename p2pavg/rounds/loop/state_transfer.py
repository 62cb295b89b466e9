"""States: what this peer downloads, what others download from it, and its checkpoints. On the loop thread."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from p2pavg import codecs
from p2pavg.errors import ProtocolError, StateError
from p2pavg.identity import Identity, short_id
from p2pavg.rounds.loop.deliveries import Deliveries
from p2pavg.rounds.loop.joining import Joining
from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.machine.rules.deadlines import MOST_BEHIND
from p2pavg.rounds.protocol.messages import CatchUp
from p2pavg.rounds.protocol.roles import Role
from p2pavg.rounds.session import Session
from p2pavg.rounds.state import snapshot
from p2pavg.rounds.state.donor import Donor
from p2pavg.rounds.state.downloader import Downloader
from p2pavg.rounds.state.exchange import ASKED, StateExchange
from p2pavg.rounds.state.files.saver import Saver
from p2pavg.rounds.state.generation_rows import Generations
from p2pavg.rounds.state.inbox import Inbox
from p2pavg.rounds.state.projection import from_the_start
from p2pavg.rounds.state.results import ResultHead
from p2pavg.rounds.state.telling import Joined
from p2pavg.rounds.training import Average, TrainingSpec
from p2pavg.transport.engine import Engine
from p2pavg.transport.links.link import Link

logger = logging.getLogger("p2pavg.rounds")


class States:
    """Carries out StartHeal, and keeps the donor and the saver."""

    def __init__(
        self,
        engine: Engine,
        links: Mapping[bytes, Link],
        identity: Identity,
        session: Session,
        spec: TrainingSpec,
        machine: Machine,
        deliveries: Deliveries,
        feed: Callable[[ev.Event], None],
        deliver: Callable[[], None],
        moving: Callable[[], bool],
        broken: Callable[[Exception], None],
    ) -> None:
        """deliver(): something may be ready for the training thread. moving(): gradients flow now. broken: is
        told what nobody expected.
        """
        self._engine = engine
        self._links = links
        self._session = session
        self._spec = spec
        self._machine = machine
        self._deliveries = deliveries
        self._feed = feed
        self._deliver = deliver
        self._broken = broken
        self._joining: tuple[Joining, asyncio.Task[None]] | None = None
        self.joined: Joined | None = None  # how the last download went
        self.state_bytes = 0  # of the state that others download, once it is known
        self._failures = Counter[str]()  # reasons why downloads failed, since the last that did not
        self._background = snapshot.executor()
        self._codec = codecs.for_results(codecs.get(spec.compression))
        disk = None if spec.saving is None else spec.saving.checkpoints.directory
        donor = Donor(
            engine,
            spec.state,
            session,
            identity.sign,
            self._background,
            moving,
            self._unapplied,
            self._tell,
            upload_bps=spec.state_upload_bps,
            directory=disk,
            keeps=MOST_BEHIND if spec.keeps_results else 0,
        )
        self._inbox = Inbox(engine)
        self.downloader = Downloader(engine, self._inbox, spec.numel)
        self._exchange = StateExchange(donor, self._history, self._asks)
        self._saver: Saver | None = None
        if spec.saving is not None:
            self._saver = Saver(spec.saving, session, lambda: machine.history, self._background)

    def _history(self) -> Generations | None:
        return self._machine.history if self._machine.role is Role.TRAINER else None

    def _asks(self, link: Link) -> None:
        """A newcomer asks for the state: rounds wait for it before it can say that they are to, where an
        epoch is shorter than its first words take.
        """
        wish = from_the_start(self._exchange.donor.epoch_s, link.rtt_min)
        if wish is not None:
            epoch = self._session.standing[0]
            asked = CatchUp(epoch, wish.spare, wish.seconds, state_bytes=0, result_bytes=0, link_bps=0.0)
            self._feed(ev.Received(link.peer_id, asked))

    def _tell(self, number: int, message: dict[str, Any]) -> None:
        for link in self._links.values():
            if link.id == number:
                link.send(message)

    def _head(self, commit: act.Commit, average: Average) -> ResultHead:
        layout = average.result.layout
        exact = self._spec.exact(commit.ballot.epoch) > 0 or layout.codec.wire_id != self._codec.wire_id
        return ResultHead.of(commit, layout, exact)

    def _unapplied(self) -> list[tuple[ResultHead, Any]]:
        return [(self._head(commit, a), a.result.data) for a, commit in self._deliveries.unapplied()]

    def spared(self) -> int:
        """Bytes that packing has kept off links and disks."""
        saving = self._spec.saving
        saved = 0 if saving is None else saving.checkpoints.disk.spared
        waiting = self._exchange.donor.spared + self._deliveries.backlog.spool.spared
        return self._engine.spared() + saved + waiting

    def close(self) -> None:
        """Download and give nothing any more. The loop's own threads end after those of the background."""
        if self._joining is not None:
            self._joining[1].cancel()
        self._exchange.close()
        self._exchange.donor.close()
        asyncio.get_running_loop().run_in_executor(None, self._background.shutdown)

    # Epochs.

    def committed(self, commit: act.Commit, average: Average) -> None:
        """A round that this peer was in has a result."""
        head, missed = self._head(commit, average), bool(commit.failed)
        self._exchange.donor.committed(head, average.result.data, missed=missed)

    def applied(self, epoch: int) -> None:
        """The training thread stands at `epoch`: a checkpoint may be due."""
        self._exchange.donor.applied()
        if self._joining is not None:
            self._joining[0].applied()
        if self._saver is not None:
            self._saver.applied(epoch)
        if not self.state_bytes:
            self._background.submit(self._measure)

    def _measure(self) -> None:
        with suppress(StateError):  # swapped just now; or it cannot travel, as a donor would say
            self.state_bytes = snapshot.size(self._spec.state, self._session)

    async def saved(self) -> None:
        """Wait for a checkpoint that is being written."""
        if self._saver is not None:
            await self._saver.close()

    # For others.

    def message(self, link: Link, message: dict[str, Any]) -> None:
        """One of `exchange.KINDS`. Raises ProtocolError when a donor describes a result wrongly."""
        if message["t"] in ASKED:
            self._exchange.message(link, message)
        elif self._joining is not None and message["t"] == "result":
            try:
                self._joining[0].told(link.peer_id, message)
            except StateError as error:
                raise ProtocolError(str(error)) from None
        elif self._joining is not None:
            logger.info("peer %s gives no state any more", short_id(link.peer_id))
            self._joining[0].lost(link.peer_id)

    def sent(self, link: int, transfer: int) -> None:
        """The engine handed a chunk to the kernel."""
        self._exchange.donor.sent(link, transfer)

    def arrived(self, transfer: int, chunk: int) -> None:
        """The engine put a chunk in place."""
        self._inbox.chunk(transfer, chunk)

    def link_down(self, link: int, peer: bytes) -> None:
        """Whoever downloads over it is gone, and so is a donor."""
        self._exchange.donor.lost(link)
        if self._joining is not None:
            self._joining[0].lost(peer)

    @property
    def last_holder(self) -> bool:
        """Somebody downloads the state of this peer, and nobody else has it."""
        return self._exchange.donor.serves and self._machine.alone

    async def served(self, until: float) -> None:
        """Wait for whoever downloads from this peer, until time.monotonic() is `until`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self._exchange.donor.idle()

    # For this peer.

    def heal(self, action: act.StartHeal) -> None:
        """Download a state and what follows on it; a download that is under way is void."""
        if self._joining is not None:
            self._joining[1].cancel()
        logger.info("downloading the state of epoch %d: %s", action.epoch, action.why)
        if not action.results_do:
            self._exchange.donor.stop("the peer that gave its state downloads another one")
        self._deliveries.begin_download()
        joining = Joining(
            action,
            self._engine,
            self._inbox,
            self.downloader,
            self._links,
            self._machine,
            self._session,
            self._deliveries,
            self._spec.numel,
            self._codec,
            self._deliver,
            self._feed,
        )
        task = asyncio.get_running_loop().create_task(self._join(joining))
        self._joining = joining, task
        self._deliveries.refresh_attention()

    def stop_heal(self, why: str) -> None:
        """The download that is under way is void."""
        if self._joining is not None:
            self._joining[1].cancel()
            logger.info("the download is given up: %s", why)
            self._over()
            self._deliver()

    async def _join(self, joining: Joining) -> None:
        try:
            await joining.run()
        except StateError as error:
            self._over()
            self._say_why(str(error))
            self._feed(ev.HealFailed(str(error)))
        except Exception as error:
            self._broken(error)
        else:
            self.joined = joining.joined
            self._over()
            self._failures.clear()
            self._feed(ev.Level())
        self._deliver()

    def _say_why(self, reason: str) -> None:
        """Once a reason comes again it will not pass by itself: a person should hear of it, once."""
        self._failures[reason] += 1
        if self._failures[reason] == 2:
            logger.warning("no state yet, it is asked for again and again: %s", reason)

    def _over(self) -> None:
        self._joining = None
        self._deliveries.downloading = self._deliveries.unloaded = False

    def look(self) -> None:
        """A beat."""
        if self._joining is not None:
            self._joining[0].look()
