"""`bench input`: what binds an input pipeline, and which of its steps are better done once, beforehand.

A pipeline is a list of functions: the first takes a sample's bytes, the last gives what training takes. A
function with an attribute `online = True` is random: it and all that follow stay online. Every split between
offline and online is timed as whole loops over 64 samples, with each compression that is installed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from p2pavg.bench.input import shards, verdict
from p2pavg.bench.input.compression import available
from p2pavg.bench.input.measure import measure
from p2pavg.bench.input.source import Source
from p2pavg.bench.input.steps import Pipeline
from p2pavg.bench.options import at_least, positive_int
from p2pavg.bench.progress import progress
from p2pavg.bench.result import add_output_options, emit
from p2pavg.errors import ConfigurationError
from p2pavg.printable import counted
from p2pavg.report.reading import read_reports

EXAMPLE = "example: p2pavg bench input pipeline:steps --data 'train/*.tar' --need 260 --disk-mbps 200"


def register(subparsers: Any) -> None:
    """Add the verb `input`."""
    parser = subparsers.add_parser(
        "input", help="what binds an input pipeline", description=__doc__, epilog=EXAMPLE
    )
    parser.add_argument(
        "steps", metavar="MODULE:steps", help="a list of functions, imported from this folder"
    )
    parser.add_argument("--data", metavar="GLOB", required=True, help="files, or tar archives of samples")
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument("--need", type=at_least(1e-9), metavar="SPS", help="samples/s that one trainer takes")
    wanted.add_argument("--from", dest="reports", metavar="JSONL", help="take --need from a run's reports")
    parser.add_argument(
        "--workers", type=positive_int, default=os.cpu_count() or 1, help="processes; default: one per core"
    )
    parser.add_argument(
        "--disk-mbps", type=at_least(1e-9), help="MB/s that the storage reads; default: no limit"
    )
    parser.add_argument("--memory-gb", type=at_least(1e-9), help="what fits there is read from storage once")
    parser.add_argument("--write", metavar="DIR", type=Path, help="write the shards of the best split there")
    add_output_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Measure all splits, explain the figures, and write the best split if asked for."""
    pipeline, source = Pipeline.of(args.steps), Source.of(args.data)
    need = args.need if args.reports is None else needed(args.reports)
    ways, limits = available(), verdict.MachineLimits(args.disk_mbps, args.memory_gb)
    with progress("splits", 1 + pipeline.offline * len(ways)) as advance:
        splits = measure(pipeline, source, ways, args.workers, advance)
    names, count = pipeline.names, source.count
    top = verdict.best(splits, count, limits)
    if args.write is not None and top.offline:
        shards.check_room(args.write, top, count)
        way = next(way for way in ways if way.name == top.codec)
        with progress("shards", count) as advance:
            written = shards.write(args.write, pipeline, source, top, way, advance)
        wrote = (
            f"wrote {counted(written, 'shard')} of {label(top.offline, names)}, {top.codec}, to {args.write}"
        )
    elif args.write is not None:
        wrote = "wrote no shards: nothing is better done beforehand"
    rows = [{"split": label(split.offline, names), **asdict(split)} for split in splits]
    for row, split in zip(rows, splits, strict=True):
        row["rate"] = verdict.rate(split, count, limits)
    result = {
        "splits": rows,
        "samples": count,
        "workers": args.workers,
        "need": need,
        "binds": verdict.binds(splits[0], names, count, limits),
        "best": {"split": label(top.offline, names), "codec": top.codec},
        "verdict": verdict.verdict(splits, names, count, limits, need),
    }
    lines = [*table(result), wrote] if args.write is not None else table(result)
    emit(args, result, lines, lambda figure: draw(figure, result))
    return 0


def needed(path: str) -> float:
    """Samples/s of a trainer while it computes, from its reports. Raises ConfigurationError."""
    rates = [
        report.local_samples / report.seconds_calculation
        for report in read_reports(path)[0]
        if report.local_samples and report.seconds_calculation > 0
    ]
    if not rates:
        raise ConfigurationError(f"{path} has no report of an epoch in which its peer counted samples")
    return median(rates)


def label(offline: int, names: list[str]) -> str:
    """The name of a split."""
    return f"{'+'.join(names[:offline])} offline" if offline else "all online"


def table(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines for people."""
    yield f"{result['samples']:,} samples, {result['workers']} workers; samples/s:"
    yield f"  {'split':<32} {'codec':<5} {'one':>9} {'workers':>9} {'fed':>9} {'kB':>9} {'once':>20}"
    for row in result["splits"]:
        once = f"{verdict.in_bytes(row['offline_bytes'])} {row['offline_seconds']:,.1f} s"
        yield (
            f"  {row['split'][-32:]:<32} {row['codec']:<5} {row['sps']:>9,.0f} {row['sps_workers']:>9,.0f} "
            f"{row['rate']:>9,.0f} {row['kb_per_sample']:>9,.1f} {once if row['offline'] else '-':>20}"
        )
    yield result["verdict"]


def draw(figure: Any, result: dict[str, Any]) -> None:
    """Bars of the samples/s of each split, with the samples/s that training needs as a line."""
    axes = figure.add_subplot()
    rows = result["splits"]
    axes.barh([f"{row['split']}, {row['codec']}" for row in rows], [row["rate"] for row in rows])
    if result["need"] is not None:
        axes.axvline(result["need"], color="black", linewidth=1, label="needed")
        axes.legend()
    axes.invert_yaxis()
    axes.set_title("What each split feeds to training")
    axes.set_xlabel(f"samples/s, {result['workers']} workers")
