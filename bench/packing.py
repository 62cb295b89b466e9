"""What LZ4 blocks spare: two peers average an embedding-heavy gradient, and a dense one.

    python -m bench.packing --json bench/results/packing.json

The embedding has `--vocabulary` rows of 128 values, of which a batch of tokens drawn by Zipf's law touches
some; half as many values more are dense. Beside the bytes stands what looking at a chunk costs where packing
does not pay: the time of a sample, and its share of the time that the chunk takes over a link of 1 Gb/s.
"""

from __future__ import annotations

import argparse
import asyncio
import timeit
from typing import Any

import numpy as np

from p2pavg import Peer, codecs
from p2pavg.bench.options import positive_int
from p2pavg.bench.result import add_output_options, emit
from p2pavg.native import compiled

WIDTH = 128
CHUNK = 1 << 17
LIMIT_MBPS = 2000.0
GIGABIT = 1e9 / 8


def gradient(vocabulary: int, tokens: int, sparse: bool, seed: int) -> np.ndarray:
    """float32: an embedding's gradient of so many tokens, and a dense one of half its size."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((vocabulary, WIDTH)).astype(np.float32)
    if sparse:
        touched = np.unique(rng.zipf(1.2, tokens) % vocabulary)
        rows[np.setdiff1d(np.arange(vocabulary), touched)] = 0
    return np.concatenate([rows.reshape(-1), rng.standard_normal(rows.size // 2).astype(np.float32)])


async def averaged(vectors: list[np.ndarray], compression: str) -> float:
    """Bytes that a peer sent, of frames."""
    options: dict[str, Any] = {"compression": compression, "listen": "127.0.0.1:0"}
    options["max_upload_mbps"] = LIMIT_MBPS  # loopback is faster than packing
    async with (
        Peer(run_id="packing", **options) as first,
        Peer(run_id="packing", initial_peers=[first.address], **options) as second,
    ):
        work = [peer.all_reduce(v, group_size=2) for peer, v in zip((first, second), vectors, strict=True)]
        reports = await asyncio.gather(*work)
    return sum(report.bytes_sent for report in reports) / 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=positive_int, default=30_000, help="rows of the embedding")
    parser.add_argument("--tokens", type=positive_int, default=16_384, help="of a batch")
    add_output_options(parser, plot=False)
    args = parser.parse_args()
    rows = []
    for compression in ("fp16", "int8", "int4"):
        found: dict[str, Any] = {"compression": compression}
        for sparse in (False, True):
            vectors = [gradient(args.vocabulary, args.tokens, sparse, seed) for seed in (0, 1)]
            sent = asyncio.run(averaged(vectors, compression))
            found["sparse_bytes" if sparse else "dense_bytes"] = sent
        found["sparse_over_dense"] = found["sparse_bytes"] / found["dense_bytes"]
        codec = codecs.get(compression)
        chunk = np.empty(codec.encoded_size(CHUNK), np.uint8)
        codec.encode(gradient(2 * CHUNK // WIDTH, 1, False, 2)[:CHUNK], chunk, 1.0)
        spent = min(timeit.repeat(lambda chunk=chunk: compiled.lz4_sample(chunk), number=50, repeat=20)) / 50
        found["sample_us"] = 1e6 * spent
        found["sample_share_at_1_gbps"] = spent / (len(chunk) / GIGABIT)
        rows.append(found)
    lines = [
        f"{row['compression']}: {row['dense_bytes'] / 1e6:.1f} MB dense, {row['sparse_bytes'] / 1e6:.1f} MB "
        f"with untouched rows ({row['sparse_over_dense']:.2f}); a look at a chunk {row['sample_us']:.1f} us, "
        f"{row['sample_share_at_1_gbps']:.2%} of its time at 1 Gb/s"
        for row in rows
    ]
    figures = {
        f"{row['compression']}_{name}": value
        for row in rows
        for name, value in row.items()
        if name != "compression"
    }
    shape = {"vocabulary": args.vocabulary, "tokens": args.tokens, "width": WIDTH}
    emit(args, {**shape, **figures}, lines)


if __name__ == "__main__":
    main()
