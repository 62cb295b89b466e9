"""What LZ4 blocks spare and cost: two peers average an embedding-heavy gradient, and a dense one.

    python -m bench.packing --json bench/results/packing.json

The embedding has `--vocabulary` rows of 128 values, of which a batch of tokens drawn by Zipf's law touches
some; half as many values more are dense.

bytes: what a peer sends of both. Beside it stands what a look at a chunk costs where packing does not pay:
its time, and its share of the time that the chunk takes over a link of 1 Gb/s.
time: seconds of a round where chunks are looked at and packed where that pays, beside rounds of the same two
where nothing is, one by one in turn; and the same of CPU seconds of both peers. The link is loopback as it is
(`open`), under an upload limit of 1 Gb/s (`gigabit`), and under a limit beyond what the machine carries,
which has each chunk looked at (`looked`): that is the most that it can cost.

A section that is not measured now stays in the file as it was.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import timeit
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean
from typing import Any

import numpy as np

from bench.outer_bars import spread
from p2pavg import Peer, codecs
from p2pavg.bench.options import positive_int
from p2pavg.bench.result import add_section_options, emit_sections
from p2pavg.native import compiled

WIDTH = 128
CHUNK = 1 << 17
LIMIT_MBPS = 2000.0
GIGABIT = 1e9 / 8
COMPRESSIONS = ("fp16", "int8", "int4")
LINKS = {"open": None, "gigabit": 1000.0, "looked": 1e6}  # upload limits in Mb/s
WARM = 2  # rounds before any is counted
Figures = dict[str, Any]


def gradient(vocabulary: int, tokens: int, sparse: bool, seed: int) -> np.ndarray:
    """float32: an embedding's gradient of so many tokens, and a dense one of half its size."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((vocabulary, WIDTH)).astype(np.float32)
    if sparse:
        touched = np.unique(rng.zipf(1.2, tokens) % vocabulary)
        rows[np.setdiff1d(np.arange(vocabulary), touched)] = 0
    return np.concatenate([rows.reshape(-1), rng.standard_normal(rows.size // 2).astype(np.float32)])


def gradients(args: argparse.Namespace, sparse: bool) -> list[np.ndarray]:
    """Of both peers."""
    return [gradient(args.vocabulary, args.tokens, sparse, seed) for seed in (0, 1)]


class Pair:
    """Two peers on loopback that average two gradients, again and again."""

    def __init__(self, first: Peer, second: Peer, vectors: list[np.ndarray]) -> None:
        self._work = list(zip((first, second), vectors, strict=True))

    async def round(self) -> float:
        """Bytes that a peer sent, of frames."""
        done = [peer.all_reduce(vector, group_size=2) for peer, vector in self._work]
        return mean(report.bytes_sent for report in await asyncio.gather(*done))

    async def timed(self, packing: bool) -> np.ndarray:
        """Seconds of a round, and CPU seconds of this process."""
        before = np.array([time.perf_counter(), time.process_time()])
        if packing:
            await self.round()
        else:
            with unpacked():
                await self.round()
        return np.array([time.perf_counter(), time.process_time()]) - before


@contextmanager
def unpacked() -> Iterator[None]:
    """Inside, chunks go as they are, and nobody looks whether packing pays."""
    compiled.lz4_assume_speed(0.0)
    try:
        yield
    finally:
        compiled.lz4_assume_speed(-1.0)


async def averaged(vectors: list[np.ndarray], compression: str) -> float:
    """Bytes that a peer sent in one round."""
    options: Figures = {"compression": compression, "listen": "127.0.0.1:0"}
    options["max_upload_mbps"] = LIMIT_MBPS  # loopback is faster than packing
    async with (
        Peer(run_id="packing", **options) as first,
        Peer(run_id="packing", initial_peers=[first.address], **options) as second,
    ):
        return await Pair(first, second, vectors).round()


def bytes_(args: argparse.Namespace) -> Figures:
    figures: Figures = {"vocabulary": args.vocabulary, "tokens": args.tokens, "width": WIDTH}
    for compression in COMPRESSIONS:
        dense, sparse = (asyncio.run(averaged(gradients(args, some), compression)) for some in (False, True))
        codec = codecs.get(compression)
        chunk = np.empty(codec.encoded_size(CHUNK), np.uint8)
        codec.encode(gradient(2 * CHUNK // WIDTH, 1, False, 2)[:CHUNK], chunk, 1.0)
        spent = min(timeit.repeat(lambda chunk=chunk: compiled.lz4_sample(chunk), number=50, repeat=20)) / 50
        found = {
            "dense_bytes": dense,
            "sparse_bytes": sparse,
            "sparse_over_dense": sparse / dense,
            "sample_us": 1e6 * spent,
            "sample_share_at_1_gbps": spent / (len(chunk) / GIGABIT),
        }
        figures |= {f"{compression}_{name}": value for name, value in found.items()}
    return figures


async def in_turn(
    args: argparse.Namespace, sparse: bool, compression: str, limit: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """[pairs, 2]: means of a round as it is, and without packing."""
    options: Figures = {"compression": compression, "listen": "127.0.0.1:0", "max_upload_mbps": limit}
    found = np.zeros((2, args.pairs, 2))
    async with (
        Peer(run_id="packing", **options) as first,
        Peer(run_id="packing", initial_peers=[first.address], **options) as second,
    ):
        pair = Pair(first, second, gradients(args, sparse))
        for _ in range(WARM):
            await pair.round()
        for number in range(args.pairs):
            for turn in range(2 * args.rounds):
                without = (turn + turn // 2) % 2  # 0, 1, 1, 0: what drifts falls on both
                found[without, number] += await pair.timed(not without)
    return found[0] / args.rounds, found[1] / args.rounds


def time_(args: argparse.Namespace) -> Figures:
    figures: Figures = {"pairs": args.pairs, "rounds_of_a_pair": args.rounds}
    for link, limit in LINKS.items():
        for compression in COMPRESSIONS:
            for kind, sparse in (("dense", False), ("sparse", True)):
                packed, plain = asyncio.run(in_turn(args, sparse, compression, limit))
                name = f"{link}_{compression}_{kind}"
                figures[f"{name}_s"] = float(plain[:, 0].mean())
                for column, lost in (("lost", 0), ("cpu_lost", 1)):
                    ratios = packed[:, lost] / plain[:, lost] - 1
                    figures |= spread(f"{name}_{column}", ratios.tolist())
    return figures


SECTIONS = {"bytes": bytes_, "time": time_}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_section_options(parser, SECTIONS)
    parser.add_argument("--vocabulary", type=positive_int, default=30_000, help="rows of the embedding")
    parser.add_argument("--tokens", type=positive_int, default=16_384, help="of a batch")
    parser.add_argument("--pairs", type=positive_int, default=12, help="of rounds with and without packing")
    parser.add_argument("--rounds", type=positive_int, default=6, help="each with and without, of a pair")
    emit_sections(parser.parse_args(), SECTIONS)


if __name__ == "__main__":
    main()
