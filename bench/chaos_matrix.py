"""The long chaos runs, one after the other: `python -m bench.chaos_matrix --out DIR [NAME ...]`.

Each run writes NAME.jsonl (every event), NAME.json (what follows) and NAME.svg (peers, epochs, stalls)
into the folder, and prints its figures. Without names all runs that this machine can do are done: those with
`lab` need network namespaces. --list names them, --epochs shortens them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

KILLS = "kill,stop,leader,leader-proposed,leader-begun,leader-done,leader-committed,all-but-one,join"
LOOPBACK = f"{KILLS},corrupt,duplicate"
EPOCH_S = 0.5
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Run:
    """One line of the matrix."""

    name: str
    faults: str
    seed: int = 0
    peers: int = 5
    epochs: int = 500
    fault_every: float = 2.0
    lab: str | None = None

    def command(self, out: Path, epochs: int | None) -> list[str]:
        """What `p2pavg bench chaos` is given."""
        argv = [sys.executable, "-m", "p2pavg", "bench", "chaos", "--faults", self.faults]
        argv += ["--seed", str(self.seed), "--peers", str(self.peers)]
        argv += ["--epochs", str(epochs or self.epochs), "--epoch-seconds", str(EPOCH_S)]
        argv += ["--fault-every", str(self.fault_every)]
        argv += ["--events", str(out / f"{self.name}.jsonl")]
        argv += ["--json", str(out / f"{self.name}.json"), "--plot", str(out / f"{self.name}.svg")]
        return argv + (["--lab", self.lab] if self.lab else [])


RUNS = (
    *(Run(f"loopback-seed{seed}", LOOPBACK, seed) for seed in range(3)),
    *(Run(f"lab-seed{seed}", f"{LOOPBACK},cut,cut-one-way,slow", seed, lab="six-100ms") for seed in range(3)),
    Run("loopback-kill", "kill,join", epochs=200),
    Run("loopback-leader", KILLS.replace("kill,stop,", "").replace("all-but-one,", ""), epochs=200),
    Run("loopback-stop", "stop", epochs=200),
    Run("loopback-corrupt", "corrupt,duplicate", epochs=200),
    Run("lab-kill", "kill,join", epochs=200, lab="six-100ms"),
    Run("lab-stop", "stop", epochs=200, lab="six-100ms"),
    Run("lab-cut", "cut", epochs=200, fault_every=12.0, lab="six-100ms"),
    Run("lab-cut-one-way", "cut-one-way", epochs=200, fault_every=12.0, lab="six-100ms"),
    Run("lab-slow", "slow", epochs=200, fault_every=12.0, lab="six-100ms"),
    Run("lab-corrupt", "corrupt", epochs=200, fault_every=12.0, lab="six-100ms"),
    Run("rare-faults", "kill", epochs=600, fault_every=30.0),
    Run("soak", "stop,kill,join,corrupt,leader", peers=4, epochs=3600, fault_every=5.0),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs (default: all)")
    parser.add_argument("--out", type=Path, default=Path("out/chaos"))
    parser.add_argument("--epochs", type=int, help="of each run, instead of its own")
    parser.add_argument("--list", action="store_true", help="name the runs and what they break")
    given = parser.parse_args()
    if given.list:
        for run in RUNS:
            print(f"{run.name:20} {run.epochs:5} epochs, every {run.fault_every:g} s one of {run.faults}")
        return 0
    known = {run.name: run for run in RUNS}
    unknown = [name for name in given.names if name not in known]
    if unknown:
        parser.error(f"there is no run {unknown[0]!r}; --list names them")
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    worst, summary = 0, {}
    for run in [known[name] for name in given.names] or RUNS:
        print(f"{run.name}:", flush=True)
        code = subprocess.run(run.command(out, given.epochs), cwd=ROOT, check=False).returncode
        worst = max(worst, code)
        summary[run.name] = "kept all promises" if code == 0 else "BROKE A PROMISE, or did not run"
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    for name, verdict in summary.items():
        print(f"{name:20} {verdict}")
    return worst


if __name__ == "__main__":
    sys.exit(main())
