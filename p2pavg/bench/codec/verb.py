"""`bench codec`: the codecs' kernels against a plain copy, in bytes read and written per second.

Out of cache: the vectors are far larger than the last level cache. Kernels and the copy take turns, so that a
machine that changes its pace changes it for all; each figure is a median.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from p2pavg.bench.options import positive_int
from p2pavg.bench.result import add_output_options, emit

EXAMPLE = "example: p2pavg bench codec --numel 64000000 --json -"


def register(subparsers: Any) -> None:
    """Add the verb `codec`."""
    parser = subparsers.add_parser("codec", description=__doc__, epilog=EXAMPLE)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--numel",
        type=positive_int,
        help="elements of the vector; default 32 million on the CPU, 256 million on a GPU",
    )
    parser.add_argument("--rounds", type=positive_int, default=9, help="repetitions; default 9")
    add_output_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Time all kernels on the device that was asked for and emit the table."""
    if args.device == "cuda":
        from p2pavg.bench.codec import cuda

        result = cuda.measure(args.numel or 1 << 28, args.rounds)
    else:
        from p2pavg.bench.codec import cpu

        result = cpu.measure(args.numel or 1 << 25, args.rounds)
    emit(args, result, table(result), lambda figure: draw(figure, result))
    return 0


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
    axes.set_title("Kernels beside a plain copy of the same bytes")
    axes.set_xlabel(f"GB/s read + written, {result['device']} ({result['implementation']})")
    axes.legend()
