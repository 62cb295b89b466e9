"""Bodies received straight into the place where they stay.

A chunk may come more than once, over several streams at a time, and any copy may break off or be corrupt. So
only one stream at a time writes into the place itself; any other copy goes into a pooled buffer, and the
first whole copy whose checksum is right becomes the chunk. Nothing writes into the place of an accepted
chunk.
"""

from __future__ import annotations

from collections.abc import Callable

from p2pavg.transport.python.buffers import BufferPool
from p2pavg.transport.python.stream import Stream


class Landing:
    def __init__(
        self,
        pool: BufferPool,
        place: Callable[[int], memoryview],
        due: Callable[[int], bool],
        accept: Callable[[int, int], None],
        is_sound: Callable[[int, memoryview], bool] = lambda number, body: True,
    ) -> None:
        """place(number): the memory of that chunk. due(number): whether it is yet to be accepted.
        accept(number, crc): called when it is in place. is_sound(number, body): whether it can be that chunk.
        """
        self._pool = pool
        self.place = place
        self.due = due
        self.accept = accept
        self._is_sound = is_sound
        self.direct: dict[int, InPlace] = {}  # chunks that a stream is writing into their place

    def expect(self, stream: Stream, number: int, aside: bool = False) -> InPlace | Aside:
        """The memory into which `stream` receives this chunk, which is due. aside: not its place."""
        if aside or number in self.direct:
            return Aside(self, number, self._pool)
        in_place = InPlace(self, stream, number)
        self.direct[number] = in_place
        return in_place

    def accepted(self, number: int, crc: int, view: memoryview) -> None:
        """Take a whole copy of the chunk, which is in `view`."""
        if not self.due(number):
            return
        if not self._is_sound(number, view):
            if number in self.direct and self.direct[number].view is view:
                del self.direct[number]
            return
        writing = self.direct.pop(number, None)
        if writing is not None and writing.view is not view:
            writing.stream.forget_destination()
            writing.view[:] = view
        elif writing is None:
            self.place(number)[:] = view
        self.accept(number, crc)


class InPlace:
    def __init__(self, landing: Landing, stream: Stream, number: int) -> None:
        self.stream = stream
        self.view = landing.place(number)
        self._landing = landing
        self._number = number

    def landed(self, crc: int) -> None:
        self._landing.accepted(self._number, crc, self.view)

    def lost(self) -> None:
        if self._landing.direct.get(self._number) is self:
            del self._landing.direct[self._number]


class Aside:
    def __init__(self, landing: Landing, number: int, pool: BufferPool) -> None:
        length = len(landing.place(number))
        self._buffer = pool.take(length)
        self.view = self._buffer[:length].data
        self._landing = landing
        self._number = number
        self._pool = pool

    def landed(self, crc: int) -> None:
        self._landing.accepted(self._number, crc, self.view)
        self._pool.give(self._buffer)

    def lost(self) -> None:
        self._pool.give(self._buffer)
