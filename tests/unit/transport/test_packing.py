"""Chunks that travel as LZ4 blocks: where that pays, and whatever somebody sends as one."""

from __future__ import annotations

import random

import lz4.block
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg import blocks, native
from p2pavg.native import compiled
from p2pavg.transport import frames
from p2pavg.transport.frames import PACKED, Header, Kind
from p2pavg.transport.sealing import TAG_BYTES
from tests.unit.transport.engine_swarm import KINDS, Reduction, Swarm, gradients

compiled_code = pytest.mark.skipif(not native.available(), reason="needs the native module")


@st.composite
def mixtures(draw: st.DrawFn) -> bytes:
    """Bytes with noise, runs, and pieces that come again near and far."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    pieces = [rng.randbytes(rng.randrange(1, 40)) for _ in range(3)]
    out = b""
    for _ in range(draw(st.integers(0, 30))):
        out += rng.choice(
            [
                rng.randbytes(rng.randrange(0, 300)),
                bytes([rng.randrange(256)]) * rng.randrange(0, 3000),
                rng.choice(pieces) * rng.randrange(1, 4),
                out[-rng.randrange(1, 70_000) :][: rng.randrange(0, 500)],
            ]
        )
    return out


@compiled_code
class TestBlocks:
    @settings(max_examples=200, deadline=None)
    @given(data=mixtures())
    def test_each_reads_what_the_other_writes(self, data: bytes) -> None:
        """The LZ4 library reads blocks of ours, and ours reads the library's."""
        block = compiled.lz4_pack(data, len(data) + len(data) // 255 + 16)
        assert block is not None
        assert lz4.block.decompress(block, uncompressed_size=len(data)) == data
        for made in (block, lz4.block.compress(data, store_size=False)):
            out = bytearray(len(data))
            assert compiled.lz4_unpack(made, out)
            assert out == data

    @settings(max_examples=300, deadline=None)
    @given(data=mixtures(), edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4))
    def test_no_block_writes_beyond_its_size(self, data: bytes, edits: list[tuple[int, int]]) -> None:
        """Of any bytes as a block, and any size, nothing is written behind the destination, and what is taken
        fills it.
        """
        block = bytearray(lz4.block.compress(data, store_size=False))
        for at, byte in edits:
            block[at % len(block)] = byte
        for size in (len(data), max(0, len(data) - 1), len(data) + 1):
            room = np.full(size + 64, 0xA5, np.uint8)
            taken = compiled.lz4_unpack(bytes(block), room[:size])
            assert (room[size:] == 0xA5).all()
            if not edits:
                assert taken == (size == len(data))

    @pytest.mark.parametrize("start", [b"", b"\xf0", b"\x1f\x00\x01\x00"])
    def test_endless_lengths_end(self, start: bytes) -> None:
        """A length that goes on and on is refused when it exceeds what fits."""
        assert not compiled.lz4_unpack(start + b"\xff" * (100_000 * bool(start)), bytearray(5000))

    def test_no_room(self) -> None:
        """A block that would be longer than the room is not made."""
        noise = random.Random(1).randbytes(5000)
        assert compiled.lz4_pack(noise, 4500) is None
        assert compiled.lz4_pack(bytes(5000), 40) is not None


