"""What encryption costs: `python -m bench.encrypted [--rounds 15] [--json PATH]`.

Two peers of an open run and two of a closed one average the same vector over loopback, in turn: first one
swarm, then the other. There the processors limit both. Prints the median of the ratios of neighbouring
rounds, and the CPU time that a side spends more for each GB: what a process averages, it sends once and
receives once. Over a network, see `python -m bench.line_rate encrypted`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from bench.line_rate.contestants import averaging
from p2pavg.bench.machine import environment


def measure(numel: int, rounds: int) -> dict[str, Any]:
    """Both swarms live all the time; the one that waits uses no processor."""
    plain, sealed = (averaging(None, 2, numel, encrypted=closed) for closed in (False, True))
    with plain.workers, sealed.workers:
        for _ in range(rounds + 1):
            plain.play()
            sealed.play()
    ratios = [
        _mean(a, "transfer") / _mean(b, "transfer")
        for a, b in zip(plain.measured, sealed.measured, strict=True)
    ]
    moved = 2 * _mean(plain.measured[-1], "bytes_sent") / 1e9  # sent, and received
    more = [
        (_mean(b, "averaging_cpu_seconds") - _mean(a, "averaging_cpu_seconds")) / moved
        for a, b in zip(plain.measured, sealed.measured, strict=True)
    ]
    return {
        "numel": numel,
        "rounds": rounds,
        "engines": sorted({a["engine"] for c in (plain, sealed) for answers in c.measured for a in answers}),
        "transfer_seconds": {
            name: statistics.median(_mean(answers, "transfer") for answers in contestant.measured)
            for name, contestant in (("plain", plain), ("encrypted", sealed))
        },
        "rate_over_plain": statistics.median(ratios),
        "rates_over_plain": ratios,
        "cpu_seconds_per_gb_more": statistics.median(more),
        "environment": environment(),
    }


def _mean(answers: list[dict[str, Any]], field: str) -> float:
    return statistics.fmean(answer[field] for answer in answers)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = measure(args.numel, args.rounds)
    print(json.dumps({k: v for k, v in found.items() if k != "environment"}, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
