"""Saver: writes a checkpoint every few epochs, beside the training. On the loop thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from p2pavg.printable import raised
from p2pavg.rounds.state import snapshot
from p2pavg.rounds.state.files.checkpoints import Checkpoints
from p2pavg.rounds.state.generation_rows import Generations, to_rows
from p2pavg.rounds.state.snapshot import Live
from p2pavg.rounds.training import StateSource, SwappedError

logger = logging.getLogger("p2pavg.state")


@dataclass(frozen=True, slots=True)
class Saving:
    """Where checkpoints go, every how many epochs, and what they hold."""

    checkpoints: Checkpoints
    every: int
    source: StateSource


class Saver:
    """One checkpoint at a time: copied between two updates, hashed and written on another thread."""

    def __init__(
        self,
        saving: Saving,
        live: Live,
        history: Callable[[], Generations],
        background: Executor,
    ) -> None:
        self._saving = saving
        self._live = live
        self._history = history
        self._background = background
        self._next = 0  # the epoch from which on one is due
        self._epoch = 0
        self._task: asyncio.Task[None] | None = None
        self._failing = False

    def applied(self, epoch: int) -> None:
        """The training thread stands at `epoch`."""
        every, self._epoch = self._saving.every, epoch
        if not self._next:
            self._next = (epoch // every + 1) * every if epoch % every else epoch
        if epoch >= self._next and (self._task is None or self._task.done()):
            self._next = (epoch // every + 1) * every
            self._task = asyncio.get_running_loop().create_task(self._save())

    async def close(self) -> None:
        """Wait for the one that is being written."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _save(self) -> None:
        loop = asyncio.get_running_loop()
        directory = self._saving.checkpoints.directory
        try:
            manifest, blob = await loop.run_in_executor(
                self._background, snapshot.take, self._saving.source, self._live, snapshot.Work()
            )
            rows = to_rows(self._history(), manifest.epoch)
            if rows and rows[-1][1] != manifest.lineage:
                return  # this peer changes its lineage right now
            save = self._saving.checkpoints.save
            path = await loop.run_in_executor(self._background, save, manifest, blob, rows)
        except SwappedError:
            self._next = self._epoch  # the next boundary will do
            return
        except Exception as error:  # of the disk, of memory, or of what the user's objects hold
            if not self._failing:
                why = raised(error)
                logger.warning("no checkpoint can be written to %s (%s); training goes on", directory, why)
            self._failing = True
            return
        self._failing = False
        if path is not None:
            logger.info("epoch %d is saved in %s", manifest.epoch, path)
