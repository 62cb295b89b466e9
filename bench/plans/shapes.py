"""Plans beside each other: `python -m bench.plans.shapes [--numel N] [--rounds R] [--lab NAME] [SHAPE...]`.

A shape is the number of peers in each region, as 2+2+2+2. For each one real processes average with a flat
plan and with one over regions, on loopback or on the hosts of a lab topology (its own regions, then, by round
trips). Prints the bytes that crossed between regions as a multiple of 2 (R - 1) P b, the least possible with
R regions, P values and b bytes for each, and the seconds of a round, first and later.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from p2pavg import codecs
from p2pavg.bench.allreduce import verb
from p2pavg.bench.machine import environment

SHAPES = ("2+2+2+2", "4+4", "5+3", "6+1+1")
PLANS = ("flat", "two-level")


def measure(shape: str, plan: str, numel: int, rounds: int, lab: str | None) -> dict[str, Any]:
    """One swarm."""
    sizes = [int(size) for size in shape.split("+")]
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    given = ["--peers", str(sum(sizes)), "--numel", str(numel), "--rounds", str(rounds), "--plan", plan]
    given += ["--lab", lab] if lab is not None else ["--regions", shape]
    result = verb.measure(parser.parse_args(given))
    least = 2 * (len(sizes) - 1) * codecs.get("fp16").encoded_size(numel)
    return {
        "shape": shape,
        "plan": plan,
        "between_regions": result["bytes_between_regions"],
        "times_the_least": result["bytes_between_regions"] / least,
        "seconds": statistics.median(result["seconds"]),
        "seconds_first": result["seconds_first"],
        "bit_identical": result["bit_identical"],
        "attempts": result["attempts"],
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", default=SHAPES, metavar="SHAPE")
    parser.add_argument("--numel", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lab", metavar="TOPOLOGY")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    for shape in args.shapes:
        for plan in PLANS:
            row = measure(shape, plan, args.numel, args.rounds, args.lab)
            found.append(row)
            print(
                f"{shape:>9} {plan:>9}: {row['between_regions'] / 1e6:8.2f} MB between regions, "
                f"{row['times_the_least']:.3f} of the least; {row['seconds']:.2f} s, the first "
                f"{row['seconds_first']:.2f} s; {'equal' if row['bit_identical'] else 'UNEQUAL'} bits",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps({"rows": found, "environment": environment()}, indent=1) + "\n")
    return 0 if all(row["bit_identical"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
