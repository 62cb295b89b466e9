"""Donor: serves this peer's state to newcomers, from one snapshot at a time that all of them share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pavg.errors import StateError
from p2pavg.rounds.state import snapshot
from p2pavg.rounds.state.manifest import CHUNK_BYTES, Manifest
from p2pavg.rounds.state.snapshot import Live
from p2pavg.rounds.training import StateSource
from p2pavg.transport.engine import Engine
from p2pavg.transport.pacing import TokenBucket

logger = logging.getLogger("p2pavg.state")
U8 = npt.NDArray[np.uint8]

QUEUED_CHUNKS = 4  # chunks of one download that are with the engine at a time
HELD_S = 0.25  # how long state waits for a round's gradients, at most
LOOK_S = 0.005  # how often it looks whether they are through
BUSY_WAIT_S = 2.0  # how long a newcomer waits here for older downloads before it is told to ask again
IDLE_S = 15.0  # a download that asks for nothing for so long is over, when somebody else waits for its end
STUCK_S = 120.0  # and one of whose chunks none leaves for so long
SLOWEST_S = 8.0  # and one that takes longer for a chunk, beyond the first two minutes
REST = 2.0  # how long no new snapshot is taken, in times that the last one took
MOST_TIMES = 4  # that a newcomer may ask for all chunks
MAX_CHUNKS_ASKED = 4096


@dataclass(slots=True)
class _Download:
    """One newcomer on one link."""

    transfer: int = 0
    left: deque[int] = field(default_factory=deque)
    with_engine: int = 0
    asked: int = 0  # chunks, so far
    began_at: float = 0.0
    moved_at: float = 0.0

    def is_over(self, now: float) -> bool:
        """It has stopped, or only keeps others waiting."""
        paused = now - self.moved_at
        slow = now - self.began_at > STUCK_S + SLOWEST_S * (self.asked - len(self.left) - self.with_engine)
        return slow or paused > (STUCK_S if self.with_engine else IDLE_S)


class Donor:
    """The snapshot and who downloads it. Runs on the loop thread; copying and hashing run beside it.

    A newcomer whose own results begin later than the snapshot cannot use it; while others still download, it
    waits
    for them, so that there is never a second snapshot in memory.
    """

    def __init__(
        self,
        engine: Engine,
        source: StateSource,
        live: Live,
        sign: Callable[[bytes], bytes],
        background: Executor,
        moving: Callable[[], bool],
        *,
        upload_bps: float | None = None,
    ) -> None:
        """moving(): whether a round's gradients are on their way. upload_bps: bit/s that all downloads
        together may take; None: what gradients leave of the links.
        """
        self._engine = engine
        self._source = source
        self._live = live
        self._sign = sign
        self._background = background
        self._moving = moving
        self._held_until: float | None = None  # since the gradients began to move
        self._snapshot: tuple[Manifest, U8] | None = None
        self._downloads: dict[int, _Download] = {}
        self._bucket = None if upload_bps is None else TokenBucket(upload_bps / 8, time.monotonic())
        self._waking: asyncio.TimerHandle | None = None
        self._taking = asyncio.Lock()
        self._rests_until = 0.0
        self._released = asyncio.Event()

    async def manifest(self, link: int, since: int) -> Manifest | None:
        """The manifest of a state of epoch `since` or later, signed; None: busy, ask again."""
        deadline = time.monotonic() + BUSY_WAIT_S
        while True:
            async with self._taking:
                if self._snapshot is not None and self._usable(self._snapshot[0], since):
                    return self._begin(link, self._snapshot[0])
                busy = self._busy()
                if not busy and time.monotonic() >= self._rests_until:
                    return self._begin(link, await self._renew())
            self._released.clear()
            until = deadline if busy else min(deadline, self._rests_until)
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    await self._released.wait()
            except TimeoutError:
                if time.monotonic() >= deadline:
                    return None

    def _begin(self, link: int, manifest: Manifest) -> Manifest:
        now = time.monotonic()
        self._downloads[link] = _Download(began_at=now, moved_at=now)
        return manifest

    async def _renew(self) -> Manifest:
        self._snapshot = None  # its memory goes before the next one is taken
        began = time.monotonic()
        taken = await asyncio.get_running_loop().run_in_executor(self._background, self._take)
        ended = time.monotonic()
        self._snapshot, self._rests_until = taken, ended + REST * (ended - began)
        return taken[0]

    def _usable(self, manifest: Manifest, since: int) -> bool:
        current = (manifest.epoch, manifest.lineage) == self._live.standing
        return current or (manifest.epoch >= since and self._busy())

    def _busy(self) -> bool:
        now = time.monotonic()
        for link in [link for link, download in self._downloads.items() if download.is_over(now)]:
            self.done(link)
        return bool(self._downloads)

    def _take(self) -> tuple[Manifest, U8]:
        manifest, blob = snapshot.take(self._source, self._live)
        return manifest.signed(self._sign), blob

    def send(self, link: int, request: dict[str, Any]) -> None:
        """Queue the chunks that a newcomer asks for. Raises StateError when that snapshot is gone."""
        download, snapshot = self._downloads.get(link), self._snapshot
        if download is None or snapshot is None or request.get("root") != snapshot[0].root:
            raise StateError("that snapshot is gone; ask for the manifest again")
        transfer, chunks = request.get("transfer"), _chunks(request.get("chunks"), snapshot[0].chunks)
        if type(transfer) is not int or not 0 <= transfer < 2**63 or chunks is None:
            raise StateError("a chunk was asked for that the snapshot does not have")
        download.asked += len(chunks)
        if download.asked > MOST_TIMES * snapshot[0].chunks:
            raise StateError("that snapshot is gone; ask for the manifest again")
        if transfer != download.transfer:  # it begins anew; nobody waits for what is under way
            download.left.clear()
            download.with_engine = 0
        download.transfer = transfer
        download.moved_at = time.monotonic()
        download.left.extend(chunks)
        self._feed(link, download, snapshot[1])

    def sent(self, link: int, transfer: int) -> None:
        """The engine handed a chunk to the kernel."""
        download = self._downloads.get(link)
        if download is not None and download.transfer == transfer and self._snapshot is not None:
            download.with_engine = max(0, download.with_engine - 1)
            download.moved_at = time.monotonic()
            self._feed(link, download, self._snapshot[1])

    def done(self, link: int) -> None:
        """A newcomer has what it needs, or is gone."""
        if self._downloads.pop(link, None) is not None and not self._downloads:
            self._snapshot = None
            self._released.set()

    def _wake(self) -> None:
        """The cap, or the round, may let something through again."""
        self._waking = None
        for link, download in list(self._downloads.items()):
            if self._snapshot is not None:
                download.moved_at = time.monotonic()
                self._feed(link, download, self._snapshot[1])

    def _feed(self, link: int, download: _Download, blob: U8) -> None:
        view = memoryview(blob)
        while download.left and download.with_engine < QUEUED_CHUNKS:
            if (wait := self._wait_s(time.monotonic())) > 0:
                if self._waking is None:
                    self._waking = asyncio.get_running_loop().call_later(wait, self._wake)
                return
            chunk = download.left.popleft()
            download.with_engine += 1
            data = view[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
            if self._bucket is not None:
                self._bucket.spend(len(data))
                self._downloads[link] = self._downloads.pop(link)  # the others come first next time
            self._engine.send_blob(link, download.transfer, chunk, data)

    def _wait_s(self, now: float) -> float:
        """How long nothing may go out. Within one link gradients pass state by themselves; here they do on
        the way out of this peer, whoever they go to.
        """
        if not self._moving():
            self._held_until = None
        elif self._held_until is None:
            self._held_until = now + HELD_S
        held = self._held_until is not None and now < self._held_until
        capped = 0.0 if self._bucket is None else self._bucket.wait_s(now)
        return max(capped, LOOK_S if held else 0.0)


def _chunks(value: object, count: int) -> list[int] | None:
    """The asked chunks, or None when they are none of a snapshot of `count` chunks."""
    if not isinstance(value, (list, tuple)) or len(value) > MAX_CHUNKS_ASKED:
        return None
    sound = all(type(chunk) is int and 0 <= chunk < count for chunk in value)
    return list(value) if sound else None
