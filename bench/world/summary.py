"""What runs of `bench.world` came to, into the project's tables: `python -m bench.world.summary FOLDER...`.

Each folder is a run's, with its verdict.json. Writes bench/results/world.json (runs of other seeds stay),
the picture docs/world.png of the first folder, and the tables of README.md and docs/world.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from bench.tables.__main__ import render_all
from bench.tables.results import RESULTS, ROOT

LEFT_OUT = ("places", "sysctls")  # of what is known of a run before it begins


def entry(verdict: dict[str, Any]) -> dict[str, Any]:
    """Of one run what the tables need, and all figures."""
    run = {key: value for key, value in verdict["run"].items() if key not in LEFT_OUT}
    return {**verdict, "run": run}


def main() -> int:
    """Take the runs in."""
    parser = argparse.ArgumentParser(prog="python -m bench.world.summary", description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    args = parser.parse_args()
    verdicts = [json.loads((folder / "verdict.json").read_text()) for folder in args.folders]
    path = RESULTS / "world.json"
    kept = json.loads(path.read_text())["runs"] if path.exists() else []
    by_seed = {verdict["run"]["seed"]: entry(verdict) for verdict in [*kept, *verdicts]}
    path.write_text(json.dumps({"runs": [by_seed[seed] for seed in sorted(by_seed)]}, indent=1) + "\n")
    if pictures := sorted(args.folders[0].glob("page*.png")):
        shutil.copy(pictures[0], ROOT / "docs" / "world.png")
    render_all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
