"""What a control message may take here while it is read, whatever its sender puts into it."""

from __future__ import annotations

import asyncio
import struct
import tracemalloc
import zlib
from collections.abc import Callable

import pytest

from p2pavg.errors import ProtocolError
from p2pavg.transport.links import handshake
from p2pavg.transport.links.control import MAX_MESSAGE_BYTES, ControlConnection

SMALL = 1 << 16  # as the fuzzer makes them
HEAD = b"\x81\xa1t"  # of a map with one key


def peak(work: Callable[[], object]) -> tuple[int, int]:
    """Bytes that this allocates at most at a time, and bytes that it leaves behind."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        work()
        after, most = tracemalloc.get_traced_memory()
        return most - before, after - before
    finally:
        tracemalloc.stop()


def nested(size: int) -> bytes:
    """Arrays that are each said to be as long as the message, each in the one before."""
    array = b"\xdd" + struct.pack(">I", size - 5000)
    return (HEAD + 900 * array).ljust(size, b"\xc0")


def empty_maps(size: int) -> bytes:
    """The most objects that bytes can stand for: 72 bytes of memory for one of the message."""
    count = handshake.MOST_ITEMS
    outer = (size - 64) // (count + 3)
    row = b"\xdc" + struct.pack(">H", count) + count * b"\x80"
    return HEAD + b"\xdc" + struct.pack(">H", outer) + outer * row


@pytest.mark.parametrize("size", [SMALL, MAX_MESSAGE_BYTES])
def test_arrays_are_not_allocated_as_long_as_they_are_said_to_be(size: int) -> None:
    """It was 70 MB for a message of 64 KB: the fuzzer, whose inputs are such messages, once grew by
    1.45 GB.
    """

    def work() -> None:
        with pytest.raises(ProtocolError):
            handshake.unpack(nested(size))

    most, left = peak(work)
    assert most < 4 * size + (1 << 20)
    assert left < 1 << 20


async def test_a_connection_holds_a_bounded_multiple_of_one_message() -> None:
    """The longest message of the smallest objects, in pieces: it takes less than 80 times its bytes until it
    is handled, and nothing afterwards.
    """
    connection, taken = ControlConnection(), []
    connection.start(lambda message: taken.append(len(message)), lambda reason: None, lambda nbytes: 0.0)
    body = empty_maps(MAX_MESSAGE_BYTES)
    framed = handshake.make_head(len(body), zlib.crc32(body)) + body

    def work() -> None:
        for at in range(0, len(framed), 1 << 16):
            connection.data_received(framed[at : at + (1 << 16)])

    most, left = peak(work)
    await asyncio.sleep(0)
    assert taken == [1]
    assert most < 80 * MAX_MESSAGE_BYTES
    assert left < 1 << 20
