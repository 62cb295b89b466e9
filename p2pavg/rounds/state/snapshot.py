"""Copying the live state beside the training, which never waits for more than one piece of the copy."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from p2pavg.rounds.state import manifest as state
from p2pavg.rounds.state.manifest import Manifest, Packing
from p2pavg.rounds.training import PIECE_BYTES, StateSource, SwappedError

U8 = npt.NDArray[np.uint8]
PAGE_BYTES = 4096
TRIES = 4  # the training thread ends all but the last
NICENESS = 5
SWAPPED_S = 1.0  # how long the run's own parameters are waited for
LOOK_S = 0.02  # between two looks whether they are back


class Live(Protocol):
    """Where the state lives: a `Session`."""

    @property
    def standing(self) -> tuple[int, bytes]: ...

    def reading(self) -> AbstractContextManager[Callable[[], bool]]: ...


@dataclass(slots=True)
class Work:
    """How far it is with copying and hashing, for those that wait."""

    total: int = 0  # bytes of the state, once they are known
    done: int = 0  # bytes that were copied or hashed, also those that are copied anew; it only grows

    def worked(self, nbytes: int) -> None:
        """So many more."""
        self.done += nbytes


def take(source: StateSource, live: Live, work: Work) -> tuple[Manifest, U8]:
    """The state between two updates as one byte string, and its unsigned manifest.

    An update that comes while the state is copied goes first, and the copy begins anew; updates that come
    faster than a copy is made wait for the last one. Memory is touched before anybody can wait for it.
    Raises SwappedError when other parameters stand in the place of the run's for long.
    """
    blob = np.empty(0, np.uint8)
    tries, began = 0, time.monotonic()
    while True:
        try:
            with live.reading() as may_go_on:
                epoch, lineage = live.standing
                packing = Packing(source.snapshot())
                work.total = packing.total_bytes
                if blob.nbytes == packing.total_bytes:
                    tries += 1
                    if all(may_go_on() or tries == TRIES for _ in _watched(packing.copy_to(blob), work)):
                        break
        except SwappedError:
            if time.monotonic() >= began + SWAPPED_S:
                raise
            tries = 0
            time.sleep(LOOK_S)
            continue
        if blob.nbytes != packing.total_bytes:
            blob = _touched(packing.total_bytes, work)
    return state.describe(epoch, lineage, packing.meta_bytes, blob, work.worked), blob


def _watched(pieces: Iterator[None], work: Work) -> Iterator[None]:
    for _ in pieces:
        work.worked(PIECE_BYTES)
        yield


def _touched(size: int, work: Work) -> U8:
    """Memory that the system has given."""
    blob = np.empty(size, np.uint8)
    for at in range(0, size, PIECE_BYTES):
        blob[at : at + PIECE_BYTES : PAGE_BYTES] = 0
        work.worked(PIECE_BYTES)
        state.give_way()
    return blob


def size(source: StateSource, live: Live) -> int:
    """Bytes of the state as one byte string, which is not copied. Raises StateError."""
    with live.reading():
        return Packing(source.snapshot()).total_bytes


def executor() -> ThreadPoolExecutor:
    """Threads that copy, hash and write when nobody else wants their core."""
    return ThreadPoolExecutor(2, "p2pavg-state", initializer=_be_nice)


def _be_nice() -> None:
    if sys.platform == "linux":  # where threads have priorities of their own
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
