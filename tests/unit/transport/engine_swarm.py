"""Several engines in one process, connected over loopback: what the engine tests share."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import itertools
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from p2pavg import codecs, native
from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.transport.engine import NOBODY, SELF, Engine, ReduceJob, Start, StreamKeys
from p2pavg.transport.python.engine import PythonEngine

DEADLINE_S = 20.0
ENGINES: dict[str, Callable[..., Engine]] = {"python": PythonEngine}
if (
    native.available()
    and hasattr(native.compiled, "Pump")
    and importlib.util.find_spec("p2pavg.transport.pump_engine")
):
    from p2pavg.transport.pump_engine import PumpEngine

    ENGINES["pump"] = PumpEngine

# How far a mean may be from the float64 mean, relative to the largest magnitude anywhere.
TOLERANCE = {"none": 1e-6, "fp16": 2e-3, "bf16": 2e-2, "int8": 2e-2, "int4": 3e-1}

SEALED = "sealed"  # among the kinds: streams are encrypted

# Which engine each peer of a test has, in turn.
KINDS = [(name,) for name in ENGINES] + ([("python", "pump")] if "pump" in ENGINES else [])
KINDS.append((*ENGINES, SEALED))


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of one TCP connection over loopback, non-blocking."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    one.setblocking(False)
    other.setblocking(False)
    return one, other


def stream_keys() -> tuple[StreamKeys, StreamKeys]:
    """Fresh keys for the two ends of one stream."""
    forth, back = os.urandom(32), os.urandom(32)
    return StreamKeys(forth, back), StreamKeys(back, forth)


def codec_layout(job: ReduceJob, encoded_size: Any) -> list[list[int]]:
    """Byte offset of each chunk in the encoded layout, a list per part. encoded_size(n): bytes of n
    elements.
    """
    offsets: list[list[int]] = []
    at = 0
    for part in job.parts:
        row: list[int] = []
        for begin in range(0, part.count, job.chunk_elements):
            row.append(at)
            at += encoded_size(min(job.chunk_elements, part.count - begin))
        offsets.append(row)
    return offsets


@dataclass
class Recorder:
    """EngineEvents that remembers, and lets a test wait for what it expects."""

    closed: list[tuple[int, int, str]] = field(default_factory=list)
    done: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    refused: list[tuple[int, int, str]] = field(default_factory=list)
    chunks: list[tuple[int, int]] = field(default_factory=list)
    sent: list[tuple[int, int, int]] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def stream_closed(self, link: int, stream: int, reason: str) -> None:
        self.closed.append((link, stream, reason))
        self._news.set()

    def job_done(self, transfer: int, digests: tuple[bytes, ...]) -> None:
        assert transfer not in self.done, "told twice"
        self.done[transfer] = digests
        self._news.set()

    def job_refused(self, transfer: int, rank: int, why: str) -> None:
        self.refused.append((transfer, rank, why))
        self._news.set()

    def blob_chunk(self, transfer: int, chunk: int) -> None:
        self.chunks.append((transfer, chunk))
        self._news.set()

    def blob_sent(self, link: int, transfer: int, chunk: int) -> None:
        self.sent.append((link, transfer, chunk))
        self._news.set()

    async def until(self, happened: Callable[[], Any]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not happened():
                self._news.clear()
                await self._news.wait()


async def poll(happened: Callable[[], Any]) -> None:
    """For what has no event: look each time the loop turns, up to the deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not happened():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Swarm:
    """N engines, every pair linked by k streams. Peer i calls its link to j `link(i, j)`."""

    def __init__(self, kinds: Sequence[str], peers: int, streams: int = 2) -> None:
        self.sealed = SEALED in kinds
        kinds = [kind for kind in kinds if kind != SEALED]
        self.events = [Recorder() for _ in range(peers)]
        self.engines: list[Engine] = [
            ENGINES[kind](recorder)
            for kind, recorder in zip(itertools.cycle(kinds), self.events, strict=False)
        ]
        self.peers = peers
        self._stream = itertools.count()
        self.ends: dict[
            tuple[int, int, int], socket.socket
        ] = {}  # a test may break these: (peer, other, stream)
        for i, j in itertools.combinations(range(peers), 2):
            for _ in range(streams):
                self.connect(i, j)

    @staticmethod
    def link(i: int, j: int) -> int:
        return 100 * i + j + 1

    def connect(self, i: int, j: int) -> int:
        """One more stream between two peers; its number."""
        number = next(self._stream)
        one, other = tcp_pair()
        self.attach(i, j, number, one, other)
        return number

    def attach(self, i: int, j: int, number: int, one: socket.socket, other: socket.socket) -> None:
        """Both ends of a stream; what travels between them may pass through the test."""
        ours, theirs = stream_keys() if self.sealed else (None, None)
        self.engines[i].attach(self.link(i, j), number, one, ours)
        self.engines[j].attach(self.link(j, i), number, other, theirs)

    def wire(self, i: int, j: int) -> socket.socket:
        """A raw stream into peer i, whose other end, as peer j, the test plays."""
        one, other = tcp_pair()
        self.engines[i].attach(self.link(i, j), next(self._stream), one)
        return other

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


