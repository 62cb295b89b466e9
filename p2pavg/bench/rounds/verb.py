"""`bench rounds`: the cost of coordination alone, with tiny vectors and trainers that sleep."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from p2pavg.bench.options import at_least, positive_int, processes
from p2pavg.bench.progress import progress
from p2pavg.bench.result import add_output_options, emit, percentile
from p2pavg.bench.workers import Workers
from p2pavg.printable import counted
from p2pavg.report.plot import whole

EXAMPLE = "example: p2pavg bench rounds --peers 4 --epochs 100 --epoch-seconds 0.2"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("rounds", epilog=EXAMPLE)
    parser.add_argument("--peers", type=processes, default=4, help="processes (default 4)")
    parser.add_argument("--epochs", type=positive_int, default=100, help="epochs (default 100)")
    parser.add_argument(
        "--epoch-seconds", type=at_least(0.001), default=0.2, help="length of an epoch (default 0.2)"
    )
    parser.add_argument("--lab", metavar="TOPOLOGY", help="run on the hosts of a lab topology")
    add_output_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    result = measure(args)
    emit(args, result, _words(result), lambda figure: _draw(figure, result))
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The result as JSON data. Raises P2PAvgError when a worker fails."""
    steps = 20
    with (
        progress("epochs", None),
        Workers(args.peers, "p2pavg.bench.rounds.worker", topology=args.lab) as workers,
    ):
        workers.join(
            target=args.peers * steps,
            step_seconds=args.epoch_seconds / steps,
            epochs=args.epochs,
        )
        answers = workers.all(deadline_s=60 + 20 * args.epochs * args.epoch_seconds, do="train")
        lab = workers.lab_verdict()
    timings = [epoch for answer in answers for epoch in answer["epochs"]]
    overheads = [1e3 * seconds for seconds in _overheads(timings, args.peers * steps)]
    commits = [1e3 * t["commit"] for t in timings]
    return {
        "overhead_ms_p50": percentile(overheads, 50),
        "overhead_ms_p99": percentile(overheads, 99),
        "commit_ms_p50": percentile(commits, 50),
        "failed_rounds": sum(t["attempts"] - 1 for t in timings),
        "epochs": min(len(answer["epochs"]) for answer in answers),
        "peers": args.peers,
        "topology": args.lab,
        "overhead_ms": overheads,
        "wrong": sum(bool(t["wrong"]) for t in timings),
        **lab,
    }


def _overheads(timings: Sequence[dict[str, Any]], target: int) -> list[float]:
    """Per peer and epoch: seconds from the step that reached the target to the first gradient byte."""
    overheads = []
    for epoch in {t["epoch"] for t in timings}:
        rows = [t for t in timings if t["epoch"] == epoch]
        counted = sorted(at for t in rows for at in t["counted_at"])
        if len(counted) >= target:
            reached = counted[target - 1]
            overheads += [t["first_byte_at"] - reached for t in rows if t["first_byte_at"] > 0]
    return overheads


def _words(result: dict[str, Any]) -> list[str]:
    return [
        f"{counted(result['peers'], 'peer')}, {counted(result['epochs'], 'epoch')}: "
        f"target to first gradient byte {result['overhead_ms_p50']:.1f} ms (median), "
        f"{result['overhead_ms_p99']:.1f} ms (99%)",
        f"commit {result['commit_ms_p50']:.1f} ms (median); {result['failed_rounds']} failed attempts",
    ]


def _draw(figure: Any, result: dict[str, Any]) -> None:
    axes = figure.subplots()
    axes.hist(result["overhead_ms"], bins=50)
    axes.set_xlabel("target reached to first gradient byte, ms")
    axes.set_ylabel("peer-epochs")
    whole(axes.yaxis)
    axes.set_title(f"{counted(result['peers'], 'peer')}, {result['topology'] or 'loopback'}")
