"""The exchange of states between peers: asks donors for this peer, and answers newcomers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from p2pavg.errors import StateError
from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.protocol.roles import Role
from p2pavg.rounds.state.donor import Donor
from p2pavg.rounds.state.downloader import Downloader
from p2pavg.rounds.state.generation_rows import Generations, from_rows, to_rows
from p2pavg.rounds.training import State
from p2pavg.transport.links.link import Link

logger = logging.getLogger("p2pavg.rounds")

KINDS = frozenset({"state", "state-chunks", "state-done"})


class StateExchange:
    """Control messages about states, on the loop thread. The chunks go through the engine."""

    def __init__(
        self,
        donor: Donor,
        downloader: Downloader,
        links: Mapping[bytes, Link],
        history: Callable[[], Generations | None],
    ) -> None:
        """links: by peer, a live view. history: of this peer; None while it waits for a state itself."""
        self.donor = donor
        self.downloader = downloader
        self._links = links
        self._history = history
        self._answering: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Answer nobody any more."""
        for task in self._answering:
            task.cancel()

    async def fetch(self, wanted: act.StartHeal) -> tuple[State, Generations]:
        """A state to heal with, and its donor's history. Raises StateError when nobody can give one."""
        trainers = [p for p, link in self._links.items() if link.hello.get("role") == Role.TRAINER.value]
        donors = list(dict.fromkeys([*wanted.donors, *trainers]))  # links that came up meanwhile serve too
        state, facts = await self.downloader.fetch(donors, self._links, wanted.epoch)
        return state, from_rows(facts.get("history"))

    def message(self, link: Link, message: dict[str, Any]) -> None:
        """One of `KINDS` from a newcomer."""
        match message["t"]:
            case "state":
                self._answer(self._manifest(link, message))
            case "state-chunks":
                try:
                    self.donor.send(link.id, message)
                except StateError as error:
                    link.reply(message, {"error": str(error)})
                else:
                    link.reply(message, {"t": "ok"})
            case _:
                self.donor.done(link.id)

    def _answer(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _manifest(self, link: Link, request: dict[str, Any]) -> None:
        since, history = request.get("since"), self._history()
        if history is None:
            link.reply(request, {"error": "this peer waits for the state itself"})
            return
        try:
            manifest = await self.donor.manifest(link.id, since if type(since) is int else 0)
        except StateError as error:
            link.reply(request, {"error": str(error)})
            return
        except Exception as error:  # from a user's state_dict(), or no memory for the copy
            logger.warning("this peer cannot give its state to a newcomer: %s", error or type(error).__name__)
            link.reply(request, {"error": "its donor could not copy the state"})
            return
        if manifest is None:
            link.reply(request, {"busy": True})
            return
        rows = to_rows(self._history() or (), manifest.epoch)
        link.reply(request, {**manifest.to_message(), "history": rows})