@dataclass
class Reduction:
    """One all-reduce over a swarm: what everybody brings, and what everybody should get."""

    sources: list[np.ndarray | None]  # float32[numel] per rank; None: weight 0
    weights: list[float]
    counts: list[int]  # elements of each part
    owners: list[int] = field(default_factory=list)  # of each part; default: part i is owned by rank i
    voters: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    codec: str = "none"
    result_codec: str = ""
    chunk_elements: int = 1000
    transfer: int = 7
    pre_encoded: bool = False
    unlinked: bool = False  # those that exchange nothing have no links among each other
    deputies: list[tuple[int, ...]] = field(default_factory=list)  # of each part
    swaps: bool = False  # parts with a deputy
    groups: tuple[int, ...] = ()  # of each rank

    def __post_init__(self) -> None:
        n = len(self.sources)
        self.owners = self.owners or list(range(len(self.counts)))
        self.voters = self.voters or [True] * n
        self.scales = self.scales or [1.0] * n
        self.contribution_codec = codecs.get(self.codec)
        self.final_codec = codecs.get(self.result_codec or self.codec)
        starts = np.concatenate([[0], np.cumsum(self.counts)]).tolist()
        self.deputies = self.deputies or [()] * len(self.counts)
        self.parts = tuple(
            Part(owner, start, count, deputies, self.swaps and bool(deputies))
            for owner, start, count, deputies in zip(
                self.owners, starts, self.counts, self.deputies, strict=False
            )
        )
        self.plan = Plan(self.parts, self.groups)
        self.numel = starts[-1]
        self.chunks = [
            (part.start + offset, min(self.chunk_elements, part.count - offset))
            for part in self.parts
            for offset in range(0, part.count, self.chunk_elements)
        ]
        size = sum(self.final_codec.encoded_size(count) for _, count in self.chunks)
        self.results = [np.zeros(size, np.uint8) for _ in range(n)]

    def job(self, rank: int) -> ReduceJob:
        return ReduceJob(
            transfer=self.transfer,
            rank=rank,
            links=tuple(self._link(rank, j) for j in range(len(self.sources))),
            voters=tuple(self.voters),
            plan=self.plan,
            chunk_elements=self.chunk_elements,
            contribution_codec=self.contribution_codec.wire_id,
            result_codec=self.final_codec.wire_id,
            result=self.results[rank],
        )

    def _link(self, rank: int, other: int) -> int:
        if rank == other:
            return SELF
        apart = self.unlinked and other not in self.plan.neighbours(rank, len(self.sources))
        return NOBODY if apart else Swarm.link(rank, other)

    def begin(self, rank: int) -> Start:
        source = self.sources[rank]
        encoded = None
        if self.pre_encoded and source is not None:
            encoded = np.concatenate(
                [self.encode(source[at : at + count], self.scales[rank]) for at, count in self.chunks]
            )
            source = None
        return Start(tuple(self.weights), self.scales[rank], source, encoded)

    def encode(self, values: np.ndarray, scale: float = 1.0) -> np.ndarray:
        out = np.empty(self.contribution_codec.encoded_size(len(values)), np.uint8)
        self.contribution_codec.encode(values, out, scale)
        return out

    def expected(self) -> np.ndarray:
        total = np.zeros(self.numel, np.float64)
        for source, weight, scale in zip(self.sources, self.weights, self.scales, strict=True):
            if source is not None and weight > 0:
                total += source.astype(np.float64) * weight * scale
        return total / sum(self.weights)

    def decoded(self, rank: int) -> np.ndarray:
        out = np.empty(self.numel, np.float32)
        at = 0
        for start, count in self.chunks:
            size = self.final_codec.encoded_size(count)
            self.final_codec.decode(self.results[rank][at : at + size], out[start : start + count])
            at += size
        return out

    def digests(self, rank: int) -> tuple[bytes, ...]:
        """What `job_done` must tell, computed from the result."""
        rows = codec_layout(self.job(rank), self.final_codec.encoded_size)
        ends = [*itertools.chain(*rows), len(self.results[rank])][1:]
        end = iter(ends)
        found = []
        for row in rows:
            crcs = [native.crc32(self.results[rank][at : next(end)]) for at in row]
            found.append(hashlib.sha256(b"".join(crc.to_bytes(4, "little") for crc in crcs)).digest())
        return tuple(found)

    def open(self, swarm: Swarm, ranks: Sequence[int] | None = None) -> None:
        for rank in range(len(self.sources)) if ranks is None else ranks:
            swarm.engines[rank].open_reduce(self.job(rank))

    def start(self, swarm: Swarm, ranks: Sequence[int] | None = None) -> None:
        for rank in range(len(self.sources)) if ranks is None else ranks:
            swarm.engines[rank].begin(self.transfer, self.begin(rank))

    def go(self, swarm: Swarm, ranks: Sequence[int] | None = None) -> None:
        """Open the job and begin it."""
        self.open(swarm, ranks)
        self.start(swarm, ranks)

    async def through(self, swarm: Swarm) -> None:
        """Open, begin, wait until all are done, and check what everybody got."""
        self.go(swarm)
        await self.succeeded(swarm)

    async def succeeded(self, swarm: Swarm) -> None:
        """Wait until all are done, and check what everybody got."""
        await self.finished(swarm)
        self.check(swarm)

    async def finished(self, swarm: Swarm, ranks: Sequence[int] | None = None) -> None:
        for rank in range(len(self.sources)) if ranks is None else ranks:
            await swarm.events[rank].until(lambda rank=rank: self.transfer in swarm.events[rank].done)

    def check(self, swarm: Swarm, ranks: Sequence[int] | None = None) -> None:
        """All results are equal to the bit, near the float64 mean, and were told with the right digests."""
        ranks = range(len(self.sources)) if ranks is None else ranks
        first = self.results[ranks[0]].tobytes()
        expected = self.expected()
        largest = max(float(np.abs(s).max()) * k for s, k in self.brought()) if self.numel else 1.0
        tolerance = TOLERANCE[self.codec] + TOLERANCE[self.final_codec.name]
        for rank in ranks:
            assert self.results[rank].tobytes() == first, f"rank {rank} has other bits than rank {ranks[0]}"
            assert swarm.events[rank].done[self.transfer] == self.digests(rank)
            assert swarm.events[rank].refused == []
        np.testing.assert_allclose(self.decoded(ranks[0]), expected, rtol=0, atol=tolerance * largest)

    def brought(self) -> list[tuple[np.ndarray, float]]:
        rows = zip(self.sources, self.weights, self.scales, strict=True)
        return [(source, scale) for source, weight, scale in rows if source is not None and weight > 0]


