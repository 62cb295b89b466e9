"""Averaging beside other work: `python -m bench.beside --help`.

Two peers average 25M values in fp16, over loopback and over an emulated 300 ms: idle, beside a thread that
never leaves Python's bytecode in every peer, and beside a torch training loop in every peer.

rate_of_idle          seconds of an idle round over those of this one, as medians
bytes_per_cpu_of_idle bytes for each CPU second of averaging, over those of idle peers, as medians
lost_over_used        what the other work lost while rounds ran, in its own seconds at the speed that it had
                      just before and after, over the CPU seconds of all other threads of the peers, the
                      caller's among them; over loopback only, for the lab's router takes processors too
slower_over_used      of that, what it lost while it had a processor: the CPU seconds, by its own clock, that
                      its work took beyond those it takes alone: caches, and handing the interpreter over
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from bench.versus.contestant import DEADLINE_S, Contestant
from p2pavg.bench.machine import environment
from p2pavg.bench.workers import Workers

NETWORKS = {"loopback": None, "two-300ms": "two-300ms"}
ROUNDS = {"loopback": 3, "two-300ms": 1}  # of each that --rounds names: they are short there
REST_S = 0.5


def play(kind: str, topology: str | None, rounds: int) -> dict[str, float]:
    """Of all rounds and peers."""
    with Workers(2, "p2pavg.bench.allreduce.worker", topology=topology) as workers:
        workers.join(
            numel=25_000_000, peers=2, compression="fp16", streams="auto", beside=kind, credentials=None
        )
        contestant, alone = Contestant(kind, workers), []

        def rest() -> None:
            answers = workers.all(deadline_s=DEADLINE_S, do="rest", seconds=REST_S)
            alone.append([(answer["beside_rate"], cost_of(answer)) for answer in answers])

        contestant.play()
        rest()
        for _ in range(rounds):
            contestant.play()
            rest()
        answers = [answer for round_ in contestant.measured for answer in round_]
        found = {
            "seconds": median(contestant.seconds()),
            "averaging_cpu_seconds": median(a["averaging_cpu_seconds"] for a in answers),
            "gb_per_cpu_second": median(1e-9 * a["bytes_sent"] / a["averaging_cpu_seconds"] for a in answers),
        }
        if kind != "none" and topology is None:
            usual = [
                [(before + after) / 2 for before, after in zip(*both, strict=True)]
                for pair in pairwise(alone)
                for both in zip(*pair, strict=True)
            ]
            lost = [
                answer["seconds"] * (1 - answer["beside_rate"] / rate)
                for answer, (rate, _) in zip(answers, usual, strict=True)
            ]
            slower = [
                answer["beside_cpu_seconds"] - answer["beside_units"] * cost
                for answer, (_, cost) in zip(answers, usual, strict=True)
            ]
            used = sum(answer["cpu_seconds"] - answer["beside_cpu_seconds"] for answer in answers)
            found["cpu_seconds"] = used / len(answers)
            found["lost_over_used"] = sum(lost) / used
            found["slower_over_used"] = sum(slower) / used
        return found


def cost_of(answer: dict[str, Any]) -> float:
    """CPU seconds of a unit of the other work."""
    return float(answer["beside_cpu_seconds"] / max(1, answer["beside_units"]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for network, topology in NETWORKS.items():
        rounds = ROUNDS[network] * args.rounds
        rows = {kind: play(kind, topology, rounds) for kind in ("none", "python", "torch")}
        idle = rows["none"]
        for row in rows.values():
            row["rate_of_idle"] = idle["seconds"] / row["seconds"]
            row["bytes_per_cpu_of_idle"] = row["gb_per_cpu_second"] / idle["gb_per_cpu_second"]
        found[network] = rows
        print(network, json.dumps(rows), flush=True)
    if args.json:
        args.json.write_text(json.dumps({**found, "environment": environment()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