def sparse(share: float, numel: int = 1 << 17) -> np.ndarray:
    """Rows of 256 values, so many of which are not zero."""
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((numel // 256, 256)).astype(np.float32)
    rows[rng.random(len(rows)) >= share] = 0
    return rows.reshape(-1)


class TestChoice:
    def test_a_sample_tells_what_pays(self) -> None:
        """Both engines: zeros cost nothing, sparse rows about their share, noise is not packed."""
        sampled = [blocks.sample] + ([compiled.lz4_sample] if native.available() else [])
        for sample in sampled:
            assert sample(memoryview(bytes(200_000))) == 0
            assert sample(memoryview(bytes(100))) == 0
            assert sample(memoryview(random.Random(2).randbytes(200_000))) > blocks.WORTH
            assert 0.05 < sample(sparse(0.3).view(np.uint8).data) < 0.7

    def test_a_fast_link_goes_unpacked(self) -> None:
        """What packs slower than the link carries it is not packed, and neither is noise on a slow one."""
        body = sparse(0.3).view(np.uint8).data
        block = blocks.packed(body, 0.0)
        assert block is not None
        assert len(block) < 0.45 * len(body)
        assert blocks.packed(body, 2 * blocks.speed()) is None
        assert blocks.packed(sparse(1.0).view(np.uint8).data, 1e3) is None
        assert blocks.packed(memoryview(bytes(5000)), 1e3) == b""


@pytest.mark.skipif(("pump",) not in KINDS, reason="needs the native module")
async def test_a_processor_that_packs_at_no_speed_packs_nothing() -> None:
    """With an assumed speed of 0, for measurements, not even zeros are packed; afterwards they are again."""
    zeros = [np.zeros(1 << 16, np.float32)] * 2
    for speed, packs in ((0.0, False), (-1.0, True)):
        compiled.lz4_assume_speed(speed)
        swarm = Swarm(("pump",), 2)
        try:
            await Reduction(zeros, [1.0, 1.0], [1 << 15, 1 << 15]).through(swarm)
            assert (swarm.engines[0].spared() > 0) == packs
        finally:
            compiled.lz4_assume_speed(-1.0)
            swarm.close()


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
class TestEngines:
    @pytest.mark.parametrize(("codec", "result"), [("none", "none"), ("fp16", "fp16"), ("int4", "int8")])
    async def test_untouched_rows_cost_nothing(self, kinds: tuple[str, ...], codec: str, result: str) -> None:
        """Three peers average rows of which a tenth is touched, and a stretch of zeros: the same bits for
        all, in less than half the bytes.
        """
        swarm = Swarm(kinds, 3)
        try:
            for engine in swarm.engines:
                engine.set_upload_limit(1e9)  # a link of known rate; loopback is faster than packing
            values = sparse(0.1)
            values[: 1 << 14] = 0
            reduction = Reduction(
                [values * k for k in (1.0, -2.0, 0.5)],
                [1.0, 2.0, 3.0],
                [1 << 15, 1 << 15, 1 << 16],
                codec=codec,
                result_codec=result,
                chunk_elements=1 << 13,
            )
            await reduction.through(swarm)
            sent = sum(
                swarm.engines[i].traffic(swarm.link(i, j))[0] for i in range(3) for j in range(3) if i != j
            )
            plain = 2 * (reduction.contribution_codec.encoded_size(1 << 17) + len(reduction.results[0]))
            assert sent < 0.5 * plain
        finally:
            swarm.close()

    async def test_noise_goes_as_it_is(self, kinds: tuple[str, ...]) -> None:
        """A dense vector costs what it did."""
        swarm, rng = Swarm(kinds, 2), np.random.default_rng(5)
        try:
            for engine in swarm.engines:
                engine.set_upload_limit(1e9)
            reduction = Reduction(gradients(rng, 2, 1 << 16), [1.0, 1.0], [1 << 15, 1 << 15])
            await reduction.through(swarm)
            frame = 4000 + frames.HEADER_BYTES
            sent = swarm.engines[0].traffic(swarm.link(0, 1))[0]
            assert 66 * frame > sent > 64 * frame
        finally:
            swarm.close()

    @pytest.mark.parametrize(
        "block",
        [
            lz4.block.compress(bytes(3999), store_size=False),
            lz4.block.compress(bytes(4001), store_size=False),
            b"\xf0" + b"\xff" * 3000,
            random.Random(4).randbytes(500),
            bytes(4000),
        ],
        ids=["short", "long", "endless", "noise", "not shorter"],
    )
    @pytest.mark.parametrize("kind", [Kind.CONTRIBUTION, Kind.RESULT])
    async def test_a_hostile_block_is_refused(self, kinds: tuple[str, ...], kind: Kind, block: bytes) -> None:
        """A block that is malformed, or holds less or more than the chunk, is its sender's fault, by name."""
        swarm = Swarm(kinds, 2, streams=0)
        try:
            wire = swarm.wire(0, 1)
            reduction = Reduction([np.ones(2000, np.float32)] * 2, [1.0, 1.0], [1000, 1000])
            reduction.open(swarm, [0])
            reduction.start(swarm, [0])
            part = 0 if kind is Kind.CONTRIBUTION else 1
            head = Header(
                kind,
                len(block),
                flags=PACKED,
                transfer=7,
                part=part,
                count=1000,
                sender=1,
                body_crc=native.crc32(block),
            )
            wire.send(frames.pack(head) + block)
            await swarm.events[0].until(lambda: swarm.events[0].refused)
            assert swarm.events[0].refused[0][:2] == (7, 1)
            assert swarm.engines[0].progress(7).results_received[1] == 0
            assert swarm.engines[0].progress(7).contributions_received[1] == 0
            wire.close()
        finally:
            swarm.close()

    async def test_a_blob_travels_in_the_bytes_that_it_needs(self, kinds: tuple[str, ...]) -> None:
        """Zeros, rows that are mostly zero, and noise: the receiver has them as they were, and zeros cost
        their headers even where the link is faster than packing.
        """
        size, noise = 100_000, random.Random(6).randbytes(100_000)
        chunks = [bytes(size), noise, sparse(0.1, 25_088).tobytes()[:size], bytes(size), noise[:777]]
        for limit, most in ((1e9, 1.5 * size), (None, 2.1 * size)):
            swarm, buffer = Swarm(kinds, 2), bytearray(b"\xff" * sum(map(len, chunks)))
            try:
                swarm.engines[0].set_upload_limit(limit)
                swarm.engines[1].open_blob(5, memoryview(buffer), size)
                for number, chunk in enumerate(chunks):
                    swarm.engines[0].send_blob(swarm.link(0, 1), 5, number, memoryview(chunk))
                await swarm.events[1].until(lambda swarm=swarm: len(swarm.events[1].chunks) == len(chunks))
                await swarm.events[0].until(lambda swarm=swarm: len(swarm.events[0].sent) == len(chunks))
                assert bytes(buffer) == b"".join(chunks)
                sent = swarm.engines[0].traffic(swarm.link(0, 1))[0]
                assert sent < most
                framed = sent - len(buffer) + swarm.engines[0].spared()
                assert 0 < framed <= len(chunks) * (frames.HEADER_BYTES + TAG_BYTES)
            finally:
                swarm.close()

    @pytest.mark.parametrize(
        "block",
        [
            lz4.block.compress(bytes(999), store_size=False),
            lz4.block.compress(bytes(1001), store_size=False),
            b"\xf0" + b"\xff" * 900,
            random.Random(4).randbytes(500),
            bytes(1000),
        ],
        ids=["short", "long", "endless", "noise", "not shorter"],
    )
    async def test_a_hostile_block_of_a_blob_closes_its_stream(
        self, kinds: tuple[str, ...], block: bytes
    ) -> None:
        """A block that is malformed, or holds less or more than the chunk, is no chunk."""
        swarm = Swarm(kinds, 2, streams=0)
        try:
            wire = swarm.wire(0, 1)
            swarm.engines[0].open_blob(5, memoryview(bytearray(1500)), 1000)
            head = Header(Kind.BLOB, len(block), flags=PACKED, transfer=5, body_crc=native.crc32(block))
            wire.send(frames.pack(head) + block)
            await swarm.events[0].until(lambda: swarm.events[0].closed)
            assert swarm.events[0].chunks == []
            wire.close()
        finally:
            swarm.close()


def test_only_chunks_can_be_packed() -> None:
    """A heartbeat that says it is packed is no frame."""
    raw = frames.pack(Header(Kind.PING, 16, flags=PACKED))
    with pytest.raises(frames.ProtocolError, match="unknown flags"):
        frames.parse(raw)
