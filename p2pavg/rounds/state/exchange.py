"""The exchange of states and results between peers: answers newcomers. On the loop thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from p2pavg.errors import StateError
from p2pavg.printable import raised
from p2pavg.rounds.state.donor import Donor
from p2pavg.rounds.state.generation_rows import Generations, to_rows
from p2pavg.transport.links.link import Link

logger = logging.getLogger("p2pavg.rounds")

ASKED = frozenset({"state", "state-chunks", "state-have", "state-done"})  # by newcomers
TOLD = frozenset({"result", "state-gone"})  # by donors
KINDS = ASKED | TOLD


class StateExchange:
    """Control messages of newcomers. The chunks go through the engine."""

    def __init__(
        self,
        donor: Donor,
        history: Callable[[], Generations | None],
        asks: Callable[[Link], None],
    ) -> None:
        """history: of this peer; None while it waits for a state itself. asks(link): a newcomer asks for the
        state, this peer alone.
        """
        self.donor = donor
        self._asks = asks
        self._history = history
        self._answering: set[asyncio.Task[None]] = set()
        self._closed = False
        self._told = ""  # why no state could be given, as it was last told

    def close(self) -> None:
        """Answer nobody any more."""
        self._closed = True
        for task in self._answering:
            task.cancel()

    def message(self, link: Link, message: dict[str, Any]) -> None:
        """One of `ASKED`."""
        if self._closed:
            return
        match message["t"]:
            case "state":
                self._answer(self._offer(link, message))
            case "state-chunks":
                try:
                    self.donor.send(link.id, message)
                except StateError as error:
                    link.reply(message, {"error": str(error)})
                else:
                    link.reply(message, {"t": "ok"})
            case "state-have":
                epoch = message.get("epoch")
                if type(epoch) is int:
                    self.donor.has(link.id, epoch, loaded=message.get("loaded") is True)
            case _:
                self.donor.done(link.id)

    def _answer(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _offer(self, link: Link, request: dict[str, Any]) -> None:
        if self._history() is None:
            link.reply(request, {"error": "this peer waits for the state itself"})
            return
        root, have, aligned = (
            request.get("root"),
            _standing(request.get("have")),
            request.get("aligned") is True,
        )
        if have is None and not aligned:  # aligned snapshots are those of an epoch that is yet to come
            self._asks(link)
        try:
            offer = await self.donor.offer(
                link.id, have=have, root=root if isinstance(root, bytes) else b"", aligned=aligned
            )
        except Exception as error:  # of the user's objects, or no memory for the copy
            self._tell(raised(error))
            link.reply(request, {"error": f"its donor could not copy the state ({raised(error)})"})
            return
        if offer is None:
            link.reply(request, {"busy": True, **self.donor.busy()})
            return
        about = {"epoch_s": self.donor.epoch_s}
        if offer.manifest is None:
            link.reply(request, {"results": True, "count": len(offer.results), **about})
        else:
            rows = to_rows(self._history() or (), offer.manifest.epoch)
            link.reply(request, {**offer.manifest.to_message(), "history": rows, **about})
        for head in offer.results:
            link.send({"t": "result", **head.to_message()})

    def _tell(self, why: str) -> None:
        level = logging.INFO if why == self._told else logging.WARNING  # newcomers ask twice a second
        self._told = why
        logger.log(level, "this peer cannot give its state to a newcomer: %s", why)


def _standing(value: Any) -> tuple[int, bytes] | None:
    """(epoch, lineage), or None for anything else."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return None
    epoch, lineage = value
    return (epoch, lineage) if type(epoch) is int and isinstance(lineage, bytes) else None
