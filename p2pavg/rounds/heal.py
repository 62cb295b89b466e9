"""Downloading the state of the swarm from a member, and serving it to others."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pavg.errors import P2PAvgError, StateError
from p2pavg.rounds import state
from p2pavg.rounds.state import CHUNK_BYTES, Manifest
from p2pavg.rounds.training import State, StateSource
from p2pavg.transport.engine import Engine
from p2pavg.transport.link import Link

logger = logging.getLogger("p2pavg.state")
U8 = npt.NDArray[np.uint8]

ASK_TIMEOUT_S = 30.0  # a donor first finishes its snapshot
STALL_TIMEOUT_S = 5.0  # no chunk for this long: another donor is asked
QUEUED_CHUNKS = 8  # chunks handed to the engine ahead of what was sent, per download


@dataclass(slots=True)
class _Download:
    """One blob on its way in."""

    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    chunks: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Upload:
    """One blob on its way out: which chunks are left to queue."""

    link: int
    blob: U8
    left: list[int]


class Donor:
    """Serves this peer's state. One snapshot is shared by all downloads of the same epoch."""

    def __init__(
        self, engine: Engine, source: StateSource, applying: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._engine = engine
        self._source = source
        self._applying = applying
        self._snapshot: tuple[Manifest, U8] | None = None
        self._taking = asyncio.Lock()
        self._uploads: dict[tuple[int, int], _Upload] = {}

    async def manifest(self, standing: Callable[[], tuple[int, bytes]]) -> Manifest:
        """A manifest of the state as it stands now. standing: (epoch, lineage), read while nothing is being
        applied.
        """
        async with self._taking:
            if self._snapshot is None or standing() != (self._snapshot[0].epoch, self._snapshot[0].lineage):
                loop = asyncio.get_running_loop()
                self._snapshot = await loop.run_in_executor(None, self._take, standing)
            return self._snapshot[0]

    def _take(self, standing: Callable[[], tuple[int, bytes]]) -> tuple[Manifest, U8]:
        with self._applying():
            epoch, lineage = standing()
            meta, buffers = self._source.snapshot()
        return state.pack(State(epoch, lineage, meta, buffers))

    def send(self, link: int, transfer: int, chunks: Sequence[int], epoch: int, lineage: bytes) -> None:
        """Queue chunks of the snapshot. Raises StateError when that snapshot is gone."""
        if self._snapshot is None or (epoch, lineage) != (self._snapshot[0].epoch, self._snapshot[0].lineage):
            raise StateError("that snapshot is gone; ask for the manifest again")
        manifest, blob = self._snapshot
        if any(type(c) is not int or not 0 <= c < manifest.chunks for c in chunks):
            raise StateError("a chunk was asked for that the snapshot does not have")
        upload = _Upload(link, blob, list(reversed(chunks)))
        self._uploads[link, transfer] = upload
        for _ in range(QUEUED_CHUNKS):
            self._next(upload, transfer)

    def sent(self, link: int, transfer: int) -> None:
        """The engine handed a chunk to the kernel."""
        upload = self._uploads.get((link, transfer))
        if upload is not None:
            self._next(upload, transfer)
            if not upload.left:
                del self._uploads[link, transfer]

    def link_lost(self, link: int) -> None:
        """Forget the downloads of a peer that is gone."""
        for key in [key for key in self._uploads if key[0] == link]:
            del self._uploads[key]

    def _next(self, upload: _Upload, transfer: int) -> None:
        if upload.left:
            chunk = upload.left.pop()
            data = memoryview(upload.blob)[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
            self._engine.send_blob(upload.link, transfer, chunk, data)


class Downloader:
    """Fetches a state from the best of several donors."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._downloads: dict[int, _Download] = {}
        self._ids = itertools.count(random.getrandbits(61) << 1)

    def chunk(self, transfer: int, chunk: int) -> None:
        """The engine put a chunk in place."""
        download = self._downloads.get(transfer)
        if download is not None:
            download.chunks.add(chunk)
            download.arrived.set()

    async def fetch(
        self, donors: Sequence[bytes], links: Mapping[bytes, Link]
    ) -> tuple[State, dict[str, Any]]:
        """(state, the donor's other facts). Asks one donor after the other. Raises StateError when none can
        give it.
        """
        whys: list[str] = []
        for donor in donors:
            link = links.get(donor)
            if link is None:
                whys.append("no link")
                continue
            try:
                return await self._fetch(link)
            except (P2PAvgError, TimeoutError, ConnectionError) as error:
                whys.append(str(error) or type(error).__name__)
                logger.info("a download of the state failed: %s", whys[-1])
        raise StateError(f"no member could give its state ({'; '.join(whys) or 'nobody is there'})")

    async def _fetch(self, link: Link) -> tuple[State, dict[str, Any]]:
        answer = await link.request({"t": "state"}, ASK_TIMEOUT_S)
        if "error" in answer:
            raise StateError(str(answer["error"])[:200])
        manifest = Manifest.from_message(answer)
        blob = np.empty(manifest.total_bytes, np.uint8)
        transfer = next(self._ids) & (2**63 - 1)
        download = self._downloads[transfer] = _Download()
        self._engine.open_blob(transfer, memoryview(blob), CHUNK_BYTES)
        try:
            missing = list(range(manifest.chunks))
            while missing:
                goal = len(download.chunks) + len(missing)  # before asking: chunks may outrun the answer
                await self._ask(link, manifest, transfer, missing)
                await self._receive(download, goal)
                missing = await asyncio.get_running_loop().run_in_executor(
                    None, _broken, manifest, blob, missing
                )
                download.chunks.difference_update(missing)
            return state.unpack(manifest, blob), answer
        finally:
            self._engine.cancel(transfer)
            del self._downloads[transfer]

    async def _ask(self, link: Link, manifest: Manifest, transfer: int, chunks: list[int]) -> None:
        request = {
            "t": "state-chunks",
            "transfer": transfer,
            "chunks": chunks,
            "epoch": manifest.epoch,
            "lineage": manifest.lineage,
        }
        answer = await link.request(request, ASK_TIMEOUT_S)
        if "error" in answer:
            raise StateError(str(answer["error"])[:200])

    async def _receive(self, download: _Download, goal: int) -> None:
        while len(download.chunks) < goal:
            download.arrived.clear()
            try:
                await asyncio.wait_for(download.arrived.wait(), STALL_TIMEOUT_S)
            except TimeoutError:
                raise StateError("the donor stopped sending") from None


def _broken(manifest: Manifest, blob: U8, chunks: Sequence[int]) -> list[int]:
    """Those of `chunks` whose hash is wrong."""
    view, size = memoryview(blob), state.HASH_BYTES
    return [
        i
        for i in chunks
        if state.chunk_hash(view[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES])
        != manifest.hashes[i * size : (i + 1) * size]
    ]
