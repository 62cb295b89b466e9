"""Peers with outer steps, of which one is killed about every minute: steps, and how long the others wait.

    python -m bench.outer_storm --minutes 30 --json bench/results/outer_storm.json

Each peer takes local steps of a known time, which cost no computation, and one outer step about every second
and a half. A peer that is killed (SIGKILL) is replaced after two seconds by a new one, which has to start, to
join and to download the state. Told are the local steps of all peers, those that were killed included, beside
those of as many peers that nothing befalls; the longest step() of a survivor within ten seconds of a kill;
and how long after a kill the survivors' next outer step was committed; and the members of the smallest
average.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from p2pavg.bench.options import at_least, positive_int
from p2pavg.bench.result import add_output_options, emit
from p2pavg.bench.workers import START_DEADLINE_S, Worker, Workers

WORKER = "bench.outer_storm.worker"
EVERY = 30  # local steps of an outer step
BATCH = 4
REPLACED_S = 2.0
AFTER_S = 10.0  # so long after a kill a wait is due to it
LONG_S = 0.05


class Storm:
    """The living peers, and what was counted."""

    def __init__(self, workers: Workers, folder: Path, args: argparse.Namespace) -> None:
        self._workers = workers
        self._folder = folder
        self._job: dict[str, Any] = {
            "run_id": "storm",
            "target": args.peers * BATCH * EVERY,
            "batch": BATCH,
            "streams": 1,
            "threads": 1,
            "compute": "sleep",
            "params": args.params,
            "step_seconds": args.step_seconds,
            "steps": 10**6,
            "compression": "int8",
            "outer": {},
            "feedback": True,
            "pace": None,
        }
        self._slow = range(args.slow)
        self._addresses: dict[int, str] = {}
        self.alive: list[Worker] = []
        self.kills: list[float] = []
        self.ends = 0.0
        self._lives = 0  # those that ended included

    def begin(self) -> None:
        for worker in self._workers.workers:
            self._start(worker)
        for worker in self.alive:
            worker.send(do="gather", peers=len(self.alive))
        for worker in self.alive:
            worker.receive(START_DEADLINE_S)

    def _start(self, worker: Worker) -> None:
        known = [self._addresses[other.index] for other in self.alive][:2]
        job = self._job | (
            {"step_seconds": 4 * self._job["step_seconds"]} if worker.index in self._slow else {}
        )
        worker.send(do="start", index=worker.index, initial_peers=known, **job)
        self._addresses[worker.index] = worker.receive(START_DEADLINE_S)["address"]
        self.alive.append(worker)

    def train(self, worker: Worker, until: float) -> None:
        count, diary = (str(self._folder / f"{what}-{self._lives}") for what in ("steps", "diary"))
        self._lives += 1
        worker.send(do="endure", until=until, count=count, diary=diary, long_s=LONG_S)

    def kill(self, dice: random.Random) -> None:
        victim = dice.choice(self.alive)
        self.kills.append(time.monotonic())
        victim.process.kill()
        self.alive.remove(victim)

    def replace(self, until: float) -> None:
        worker = self._workers.another()
        self._start(worker)
        self.train(worker, until)

    def steps(self) -> int:
        return sum(int.from_bytes(path.read_bytes(), "little") for path in self._folder.glob("steps-*"))

    def events(self) -> list[dict[str, Any]]:
        """What all lives wrote down; of one that was killed, but for a line that it had not ended."""
        lines = [line for path in self._folder.glob("diary-*") for line in path.read_text().split("\n")[:-1]]
        return [json.loads(line) for line in lines]


def storm(args: argparse.Namespace, minutes: float, kill_every_s: float | None) -> dict[str, Any]:
    dice = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder, Workers(args.peers, WORKER) as workers:
        run = Storm(workers, Path(folder), args)
        run.begin()
        until = time.monotonic() + 60 * minutes
        for worker in run.alive:
            run.train(worker, until)
        while kill_every_s is not None:
            wait = kill_every_s * dice.uniform(0.7, 1.3)
            if time.monotonic() + wait + AFTER_S > until:
                break
            time.sleep(wait)
            run.kill(dice)
            time.sleep(REPLACED_S)
            run.replace(until)
        for worker in run.alive:
            worker.receive(60 * minutes + START_DEADLINE_S)
        return {"steps": run.steps(), **judged(run.events(), run.kills)}


def judged(events: list[dict[str, Any]], kills: list[float]) -> dict[str, Any]:
    waits = [event for event in events if event["t"] == "wait"]
    averages = [event for event in events if event["t"] == "average"]
    after = [
        max((wait["seconds"] for wait in waits if kill < wait["at"] < kill + AFTER_S), default=0.0)
        for kill in kills
    ]
    next_commit = [
        min((average["at"] - kill for average in averages if average["at"] > kill), default=AFTER_S)
        for kill in kills
    ]
    told: dict[tuple[int, str], set[float]] = {}
    for average in averages:
        if average["theta"] is not None:
            told.setdefault((average["epoch"], average["lineage"]), set()).add(average["theta"])
    return {
        "kills": len(kills),
        "smallest_group": min(average["members"] for average in averages),
        "longest_wait_after_kill_s": max(after, default=None),
        "median_wait_after_kill_s": median(after) if after else None,
        "longest_to_commit_s": max(next_commit, default=None),
        "median_to_commit_s": median(next_commit) if next_commit else None,
        "outer_steps": max(average["epoch"] for average in averages) + 1,
        "samples_discarded": sum(average["discarded"] for average in averages),
        "bits_equal": all(len(values) == 1 for values in told.values()),
        "lineages": len({lineage for _, lineage in told}) == len({epoch for epoch, _ in told}),
    }


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--peers", type=positive_int, default=4)
    parser.add_argument("--minutes", type=at_least(0.5), default=30.0)
    parser.add_argument(
        "--calm-minutes", type=at_least(0.2), default=2.0, help="without kills, to compare with"
    )
    parser.add_argument(
        "--kill-every", type=at_least(5.0), default=60.0, help="seconds, give or take a third"
    )
    parser.add_argument("--step-seconds", type=at_least(0.01), default=0.05)
    parser.add_argument(
        "--slow", type=int, default=0, help="of the first peers, so many are four times slower"
    )
    parser.add_argument("--params", type=positive_int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    add_output_options(parser, plot=False)
    args = parser.parse_args()
    calm = storm(args, args.calm_minutes, None)
    found = storm(args, args.minutes, args.kill_every)
    share = found["steps"] / args.minutes / (calm["steps"] / args.calm_minutes)
    result = {**found, "share_of_undisturbed_steps": share, "calm": calm, "peers": args.peers}
    result |= {"minutes": args.minutes, "step_seconds": args.step_seconds, "kill_every_s": args.kill_every}
    result["four_times_slower"] = args.slow
    emit(args, result, [f"{name}: {value}" for name, value in result.items()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
