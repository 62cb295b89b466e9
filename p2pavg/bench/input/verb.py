"""`bench input`: what binds an input pipeline, and which of its steps are better done once, beforehand.

A pipeline is a list of functions: the first takes a sample's bytes, the last gives what training takes. A
function with an attribute `online = True` is random: it and all that follow stay online. Every split between
offline and online is timed as whole loops over 64 samples, with each compression that is installed. Instead
of a list, MODULE:NAME may be a torch Dataset or DataLoader, or any iterable of samples: that is timed as
it is.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from p2pavg.bench.input import shards, verdict, whole
from p2pavg.bench.input.compression import available
from p2pavg.bench.input.measure import Split
from p2pavg.bench.input.measure import splits as measured
from p2pavg.bench.input.named import named
from p2pavg.bench.input.source import Source
from p2pavg.bench.input.steps import Pipeline
from p2pavg.bench.input.whole import is_whole
from p2pavg.bench.options import at_least, processes
from p2pavg.bench.progress import progress
from p2pavg.bench.result import add_output_options, emit, percentile
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
        "steps", metavar="MODULE:steps", help="a list of functions, or a loader; imported from this folder"
    )
    parser.add_argument(
        "--data",
        metavar="GLOB",
        help="files, tar archives of samples, or MODULE:NAME of an iterable of bytes",
    )
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument("--need", type=at_least(1e-9), metavar="SPS", help="samples/s that one trainer takes")
    wanted.add_argument("--from", dest="reports", metavar="JSONL", help="take --need from a run's reports")
    parser.add_argument(
        "--workers", type=processes, default=os.cpu_count() or 1, help="processes; default: one per core"
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
    need = args.need if args.reports is None else needed(args.reports)
    thing = named(args.steps, "the steps")
    if is_whole(thing):
        return run_whole(args, thing, need)
    pipeline = Pipeline.of(thing, args.steps)
    if args.data is None:
        raise ConfigurationError("a list of steps needs samples to run over: name them with --data")
    source, ways = Source.of(args.data), available()
    limits = verdict.MachineLimits(args.disk_mbps, args.memory_gb)
    if args.write is not None:
        shards.check_folder(args.write)
    splits: list[Split] = []
    with progress("splits", 1 + pipeline.offline * len(ways)) as advance:
        for split in measured(pipeline, source, ways, args.workers):
            splits.append(split)
            advance(1)
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
        "verdict": verdict.verdict(splits, names, count, limits, need) + verdict.doubt([splits[0], top]),
    }
    lines = [*table(result), wrote] if args.write is not None else table(result)
    emit(args, result, lines, lambda figure: draw(figure, result))
    return 0


def run_whole(args: argparse.Namespace, thing: object, need: float | None) -> int:
    """A dataset or a loader has one split: itself."""
    if args.data is not None or args.write is not None:
        raise ConfigurationError(f"{args.steps} is no list of steps, so --data and --write have no meaning")
    fed = whole.rates(thing, args.workers)
    low, has, high = percentile(fed, 10), median(fed), percentile(fed, 90)
    row = {
        "split": "as it is",
        "codec": None,
        "sps": has,
        "sps_low": low,
        "sps_high": high,
        "kb_per_sample": None,
    }
    result = {
        "splits": [{**row, "rate": has}],
        "workers": args.workers,
        "need": need,
        "binds": None,
        "best": {"split": "as it is", "codec": None},
        "verdict": verdict.as_it_is(low, has, high, need),
    }
    emit(args, result, [str(result["verdict"])], lambda figure: draw(figure, result))
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
    yield f"{result['samples']:,} samples, {counted(result['workers'], 'worker')}; samples/s:"
    yield (
        f"  {'split':<32} {'codec':<5} {'one':>9} {'held':>9} {'workers':>9} {'from':>9} {'to':>9} "
        f"{'fed':>9} {'kB':>9} {'once':>20}"
    )
    for row in result["splits"]:
        once = f"{verdict.in_bytes(row['offline_bytes'])} {row['offline_seconds']:,.1f} s"
        yield (
            f"  {row['split'][-32:]:<32} {row['codec']:<5} {row['sps']:>9,.0f} {row['sps_memory']:>9,.0f} "
            f"{row['sps_workers']:>9,.0f} {row['workers_low']:>9,.0f} {row['workers_high']:>9,.0f} "
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
    axes.set_xlabel(f"samples/s, {counted(result['workers'], 'worker')}")
