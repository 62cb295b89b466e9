"""Saver: writes a checkpoint every few epochs, beside the training. On the loop thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from p2pavg.errors import P2PAvgError
from p2pavg.rounds import state
from p2pavg.rounds.checkpoints import Checkpoints
from p2pavg.rounds.history import Generations, to_rows
from p2pavg.rounds.state import Manifest
from p2pavg.rounds.training import StateSource

logger = logging.getLogger("p2pavg.state")
U8 = npt.NDArray[np.uint8]
Standing = tuple[int, bytes]  # (epoch, lineage)


@dataclass(frozen=True, slots=True)
class Saving:
    """Where checkpoints go, and every how many epochs."""

    checkpoints: Checkpoints
    every: int


class Saver:
    """One checkpoint at a time: copied while nothing is applied, hashed and written on another thread."""

    def __init__(
        self,
        saving: Saving,
        source: StateSource,
        applying: Callable[[], AbstractContextManager[None]],
        standing: Callable[[], Standing],
        history: Callable[[], Generations],
    ) -> None:
        self._saving = saving
        self._source = source
        self._applying = applying
        self._standing = standing
        self._history = history
        self._next = 0  # the epoch from which on one is due
        self._task: asyncio.Task[None] | None = None
        self._failing = False

    def applied(self, epoch: int) -> None:
        """The training thread stands at `epoch`."""
        every = self._saving.every
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
            manifest, blob = await loop.run_in_executor(None, self._take)
            rows = to_rows(self._history(), manifest.epoch)
            if rows and rows[-1][1] != manifest.lineage:
                return  # this peer changes its lineage right now
            path = await loop.run_in_executor(None, self._saving.checkpoints.save, manifest, blob, rows)
        except (OSError, P2PAvgError, MemoryError) as error:
            if not self._failing:
                logger.warning("no checkpoint can be written to %s (%s); training goes on", directory, error)
            self._failing = True
            return
        self._failing = False
        if path is not None:
            logger.info("epoch %d is saved in %s", manifest.epoch, path)

    def _take(self) -> tuple[Manifest, U8]:
        with self._applying():
            epoch, lineage = self._standing()
            meta_bytes, blob = state.pack(self._source.snapshot())
        return state.describe(epoch, lineage, meta_bytes, blob), blob
