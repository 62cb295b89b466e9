"""Run simulated schedules: `python -m tests.simulation --seeds 0:1000`; `--seed X` replays one, traced."""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path
from statistics import quantiles

from p2pavg.bench.machine import environment
from tests.simulation.jobs import SMALL
from tests.simulation.schedule import Schedule, Verdict

KEYS = ("events", "messages", "commits", "late", "heals", "aborts", "failed", "readmitted", "successions")


Task = tuple[int, int | None, str | None, bool]  # seed, peers, only, plain


def run(task: Task) -> Verdict:
    return Schedule(*task).run()


def collect_young() -> None:
    """Look for what a schedule leaves behind while that is in the cache of the processor."""
    gc.freeze()
    gc.set_threshold(5_000)


def verdicts(tasks: list[Task], processes: int) -> Iterator[Verdict]:
    """One for each, in any order. The state of a large schedule is not looked through for what is not needed
    any more, nor let go of piece by piece: it goes with its process.
    """
    large = any((peers or 0) > SMALL for _, peers, _, _ in tasks)
    if processes == 1 and not large:
        collect_young()
        yield from map(run, tasks)
        return
    context = multiprocessing.get_context("fork")
    chunk = 1 if large else max(1, min(50, len(tasks) // (64 * processes)))
    with context.Pool(processes, gc.disable if large else collect_young, (), 1 if large else None) as pool:
        yield from pool.imap_unordered(run, tasks, chunksize=chunk)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay one schedule with a trace")
    parser.add_argument("--seeds", default="0:1000", help="first:last, the last not included")
    parser.add_argument("--peers", type=int, help="how many (default: drawn from the seed, 1 to 8)")
    parser.add_argument("--only", metavar="FAULT", help="no other faults but this, such as crash or stop")
    parser.add_argument("--plain", action="store_true", help="without the rarer faults")
    parser.add_argument("--seconds", type=float, default=inf, help="look at no more after so long")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write what came of it here")
    given = parser.parse_args()
    if given.seed is not None:
        verdict = Schedule(given.seed, given.peers, given.only, given.plain, trace=print).run()
        print(verdict)
        return int(verdict.broken is not None)
    first, last = map(int, given.seeds.split(":"))
    tasks = [(seed, given.peers, given.only, given.plain) for seed in range(first, last)]
    began = time.perf_counter()
    totals = dict.fromkeys(KEYS, 0)
    stalls, broken, count = [], 0, 0
    for verdict in verdicts(tasks, given.processes):
        count += 1
        for key in totals:
            totals[key] += getattr(verdict, key)
        stalls.append((round(verdict.longest_stall, 2), verdict.seed))
        if verdict.broken is not None:
            broken += 1
            peers = f" --peers {given.peers}" if given.peers else ""
            peers += f" --only {given.only}" if given.only else ""
            peers += " --plain" if given.plain else ""
            print(f"seed {verdict.seed}: {verdict.broken}")
            print(f"    replay it: python -m tests.simulation --seed {verdict.seed}{peers}", flush=True)
        if time.perf_counter() - began > given.seconds:
            break
    seconds = time.perf_counter() - began
    print(f"{count} schedules in {seconds:.1f} s, {broken} of them broke a promise; {totals}")
    print(f"longest stalls of undisturbed peers (seconds, seed): {sorted(stalls, reverse=True)[:5]}")
    if given.json is not None:
        found = {"peers": given.peers, "only": given.only, "schedules": count, "broken": broken}
        found |= {"seconds": seconds, "processes": given.processes, **totals}
        found |= {
            "stall_s_p99": quantiles([s for s, _ in stalls], n=100)[-1],
            "stall_s_longest": max(stalls)[0],
        }
        given.json.write_text(json.dumps({**found, "environment": environment()}, indent=1) + "\n")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
