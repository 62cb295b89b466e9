"""From an item of an outbox to the bytes of its frame."""

from __future__ import annotations

from collections.abc import Callable

from p2pavg import blocks
from p2pavg.native import crc32
from p2pavg.transport import frames
from p2pavg.transport.frames import Header, Kind
from p2pavg.transport.python.buffers import BufferPool
from p2pavg.transport.python.outbox import Item
from p2pavg.transport.python.reducer import Reducer


def frame(item: Item, pool: BufferPool, rate: Callable[[], float]) -> tuple[bytes, memoryview, int]:
    """(header, body, bytes that packing spared). A contribution is encoded now, into `item.scratch`. rate():
    bytes/s of the link, 0 when it is not known. Raises NonFiniteError.
    """
    if item.reducer is not None:
        return _chunk_frame(item, item.reducer, pool, rate())
    body, flags = memoryview(item.data), frames.REPEAT if item.repeat else 0
    block = blocks.packed(body, rate()) if item.kind is Kind.BLOB else None
    if block is not None:
        body, flags = memoryview(block), flags | frames.PACKED
    header = Header(
        kind=item.kind,
        length=len(body),
        flags=flags,
        transfer=item.transfer,
        chunk=item.number,
        body_crc=crc32(body),
    )
    return frames.pack(header), body, len(item.data) - len(body)


def _chunk_frame(
    item: Item, reducer: Reducer, pool: BufferPool, rate: float
) -> tuple[bytes, memoryview, int]:
    job, chunk = reducer.spec, reducer.ledger.chunks[item.number]
    if item.kind is Kind.RESULT:
        codec = job.result_codec
        crc: int | None = reducer.ledger.result_crc(item.number)
        body = reducer.result_view(item.number)
    else:
        item.scratch = pool.take(chunk.contribution_bytes)
        body = reducer.contribution(item.number, item.scratch)
        partial = reducer.ledger.is_partial(job.rank, item.number)
        codec, crc = job.result_codec if partial else job.contribution_codec, None
    flags = frames.REPEAT if item.repeat else 0
    block, whole = blocks.packed(body, rate), len(body)
    if block is not None:
        body, crc, flags = memoryview(block), None, flags | frames.PACKED
    header = Header(
        kind=item.kind,
        length=len(body),
        codec=codec,
        flags=flags,
        transfer=item.transfer,
        part=chunk.part,
        chunk=chunk.index,
        count=chunk.count,
        sender=job.rank,
        body_crc=crc32(body) if crc is None else crc,
    )
    return frames.pack(header), body, whole - len(body)


def release(item: Item, pool: BufferPool) -> None:
    """Give back the buffer that `frame` took."""
    if item.scratch is not None:
        pool.give(item.scratch)
        item.scratch = None