def gradients(rng: np.random.Generator, peers: int, numel: int) -> list[np.ndarray | None]:
    return [rng.standard_normal(numel).astype(np.float32) for _ in range(peers)]


def two_levels(
    sizes: Sequence[int],
    *,
    silent: Sequence[int] = (),
    joiners: Sequence[int] = (),
    numel: int = 20_000,
    **options: Any,
) -> Reduction:
    """Regions of so many members; for each member that votes a part of its own, with deputies elsewhere.

    silent: ranks without weight. joiners: ranks that do not vote. Nobody has a link that its tree does not
    need.
    """
    rng = np.random.default_rng(sum(sizes))
    groups = tuple(region for region, size in enumerate(sizes) for _ in range(size))
    members = len(groups)
    voters = [rank not in joiners for rank in range(members)]
    owners = [rank for rank in range(members) if voters[rank]]
    deputies = []
    for turn, owner in enumerate(owners):
        others = [
            [rank for rank in owners if groups[rank] == region]
            for region in range(len(sizes))
            if region != groups[owner]
        ]
        deputies.append(tuple(here[turn % len(here)] for here in others))
    share = numel // len(owners)
    counts = [share] * (len(owners) - 1) + [numel - share * (len(owners) - 1)]
    return Reduction(
        [
            None if rank in silent else gradient
            for rank, gradient in enumerate(gradients(rng, members, numel))
        ],
        [0.0 if rank in silent else 1.0 + rank for rank in range(members)],
        counts,
        owners,
        voters,
        unlinked=True,
        deputies=deputies,
        groups=groups,
        **options,
    )
