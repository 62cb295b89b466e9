"""`bench codec`: the codecs' kernels against a plain copy, in bytes read and written per second.

Out of cache: the vectors are far larger than the last level cache. Kernels and the copy take turns, so that a
machine that changes its pace changes it for all; each figure is a median.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from p2pavg import codecs, native
from p2pavg.bench import common
from p2pavg.errors import ConfigurationError

EXAMPLE = "example: p2pavg bench codec --numel 64000000 --json -"
COPY = "copy"


@dataclass(frozen=True)
class Kernel:
    """One thing to time: `run()` reads and writes `moved` bytes."""

    name: str
    moved: int
    run: Callable[[], object]


def register(subparsers: Any) -> None:
    """Add the verb `codec`."""
    parser = subparsers.add_parser(
        "codec", help="codec kernels against a plain copy", description=__doc__, epilog=EXAMPLE
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--numel",
        type=common.positive_int,
        help="elements of the vector; default 32 million on the CPU, 256 million on a GPU",
    )
    parser.add_argument("--rounds", type=common.positive_int, default=9, help="repetitions; default 9")
    common.add_output_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Time all kernels on the device that was asked for and emit the table."""
    if args.device == "cuda":
        from p2pavg.bench.codec import cuda

        result = cuda.measure(args.numel or 1 << 28, args.rounds)
    else:
        result = measure_cpu(args.numel or 1 << 25, args.rounds)
    common.emit(args, result, table(result), lambda figure: draw(figure, result))
    return 0


def measure_cpu(numel: int, rounds: int) -> dict[str, Any]:
    """Median GB/s of each kernel and of memcpy, one thread, over `numel` elements."""
    kernels = list(cpu_kernels(numel))
    seconds: dict[str, list[float]] = {kernel.name: [] for kernel in kernels}
    with common.progress("kernels", rounds * len(kernels)) as advance:
        for kernel in kernels:
            kernel.run()
        for _ in range(rounds):
            for kernel in kernels:
                started = time.perf_counter()
                kernel.run()
                seconds[kernel.name].append(time.perf_counter() - started)
                advance(1)
    rates = {kernel.name: kernel.moved / median(seconds[kernel.name]) / 1e9 for kernel in kernels}
    implementation = native.module().isa() if native.available() else "python twin"
    return summary("cpu", implementation, numel, rates)


def summary(device: str, implementation: str, numel: int, rates: dict[str, float]) -> dict[str, Any]:
    """The JSON result; `rates` are GB/s by kernel, the plain copy under `COPY`."""
    copy = rates[COPY]
    return {
        "device": device,
        "implementation": implementation,
        "numel": numel,
        "copy_gb_per_s": copy,
        "kernels": [
            {"name": name, "gb_per_s": rate, "fraction_of_copy": rate / copy}
            for name, rate in rates.items()
            if name != COPY
        ],
    }


def cpu_kernels(numel: int) -> Iterator[Kernel]:
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
    yield Kernel(
        "encode int8 stochastic", x.nbytes + encoded.nbytes, lambda: stochastic.encode(x, encoded, 0.7)
    )
    yield _mean_kernel(x)
    yield Kernel("crc32", x.nbytes, lambda: native.crc32(x.view(np.uint8)))


def _codec_kernels(
    name: str, codec: codecs.Codec, x: codecs.F32, y: codecs.F32, encoded: Any
) -> Iterator[Kernel]:
    once = x.nbytes + encoded.nbytes
    yield Kernel(f"encode {name}", once, lambda: codec.encode(x, encoded, 0.7))
    yield Kernel(f"decode {name}", once, lambda: codec.decode(encoded, y))
    yield Kernel(f"decode+add {name}", once + y.nbytes, lambda: codec.decode_add(encoded, y, 1e-6))


def _mean_kernel(x: codecs.F32) -> Kernel:
    """The mean of four fp16 contributions of a quarter of the vector, encoded as fp16."""
    fp16 = codecs.get("fp16")
    quarter = len(x) // 4
    inputs = [np.zeros(fp16.encoded_size(quarter), np.uint8) for _ in range(4)]
    for i, data in enumerate(inputs):
        fp16.encode(x[i * quarter : (i + 1) * quarter], data, 1.0)
    out = np.zeros_like(inputs[0])
    return Kernel(
        "mean of 4 fp16",
        5 * out.nbytes,
        lambda: codecs.mean_encode(fp16, inputs, [1.0, 2.0, 3.0, 4.0], quarter, 0.1, fp16, out),
    )


def table(result: dict[str, Any]) -> Iterator[str]:
    """Lines for people."""
    yield (
        f"{result['device']}, {result['implementation']}, {result['numel']:,} elements; GB/s read + written "
        f"(a plain copy: {result['copy_gb_per_s']:.1f})"
    )
    for kernel in result["kernels"]:
        yield _line(kernel)
    if "host" in result:
        yield "between device and host, GB/s of encoded bytes"
        yield from map(_line, result["host"])


def _line(row: dict[str, Any]) -> str:
    return f"  {row['name']:<28} {row['gb_per_s']:8.2f}   {row['fraction_of_copy']:5.2f} of copy"


def draw(figure: Any, result: dict[str, Any]) -> None:
    """Bars of GB/s, with the plain copy as a line."""
    axes = figure.add_subplot()
    names = [kernel["name"] for kernel in result["kernels"]]
    axes.barh(names, [kernel["gb_per_s"] for kernel in result["kernels"]])
    axes.axvline(result["copy_gb_per_s"], color="black", linewidth=1, label="plain copy")
    axes.invert_yaxis()
    axes.set_xlabel(f"GB/s read + written, {result['device']} ({result['implementation']})")
    axes.legend()
