"""Whether each sample is averaged once in each pass, over many runs under faults: a table.

    python -m bench.exactly_once --out out/once --json bench/results/exactly_once.json

Each seed is one run of `p2pavg bench chaos --passes 3` in the lab, with 4 to 6 peers, every fault that the
verb knows, and two resumes on another number of peers. A run whose figures stand in the folder already is
not played again, so that a long series may be cut short and go on later. Without network namespaces,
--loopback plays the runs without the faults that need a network to break.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from p2pavg.bench.chaos.kinds import FAULTS, GRADIENT_FAULTS, LAB_FAULTS
from p2pavg.bench.chaos.passes import is_exact
from p2pavg.bench.chaos.sharing import FEWEST, MOST, RESUMES
from p2pavg.bench.machine import environment
from p2pavg.bench.options import at_least, positive_int

PASSES = 3
LAB = "six-100ms"
COUNTS = ("indices_missing", "indices_doubled", "averages_misnamed", "indices_untold", "averages_unseen")
HARM = ("crashes", "divergences", "hangs")
HEAD = (
    f"{'seed':>4} {'peers':>5} {'net':>9} {'averages':>8} {'faults':>6} {'missing':>7} {'doubled':>7} "
    f"{'misnamed':>8} {'untold':>6} {'unseen':>6} {'returned':>8} {'hangs':>5} {'crashes':>7} {'diverged':>8}"
    "  verdict"
)


def command(seed: int, lab: str | None, out: Path, given: argparse.Namespace) -> list[str]:
    """One run."""
    left_out = (*GRADIENT_FAULTS, *(LAB_FAULTS if lab is None else ()))
    faults = [name for name in FAULTS if name not in left_out]
    argv = [sys.executable, "-m", "p2pavg", "bench", "chaos", "--seed", str(seed), "--passes", str(PASSES)]
    argv += ["--peers", str(FEWEST + seed % (MOST - FEWEST + 1)), "--faults", ",".join(faults)]
    argv += ["--epochs", str(given.epochs), "--epoch-seconds", str(given.epoch_seconds)]
    argv += ["--fault-every", str(given.fault_every), "--json", str(figures_of(seed, out))]
    argv += ["--events", str(figures_of(seed, out).with_suffix(".jsonl"))]
    return argv + (["--lab", lab] if lab is not None else [])


def figures_of(seed: int, out: Path) -> Path:
    """Where the figures of a run stand."""
    return out / f"seed{seed}.json"


def play(seed: int, lab: str | None, given: argparse.Namespace) -> dict[str, Any]:
    """The row of one run: its figures, and the verdict."""
    file, peers = figures_of(seed, given.out), FEWEST + seed % (MOST - FEWEST + 1)
    row: dict[str, Any] = {"seed": seed, "peers": peers, "topology": lab}
    if not file.exists():
        argv = command(seed, lab, given.out, given)
        try:
            ended = subprocess.run(argv, capture_output=True, text=True, timeout=given.minutes * 60)
        except subprocess.TimeoutExpired:
            return row | {"verdict": f"void: not over after {given.minutes:g} minutes"}
        if not file.exists():
            return row | {"verdict": f"void: {(ended.stderr.strip().splitlines() or ['no word'])[-1]}"}
    found = json.loads(file.read_text())
    told = [json.loads(line) for line in file.with_suffix(".jsonl").read_text().splitlines()]
    row |= {name: found[name] for name in (*COUNTS, *HARM, "indices_returned", "faults_injected")}
    row |= {"averages": found["epochs_finished"], "resumes": sum(e["t"] == "resume" for e in told)}
    row["faults"] = sorted({e["fault"] for e in told if e["t"] == "fault"})
    return row | {"verdict": verdict(row)}


def verdict(row: Mapping[str, Any]) -> str:
    """In words. A run that ended too early shows nothing about its passes."""
    if row["crashes"] or row["divergences"] or row["indices_doubled"] or row["averages_misnamed"]:
        return "BROKEN"
    if row["hangs"] and row["indices_missing"]:
        return "void: a peer said nothing for a minute"
    if not is_exact(row):
        return "BROKEN"
    if row["resumes"] < RESUMES:
        return f"void: {row['resumes']} resumes"
    return "exact" if not row["hangs"] else "exact; a peer took too long to end"


def line(row: Mapping[str, Any]) -> str:
    """A row as text."""
    columns = ("averages", "faults_injected", *COUNTS, "indices_returned", "hangs", "crashes", "divergences")
    widths = (8, 6, 7, 7, 8, 6, 6, 8, 5, 7, 8)
    cells = " ".join(f"{row.get(name, '-'):>{width}}" for name, width in zip(columns, widths, strict=True))
    return f"{row['seed']:>4} {row['peers']:>5} {row['topology'] or 'loopback':>9} {cells}  {row['verdict']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", default="0:20", help="first:last, the last not included (default 0:20)")
    parser.add_argument("--out", type=Path, default=Path("out/once"), help="folder of events and figures")
    parser.add_argument("--loopback", action="store_true", help="without network namespaces")
    parser.add_argument("--epochs", type=positive_int, default=40, help="about so many for all passes")
    parser.add_argument("--epoch-seconds", type=at_least(0.001), default=0.5)
    parser.add_argument("--fault-every", type=at_least(0.1), default=2.0)
    parser.add_argument("--minutes", type=at_least(0.1), default=8.0, help="after which a run is void")
    parser.add_argument("--json", type=Path, help="write the rows here")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    first, last = map(int, given.seeds.split(":"))
    rows = []
    print(HEAD, flush=True)
    for seed in range(first, last):
        rows.append(play(seed, None if given.loopback else LAB, given))
        print(line(rows[-1]), flush=True)
    exact = sum(row["verdict"].startswith("exact") for row in rows)
    void = sum(row["verdict"].startswith("void") for row in rows)
    print(f"{exact} of {len(rows)} runs exact, {void} void, {len(rows) - exact - void} broken")
    if given.json is not None:
        told = {"passes": PASSES, "exact": exact, "void": void, "runs": rows, "environment": environment()}
        given.json.write_text(json.dumps(told, indent=1) + "\n")
    return int(exact + void < len(rows))


if __name__ == "__main__":
    sys.exit(main())
