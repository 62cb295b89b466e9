"""Every engine, and a mixed swarm, gathers sparse contributions: all members get all of them, as they are."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import lz4.block
import numpy as np
import pytest

from p2pavg import codecs, native
from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.transport.engine import SELF, ReduceJob, Start
from p2pavg.transport.frames import PACKED, Kind
from tests.unit.transport.engine_swarm import Swarm, poll
from tests.unit.transport.test_engine import frame, kinds, send, swarm_of

__all__ = ["kinds", "swarm_of"]  # fixtures

SPARSE = codecs.get("sparse-64")
TRANSFER = 7


@dataclass
class Gathering:
    """An all-gather of float32[numel] of each voter in chunks; a weight of 0 brings nothing."""

    weights: list[float]
    joiners: int = 0  # the last so many members do not vote
    numel: int = 50_000
    chunk: int = 8192
    encoded: bool = True
    results: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(len(self.weights))
        self.peers, voters = len(self.weights), len(self.weights) - self.joiners
        self.voters = tuple(rank < voters for rank in range(self.peers))
        self.plan = Plan(
            tuple(Part(rank, rank * self.numel, self.numel) for rank in range(voters)), gathers=True
        )
        self.sources = [rng.standard_normal(self.numel).astype(np.float32) for _ in range(self.peers)]
        self.counts = [min(self.chunk, self.numel - at) for at in range(0, self.numel, self.chunk)]
        self.nbytes = sum(map(SPARSE.encoded_size, self.counts))
        self.results = [np.full(voters * self.nbytes, 255, np.uint8) for _ in range(self.peers)]

    def job(self, rank: int) -> ReduceJob:
        links = tuple(SELF if rank == other else Swarm.link(rank, other) for other in range(self.peers))
        wire = SPARSE.wire_id
        return ReduceJob(
            TRANSFER, rank, links, self.voters, self.plan, self.chunk, wire, wire, self.results[rank]
        )

    def contribution(self, rank: int) -> np.ndarray:
        if not self.weights[rank]:
            return np.zeros(self.nbytes, np.uint8)
        data, at = np.empty(self.nbytes, np.uint8), 0
        for start, count in zip(range(0, self.numel, self.chunk), self.counts, strict=True):
            size = SPARSE.encoded_size(count)
            SPARSE.encode(self.sources[rank][start : start + count], data[at : at + size], 1.0)
            at += size
        return data

    def start(self, rank: int, ready: int | None = None) -> Start:
        if not self.weights[rank]:
            return Start(tuple(self.weights), 1.0)
        if self.encoded:
            return Start(tuple(self.weights), 1.0, None, self.contribution(rank), ready)
        return Start(tuple(self.weights), 1.0, self.sources[rank])

    def go(self, swarm: Swarm) -> None:
        for rank in range(self.peers):
            swarm.engines[rank].open_reduce(self.job(rank))
        for rank in range(self.peers):
            swarm.engines[rank].begin(TRANSFER, self.start(rank))

    async def finished(self, swarm: Swarm) -> None:
        for events in swarm.events:
            await events.until(lambda events=events: TRANSFER in events.done)

    def check(self, swarm: Swarm) -> None:
        voters = sum(self.voters)
        expected = np.concatenate([self.contribution(rank) for rank in range(voters)])
        for rank in range(self.peers):
            assert np.array_equal(self.results[rank], expected), f"rank {rank} has other bytes"
            assert swarm.events[rank].done[TRANSFER] == self.digests(), f"rank {rank} told other digests"
            assert swarm.events[rank].refused == []
            progress = swarm.engines[rank].progress(TRANSFER)
            assert progress.results_received == tuple(len(self.counts) * votes for votes in self.voters)

    def digests(self) -> tuple[bytes, ...]:
        found = []
        for rank in range(sum(self.voters)):
            data, at, crcs = self.contribution(rank), 0, b""
            for count in self.counts:
                size = SPARSE.encoded_size(count)
                crcs += native.crc32(data[at : at + size]).to_bytes(4, "little")
                at += size
            found.append(hashlib.sha256(crcs).digest())
        return tuple(found)


class TestGather:
    @pytest.mark.parametrize("encoded", [True, False], ids=["encoded", "raw"])
    @pytest.mark.parametrize("peers", [1, 2, 5])
    async def test_all_get_all(self, swarm_of, peers, encoded):
        """Every member ends with the very bytes that each voter brought, and tells a digest of each part."""
        gathering = Gathering([1.0 + rank for rank in range(peers)], encoded=encoded)
        swarm = swarm_of(peers)
        gathering.go(swarm)
        await gathering.finished(swarm)
        gathering.check(swarm)

    async def test_a_member_of_weight_zero_sends_nothing(self, swarm_of):
        """What has no weight is zeros on all peers, without a byte of it on the wire."""
        gathering = Gathering([1.0, 0.0, 3.0])
        swarm = swarm_of(3)
        gathering.go(swarm)
        await gathering.finished(swarm)
        gathering.check(swarm)
        assert swarm.engines[1].traffic(Swarm.link(1, 0))[0] == 0

    async def test_a_joiner_gets_all(self, swarm_of):
        """A member without a vote has no part, and gets those of all others."""
        gathering = Gathering([1.0, 2.0, 0.0], joiners=1)
        swarm = swarm_of(3)
        gathering.go(swarm)
        await gathering.finished(swarm)
        await poll(lambda: sum(swarm.engines[0].progress(TRANSFER).results_sent) == 2 * len(gathering.counts))
        gathering.check(swarm)

    async def test_contributions_that_come_while_they_are_encoded(self, swarm_of):
        """Chunks leave as they are supplied, counted from the first of the own part."""
        gathering = Gathering([1.0, 1.0, 1.0])
        swarm = swarm_of(3)
        for rank in range(3):
            swarm.engines[rank].open_reduce(gathering.job(rank))
            swarm.engines[rank].begin(TRANSFER, gathering.start(rank, ready=0))
        swarm.engines[2].supply(TRANSFER, 2)
        await poll(lambda: swarm.engines[0].progress(TRANSFER).results_received[2] == 2)
        for ready in range(1, len(gathering.counts) + 1):
            for rank in range(3):
                swarm.engines[rank].supply(TRANSFER, ready)
        await gathering.finished(swarm)
        gathering.check(swarm)

    async def test_what_comes_before_the_weights_waits(self, swarm_of):
        """A contribution that arrives before its receiver has begun is taken once it has."""
        gathering = Gathering([1.0, 1.0])
        swarm = swarm_of(2)
        for rank in range(2):
            swarm.engines[rank].open_reduce(gathering.job(rank))
        swarm.engines[1].begin(TRANSFER, gathering.start(1))
        await poll(lambda: sum(swarm.engines[1].progress(TRANSFER).results_sent))
        assert not sum(swarm.engines[0].progress(TRANSFER).results_received)
        swarm.engines[0].begin(TRANSFER, gathering.start(0))
        await gathering.finished(swarm)
        gathering.check(swarm)

    async def test_lost_chunks_are_sent_again(self, swarm_of):
        """Chunks of a stream that broke before it delivered them are named as missing, and come again."""
        gathering = Gathering([1.0, 1.0])
        swarm = swarm_of(2, streams=0)
        lost = swarm.wire(1, 0)  # takes chunks and never passes them on
        gathering.go(swarm)
        sent = len(gathering.counts)
        await poll(lambda: swarm.engines[1].progress(TRANSFER).results_sent[0] == sent)
        lost.close()
        await swarm.events[1].until(lambda: swarm.events[1].closed)
        lacking = swarm.engines[0].missing(TRANSFER, 1)
        assert not lacking.contributions
        assert lacking.results == tuple((1, index) for index in range(sent))
        swarm.connect(0, 1)
        swarm.engines[1].resend(TRANSFER, 0, lacking)
        await gathering.finished(swarm)
        gathering.check(swarm)


def spoilt(body: bytearray, how: str) -> bytes:
    """The first record of a chunk, made into one that no correct peer sends."""
    low, upper, codes = 4, 4 + 48, 4 + 48 + 16  # 64 indices of 6 low bits, 128 bits, 64 codes
    if how == "NaN":
        body[:2] = b"\xc0\x7f"
    elif how == "infinite":
        body[:2] = b"\x80\x7f"
    elif how == "small above big":
        body[2:4] = b"\x70\x71"
    elif how == "too few":
        body[upper : upper + 16] = bytes(16)
        body[upper] = 1
    elif how == "too many":
        body[upper : upper + 16] = b"\xff" * 16
    elif how == "duplicates":
        body[low : low + 48] = bytes(48)
        body[upper : upper + 16] = b"\xff" * 8 + bytes(8)
    elif how == "zeros that hold something":
        body[:4] = bytes(4)
    assert len(body[codes:]) >= 16
    return bytes(body)


class TestHostileContributions:
    @pytest.mark.parametrize(
        "how",
        [
            "NaN",
            "infinite",
            "small above big",
            "too few",
            "too many",
            "duplicates",
            "zeros that hold something",
        ],
    )
    async def test_malformed(self, swarm_of, how):
        """A contribution that no correct peer sends is refused, and its sender named."""
        gathering = Gathering([1.0, 1.0, 1.0], numel=8192)
        swarm = swarm_of(3, streams=0)
        wire = swarm.wire(0, 1)
        swarm.engines[0].open_reduce(gathering.job(0))
        swarm.engines[0].begin(TRANSFER, gathering.start(0))
        body = spoilt(bytearray(gathering.contribution(1).tobytes()), how)
        await self.refused(swarm, wire, body, 0)

    async def test_an_index_behind_the_end(self, swarm_of):
        """In a block that ends early, an index behind its end is refused."""
        gathering = Gathering([1.0, 1.0, 1.0], numel=65)
        swarm = swarm_of(3, streams=0)
        wire = swarm.wire(0, 1)
        swarm.engines[0].open_reduce(gathering.job(0))
        swarm.engines[0].begin(TRANSFER, gathering.start(0))
        body = bytearray(gathering.contribution(1).tobytes())  # indices 2 x 6 bits, then 4 bits, then codes
        body[4:6] = (63 << 6).to_bytes(2, "little")  # 0 and, in the second bucket, 63
        body[6] = 0b0101
        await self.refused(swarm, wire, bytes(body), 0)

    async def test_packed(self, swarm_of):
        """What is packed is looked at after it was unpacked."""
        gathering = Gathering([1.0, 1.0, 1.0], numel=8192)
        swarm = swarm_of(3, streams=0)
        wire = swarm.wire(0, 1)
        swarm.engines[0].open_reduce(gathering.job(0))
        swarm.engines[0].begin(TRANSFER, gathering.start(0))
        literals = bytearray(gathering.nbytes)
        literals[5] = 1  # behind scales of 0
        await self.refused(swarm, wire, lz4.block.compress(bytes(literals), store_size=False), PACKED)

    async def refused(self, swarm, wire, body: bytes, flags: int) -> None:
        numel = 65 if len(body) < 20 and not flags else 8192
        fields = {"transfer": TRANSFER, "part": 1, "sender": 1, "codec": SPARSE.wire_id, "count": numel}
        await send(wire, frame(Kind.RESULT, body, flags=flags, **fields))
        await swarm.events[0].until(lambda: swarm.events[0].refused)
        assert swarm.events[0].refused[0][:2] == (TRANSFER, 1)
        assert not swarm.engines[0].progress(TRANSFER).results_received[1]
        wire.close()
