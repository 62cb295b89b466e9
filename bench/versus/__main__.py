"""Averaging side by side: p2pavg, gloo, and Hivemind and PCCL where they are installed.

All contestants are started, then take turns: one round of each, again and again, so that a busy moment of the
machine hits all alike. `python -m bench.versus --peers 2 4 --numel 25000000 --hivemind /path/of/venv`

With --streams, p2pavg in fp16 also plays with each of these numbers of streams a link. --plot draws seconds
over peers, over values and over streams, of all that --json has gathered.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.versus.contestant import DEADLINE_S, Contestant
from bench.versus.plot import plot
from p2pavg.bench.machine import environment
from p2pavg.bench.workers import Workers
from p2pavg.report.plot import plot_path

WORKERS = Path(__file__).resolve().parent / "workers"  # run as files, in the environments of their systems
OURS = "p2pavg.bench.allreduce.worker"


def medians(contestant: Contestant) -> dict[str, Any]:
    """Medians."""
    answers = [answer for answers in contestant.measured for answer in answers]
    return {
        "name": contestant.name,
        "seconds": contestant.seconds(),
        "seconds_median": statistics.median(contestant.seconds()),
        "cpu_seconds_per_peer": statistics.median(answer["cpu_seconds"] for answer in answers),
        "max_abs_error": max(answer["max_abs_error"] for answer in answers),
    }


def ours(
    stack: ExitStack, peers: int, numel: int, lab: str | None, compression: str, streams: int | str = "auto"
) -> Contestant:
    """p2pavg with one codec."""
    workers = stack.enter_context(Workers(peers, OURS, topology=lab))
    workers.join(numel=numel, peers=peers, compression=compression, streams=streams, beside="none")
    name = f"p2pavg {compression}"
    return Contestant(name if streams == "auto" else f"{name}, {streams} streams", workers)


def theirs(
    stack: ExitStack,
    name: str,
    script: str,
    python: str,
    peers: int,
    numel: int,
    lab: str | None,
    **more: Any,
) -> Contestant:
    """Another system, in the interpreter that has it."""
    argv = [python, str(WORKERS / script)]
    workers = stack.enter_context(Workers(peers, "", topology=lab, argv=argv))
    first = workers.workers[0]
    first.send(do="start", index=0, peers=peers, numel=numel, address="", **more)
    address = first.receive(DEADLINE_S)["address"]
    for worker in workers.workers[1:]:
        worker.send(do="start", index=worker.index, peers=peers, numel=numel, address=address, **more)
    for worker in workers.workers[1:]:
        worker.receive(DEADLINE_S)
    workers.all(deadline_s=DEADLINE_S, do="meet")
    return Contestant(name, workers)


def compete(args: argparse.Namespace, peers: int, numel: int) -> list[dict[str, Any]]:
    """One size: every contestant's row."""
    with ExitStack() as stack:
        shared = (peers, numel, args.lab)
        contestants = [ours(stack, *shared, "fp16"), ours(stack, *shared, "none")]
        python = sys.executable
        contestants.append(theirs(stack, "gloo float32", "gloo_worker.py", python, *shared, half=False))
        contestants.append(theirs(stack, "gloo fp16 hook", "gloo_worker.py", python, *shared, half=True))
        if args.hivemind:
            python = str(Path(args.hivemind) / "bin" / "python")
            contestants.append(theirs(stack, "hivemind fp16", "hivemind_worker.py", python, *shared))
        if args.pccl:
            python = str(Path(args.pccl) / "bin" / "python")
            contestants.append(theirs(stack, "pccl float32", "pccl_worker.py", python, *shared))
        fixed = {streams: ours(stack, *shared, "fp16", streams) for streams in args.streams}
        contestants += fixed.values()
        for _ in range(args.rounds + 1):
            for contestant in contestants:
                contestant.play()
        rows = [medians(contestant) for contestant in contestants]
    base = next(row for row in rows if row["name"] == "gloo float32")
    for row in rows:
        row.update(peers=peers, numel=numel, lab=args.lab, streams=None)
        row["time_over_gloo"] = row["seconds_median"] / base["seconds_median"]
        row["cpu_over_gloo"] = row["cpu_seconds_per_peer"] / base["cpu_seconds_per_peer"]
    for streams, contestant in fixed.items():
        rows[contestants.index(contestant)]["streams"] = streams
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--numel", type=int, nargs="+", default=[25_000_000])
    parser.add_argument("--streams", type=int, nargs="+", default=[], metavar="K")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lab", help="a lab topology instead of loopback")
    parser.add_argument("--hivemind", metavar="VENV", help="a virtual environment with hivemind")
    parser.add_argument("--pccl", metavar="VENV", help="a virtual environment with pccl")
    parser.add_argument("--json", type=Path, help="rows are added to those that the file holds")
    parser.add_argument("--plot", type=plot_path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if args.json and args.json.exists():
        rows = json.loads(args.json.read_text())["rows"]
    for peers in args.peers:
        for numel in args.numel:
            for row in compete(args, peers, numel):
                rows.append(row)
                print(
                    f"{peers} peers, {numel / 1e6:g}M: {row['name']:16s} {row['seconds_median']:8.3f} s "
                    f"({row['time_over_gloo']:.2f} of gloo), {row['cpu_seconds_per_peer']:7.3f} CPU s a peer "
                    f"({row['cpu_over_gloo']:.2f}), error {row['max_abs_error']:.2g}",
                    flush=True,
                )
            if args.json:
                args.json.write_text(
                    json.dumps({"rows": rows, "environment": environment()}, indent=1) + "\n"
                )
    if args.plot:
        plot(rows, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
