"""Chunks in a file, each as an LZ4 block where that pays: a table of lengths, then the chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from p2pavg import blocks
from p2pavg.rounds.state.manifest import Courtesy

U8 = npt.NDArray[np.uint8]

MOST_SHRUNK = 256  # times: no LZ4 block of n bytes holds more than so many times n


class MalformedFileError(Exception):
    """The table of lengths cannot be that of these chunks."""


class Disk:
    """How fast a disk takes bytes, and what packing has kept off it."""

    def __init__(self) -> None:
        self.bytes_per_second = 0.0  # when bytes were last written and flushed; 0.0: not known
        self.spared = 0

    def wrote(self, nbytes: int, seconds: float) -> None:
        """So many bytes were written in `seconds`, packing not included."""
        if nbytes and seconds > 0:
            self.bytes_per_second = nbytes / seconds


def spans(total: int, size: int) -> Iterator[slice]:
    """Where chunks of `size` bytes lie, of which the last may be shorter."""
    return (slice(at, min(total, at + size)) for at in range(0, total, size))


def write(file: BinaryIO, data: U8, size: int, disk: Disk) -> float:
    """Append the table and the chunks of `size` bytes; the seconds that writing took. Raises OSError."""
    view, lengths, start = memoryview(data), list[int](), file.tell()
    count, courtesy = -(-data.nbytes // size), Courtesy()
    file.write(bytes(4 * count))
    seconds = 0.0
    for span in spans(data.nbytes, size):
        chunk = view[span]
        block = blocks.packed(chunk, disk.bytes_per_second)
        body = chunk if block is None else block
        lengths.append(len(body))
        began = time.monotonic()
        file.write(body)
        seconds += time.monotonic() - began
        courtesy.worked(len(chunk))
    end = file.tell()
    file.seek(start)
    file.write(np.array(lengths, "<u4").tobytes())
    file.seek(end)
    disk.spared += data.nbytes - sum(lengths)
    return seconds


def read_table(file: BinaryIO, total: int, size: int, left: int) -> list[int]:
    """The bytes of every chunk in the file, of which `left` bytes are to come. Nothing is allocated for a
    size
    that only the file claims: a table fits into the file, and so does what it says.

    Raises MalformedFileError.
    """
    count = -(-total // size)
    if 4 * count > left:
        raise MalformedFileError("it is cut off")
    raw = file.read(4 * count)
    if len(raw) != 4 * count:
        raise MalformedFileError("it is cut off")
    lengths: list[int] = np.frombuffer(raw, "<u4").tolist()
    for length, span in zip(lengths, spans(total, size), strict=True):
        whole = span.stop - span.start
        if length > whole or (length and length * MOST_SHRUNK < whole):
            raise MalformedFileError("its chunks have impossible sizes")
    if 4 * count + sum(lengths) != left:
        raise MalformedFileError("it is cut off, or too long")
    return lengths


def read(file: BinaryIO, lengths: Sequence[int], blob: U8, size: int) -> Iterator[slice]:
    """blob: zeros <- the chunks; yields where each lies as soon as it is there. A chunk of zeros is left
    untouched, so that it takes no memory. Raises MalformedFileError for a block that is malformed.
    """
    view = memoryview(blob)
    for length, span in zip(lengths, spans(blob.nbytes, size), strict=True):
        whole = view[span]
        if length == len(whole):
            got = file.readinto(whole)  # type: ignore[attr-defined]
            if got != length:
                raise MalformedFileError("it is cut off")
        elif length and not blocks.unpack(memoryview(file.read(length)), whole):
            raise MalformedFileError("a block of it does not unpack to its size")
        yield span
