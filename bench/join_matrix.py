"""Joining over slow links: `python -m bench.join_matrix [--cells NAME ...] [--json PATH]`.

Every cell is a `p2pavg bench join` in the lab, with results of 0.9 MB: one donor and a newcomer (or three at
once) among homes of 20 Mb/s, homes that are 300 ms apart, and a home that joins three hosts with 1 Gb/s;
epochs of 0.3, 0.6 and 1.1 s, states of 5, 20 and 200 MB. A row tells what there was beside what is allowed,
and whether all peers hold equal bits. --list names the cells; a part of a name names all that have it. Each
runs for a few times as long as its state takes. --json adds its figures to those that the file has.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pavg.bench.join import verb
from p2pavg.bench.machine import environment
from p2pavg.errors import P2PAvgError

HERE = Path(__file__).parent
NUMEL = 450_000  # 0.9 MB in fp16
LINKS = {"home-4": ("home-4", 1), "far": (str(HERE / "far_homes.toml"), 1), "mixed": ("mixed", 3)}
EPOCHS = (0.3, 0.6, 1.1)
STATES = (5, 20, 200)


@dataclass(frozen=True)
class Cell:
    """One run."""

    name: str
    lab: str
    peers: int
    joiners: int
    epoch_seconds: float
    state_mb: int

    def is_named(self, part: str) -> bool:
        """The whole name, or a part of it that is no other cell's whole name."""
        return part == self.name or (part in self.name and part not in {cell.name for cell in cells()})

    def run(self) -> dict[str, Any]:
        """Its figures. Raises P2PAvgError."""
        fields = vars(self) | {"numel": NUMEL, "kill_donor": False, "fresh": False}
        return verb.measure(argparse.Namespace(**fields))


def cells() -> Iterator[Cell]:
    """All there are."""
    for name, (lab, peers) in LINKS.items():
        for joiners in (1, 3):
            if joiners == 3 and name == "mixed":
                continue  # it has one home
            for epoch in EPOCHS:
                for state in STATES:
                    title = f"{name}/{epoch}s/{state}MB" + ("/three" if joiners == 3 else "")
                    yield Cell(title, lab, peers, joiners, epoch, state)


def row(cell: Cell, result: dict[str, Any]) -> str:
    """One line of the table."""
    found = result["bars"]
    verdicts = [name for name, good in found["within"].items() if not good]
    verdicts += [] if result["bit_identical"] else ["UNEQUAL BITS"]
    names = ("state_s", "result_load", "in_s", "in_bar_s", "sent_over_state", "kept", "lost_over_state")
    figures = "".join(f"{found[name]:9.2f}" for name in names)
    return f"{cell.name:24}{figures}  {', '.join(verdicts) or 'all within'}"


def write(path: Path, results: dict[str, dict[str, Any]]) -> None:
    """Add the figures of these cells, in the order of all."""
    fresh = {
        name: r["bars"] | {"bit_identical": r["bit_identical"], "environment": r["environment"]}
        for name, r in results.items()
    }
    known = (json.loads(path.read_text())["cells"] if path.exists() else {}) | fresh
    ordered = {cell.name: known[cell.name] for cell in cells() if cell.name in known}
    path.write_text(json.dumps({"cells": ordered}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cells", nargs="*", default=[""], metavar="NAME", help="parts of names; default: all"
    )
    parser.add_argument("--list", action="store_true", help="name the cells and stop")
    parser.add_argument(
        "--json", metavar="PATH", type=Path, help="also write the figures, beside earlier ones"
    )
    args = parser.parse_args()
    chosen = [cell for cell in cells() if any(cell.is_named(part) for part in args.cells)]
    if args.list:
        print("\n".join(cell.name for cell in chosen))
        return 0
    heads = ("state s", "load", "in s", "allowed", "sent", "kept", "lost")
    print(f"{'cell':24}" + "".join(f"{head:>9}" for head in heads), flush=True)
    results = {}
    for cell in chosen:
        try:
            results[cell.name] = cell.run() | {"environment": environment()}
            print(row(cell, results[cell.name]), flush=True)
        except P2PAvgError as error:
            print(f"{cell.name:24} {error}", flush=True)
    if args.json is not None:
        write(args.json, results)
    good = len(results) == len(chosen) and all(
        all(r["bars"]["within"].values()) and r["bit_identical"] for r in results.values()
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
