"""Blobs on their way to this peer: which chunks are in place. On the loop thread."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from p2pavg.transport.engine import Engine

U8 = npt.NDArray[np.uint8]


@dataclass(slots=True)
class Incoming:
    """What the engine put in place and nobody has looked at yet."""

    transfer: int
    chunks: list[int] = field(default_factory=list)
    owed: dict[bytes, int] = field(default_factory=dict)  # bytes that are asked for and not here, by donor
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    async def next(self, timeout: float) -> list[int]:
        """Chunks that came since; none within `timeout` seconds: an empty list."""
        self.wake.clear()
        if not self.chunks:
            try:
                async with asyncio.timeout(timeout):
                    await self.wake.wait()
            except TimeoutError:
                return []
        chunks, self.chunks = self.chunks, []
        return chunks


class Inbox:
    """Opens transfers, and passes on what the engine says of them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: dict[int, Incoming] = {}

    @contextmanager
    def open(self, buffer: U8, chunk_bytes: int) -> Iterator[Incoming]:
        """A transfer into `buffer`, for as long as the block lasts."""
        transfer = secrets.randbits(63)  # nobody guesses it: who knows it can write the buffer
        incoming = self._open[transfer] = Incoming(transfer)
        self._engine.open_blob(transfer, memoryview(buffer), chunk_bytes)
        try:
            yield incoming
        finally:
            self._engine.cancel(transfer)
            del self._open[transfer]

    def owed(self, donor: bytes) -> int:
        """Bytes of all transfers together that this donor was asked for and that are not here."""
        return sum(incoming.owed.get(donor, 0) for incoming in self._open.values())

    def chunk(self, transfer: int, chunk: int) -> None:
        """The engine put a chunk in place."""
        incoming = self._open.get(transfer)
        if incoming is not None:
            incoming.chunks.append(chunk)
            incoming.wake.set()
