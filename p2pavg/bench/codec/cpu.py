"""`bench codec --device cpu`: the kernels of one thread against a copy by NumPy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np

from p2pavg import codecs, native
from p2pavg.bench.codec.kernel import COPY, Kernel, summary
from p2pavg.bench.progress import progress
from p2pavg.errors import ConfigurationError


def measure(numel: int, rounds: int) -> dict[str, Any]:
    """Median GB/s of each kernel and of memcpy, one thread, over `numel` elements."""
    timed = list(kernels(numel))
    seconds: dict[str, list[float]] = {kernel.name: [] for kernel in timed}
    with progress("kernels", rounds * len(timed)) as advance:
        for kernel in timed:
            kernel.run()
        for _ in range(rounds):
            for kernel in timed:
                started = time.perf_counter()
                kernel.run()
                seconds[kernel.name].append(time.perf_counter() - started)
                advance(1)
    rates = {kernel.name: kernel.moved / median(seconds[kernel.name]) / 1e9 for kernel in timed}
    implementation = native.compiled.isa() if native.available() else "python twin"
    return summary("cpu", implementation, numel, rates)


def kernels(numel: int) -> Iterator[Kernel]:
    """The copy and every kernel, over vectors that they share."""
    rng = np.random.default_rng(0)
    try:
        x = rng.standard_normal(numel, dtype=np.float32)
        y = np.zeros(numel, np.float32)
    except MemoryError:
        raise ConfigurationError(
            f"{numel} elements do not fit into memory; give a smaller --numel."
        ) from None
    yield Kernel(COPY, 8 * numel, lambda: np.copyto(y, x))
    for name in codecs.WIRE_IDS:
        codec = codecs.get(name)
        encoded = np.zeros(codec.encoded_size(numel), np.uint8)
        yield from _codec_kernels(name, codec, x, y, encoded)
    stochastic = codecs.StochasticInt8(seed=1, epoch=1)
    drawn = np.zeros(stochastic.encoded_size(numel), np.uint8)
    yield Kernel("encode int8 stochastic", x.nbytes + drawn.nbytes, lambda: stochastic.encode(x, drawn, 0.7))
    yield Kernel("crc32", x.nbytes, lambda: native.crc32(x.view(np.uint8)))


def _codec_kernels(
    name: str, codec: codecs.Codec, x: codecs.F32, y: codecs.F32, encoded: Any
) -> Iterator[Kernel]:
    once = x.nbytes + encoded.nbytes
    yield Kernel(f"encode {name}", once, lambda: codec.encode(x, encoded, 0.7))
    yield Kernel(f"decode {name}", once, lambda: codec.decode(encoded, y))
    yield Kernel(f"decode+add {name}", once + y.nbytes, lambda: codec.decode_add(encoded, y, 1e-6))
