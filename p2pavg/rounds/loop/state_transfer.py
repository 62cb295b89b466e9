"""States: what this peer downloads, what others download from it, and its checkpoints. On the loop thread."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from p2pavg.errors import StateError
from p2pavg.identity import Identity
from p2pavg.rounds.loop.deliveries import Deliveries
from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.protocol.roles import Role
from p2pavg.rounds.session import Session
from p2pavg.rounds.state import snapshot
from p2pavg.rounds.state.donor import Donor
from p2pavg.rounds.state.downloader import Downloader
from p2pavg.rounds.state.exchange import StateExchange
from p2pavg.rounds.state.generation_rows import Generations
from p2pavg.rounds.state.saver import Saver
from p2pavg.rounds.training import TrainingSpec
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
    ) -> None:
        """deliver(): something may be ready for the training thread. moving(): gradients flow now."""
        self._machine = machine
        self._deliveries = deliveries
        self._feed = feed
        self._deliver = deliver
        self._healing: asyncio.Task[None] | None = None
        self._failures = Counter[str]()  # reasons why downloads failed, since the last that did not
        self.healed: Generations = ()  # the history that came with the last state
        self._background = snapshot.executor()
        donor = Donor(
            engine,
            spec.state,
            session,
            identity.sign,
            self._background,
            moving,
            upload_bps=spec.state_upload_bps,
        )
        self.downloader = Downloader(engine)
        self._exchange = StateExchange(donor, self.downloader, links, self._history)
        self._saver: Saver | None = None
        if spec.saving is not None:
            self._saver = Saver(spec.saving, spec.state, session, lambda: machine.history, self._background)

    def _history(self) -> Generations | None:
        return self._machine.history if self._machine.role is Role.TRAINER else None

    def close(self) -> None:
        """Download and give nothing any more."""
        if self._healing is not None:
            self._healing.cancel()
        self._exchange.close()
        self._background.shutdown(wait=False)

    # Checkpoints.

    def applied(self, epoch: int) -> None:
        """The training thread stands at `epoch`: a checkpoint may be due."""
        if self._saver is not None:
            self._saver.applied(epoch)

    async def saved(self) -> None:
        """Wait for a checkpoint that is being written."""
        if self._saver is not None:
            await self._saver.close()

    # For others.

    def message(self, link: Link, message: dict[str, Any]) -> None:
        """One of `exchange.KINDS`."""
        self._exchange.message(link, message)

    def sent(self, link: int, transfer: int) -> None:
        """The engine handed a chunk to the kernel."""
        self._exchange.donor.sent(link, transfer)

    def link_down(self, link: int) -> None:
        """Whoever downloads over it is gone."""
        self._exchange.donor.done(link)

    # For this peer.

    def heal(self, action: act.StartHeal) -> None:
        """Download a state; a download that is under way is void."""
        if self._healing is not None:
            self._healing.cancel()
        logger.info("downloading the state of epoch %d: %s", action.epoch, action.why)
        self._deliveries.drop_states()
        self._deliveries.downloading = True
        self._deliveries.backlog.begin(time.monotonic())
        self._healing = asyncio.get_running_loop().create_task(self._fetch(action))
        self._deliveries.refresh_attention()

    async def _fetch(self, action: act.StartHeal) -> None:
        try:
            state, history = await self._exchange.fetch(action)
        except StateError as error:
            self._over()
            self._say_why(str(error))
            self._feed(ev.HealFailed(str(error)))
        else:
            self._over()
            self._failures.clear()
            self.healed = history
            self._deliveries.put_state(state)
        self._deliver()

    def _say_why(self, reason: str) -> None:
        """Once a reason comes again it will not pass by itself: a person should hear of it, once."""
        self._failures[reason] += 1
        if self._failures[reason] == 2:
            logger.warning("no state yet, it is asked for again and again: %s", reason)

    def _over(self) -> None:
        self._healing = None
        self._deliveries.downloading = False

    def look(self) -> None:
        """A beat: do results come faster than the state?"""
        if self._deliveries.downloading:
            self._deliveries.backlog.look(time.monotonic(), self.downloader.progress)
