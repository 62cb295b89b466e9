"""A blob on its way in: equal chunks of one buffer, of which the last may be shorter."""

from __future__ import annotations

from collections.abc import Callable

from p2pavg.errors import ProtocolError
from p2pavg.transport.frames import MAX_BODY_BYTES, PACKED, Header
from p2pavg.transport.python.buffers import BufferPool
from p2pavg.transport.python.landing import Landing
from p2pavg.transport.python.packing import Packed
from p2pavg.transport.python.stream import Destination, Fate, Stream


class Blob:
    def __init__(
        self, pool: BufferPool, buffer: memoryview, chunk_bytes: int, arrived: Callable[[int], None]
    ) -> None:
        """arrived(chunk): called when the chunk is whole and in place."""
        if not 0 < chunk_bytes <= MAX_BODY_BYTES:
            raise ValueError(f"blob chunks of {chunk_bytes} bytes; 1 to {MAX_BODY_BYTES} fit into a frame")
        self._pool = pool
        self._buffer = buffer.cast("B")
        self._chunk_bytes = chunk_bytes
        self._have = bytearray(-(-len(self._buffer) // chunk_bytes))
        self._arrived = arrived
        self._landing = Landing(pool, self._place, lambda chunk: not self._have[chunk], self._accept)

    def expect(self, stream: Stream, header: Header) -> Destination | Fate:
        """The destination of a BLOB frame. Raises ProtocolError when the blob has no such chunk."""
        packed, length = bool(header.flags & PACKED), header.length
        whole = len(self._place(header.chunk)) if header.chunk < len(self._have) else 0
        if not whole or (length >= whole if packed else length != whole):
            raise ProtocolError(f"a blob chunk {header.chunk} of {length} bytes, which the blob has not")
        if self._have[header.chunk]:
            return Fate.DROP
        destination = self._landing.expect(stream, header.chunk, aside=packed)
        return Packed(destination, length, self._pool, _refuse) if packed else destination

    def _place(self, chunk: int) -> memoryview:
        return self._buffer[chunk * self._chunk_bytes : (chunk + 1) * self._chunk_bytes]

    def _accept(self, chunk: int, crc: int) -> None:
        self._have[chunk] = 1
        self._arrived(chunk)


def _refuse(why: str) -> None:
    raise ProtocolError(why)
