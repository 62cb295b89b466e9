"""The tables of README.md and of four pages of docs: `python -m bench.tables [--check]`.

A table stands between `<!-- numbers: NAME -->` and `<!-- end -->`; the words around it are written by hand.
To renew a figure, run its script with --json bench/results/FILE and then this one. `p2pavg bench VERB` goes
into VERB.json or VERB_WHAT.json, `bench.versus` into versus.json, `bench.plans` into plans.json, the
summary.json that `make demo` leaves in out/demo into demo.json; `bench.world.summary` writes world.json. A
result that is not there leaves out its rows. --check changes nothing and fails when a page differs from the
results.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable

from bench.tables.devices import cpu_kernels, gpu_epochs, gpu_kernels, gpu_models, gpu_outer
from bench.tables.joining import joining
from bench.tables.networks import beside, lab_truth, line_rate, pump_loopback, versus
from bench.tables.plans import plans
from bench.tables.readme import readme
from bench.tables.results import ROOT
from bench.tables.scenarios import scenarios
from bench.tables.swarms import faults, same_training, security
from bench.tables.verbs import benches, idle, others
from bench.tables.world import world, world_first, world_others

PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / name for name in ("forecast.md", "numbers.md", "topologies.md", "world.md")),
)
PLACE = re.compile(r"(<!-- numbers: ([a-z_]+) -->\n).*?(<!-- end -->)", re.DOTALL)

TABLES: dict[str, Callable[[], str]] = {
    "readme": readme,
    "same_training": same_training,
    "gpu_kernels": gpu_kernels,
    "pump_loopback": pump_loopback,
    "gpu_models": gpu_models,
    "gpu_epochs": gpu_epochs,
    "gpu_outer": gpu_outer,
    "cpu_kernels": cpu_kernels,
    "lab_truth": lab_truth,
    "line_rate": line_rate,
    "versus": versus,
    "beside": beside,
    "plans": plans,
    "security": security,
    "benches": benches,
    "joining": joining,
    "idle": idle,
    "faults": faults,
    "others": others,
    "scenarios": scenarios,
    "world": world,
    "world_first": world_first,
    "world_others": world_others,
}


def render(page: str) -> str:
    """The page with its tables made anew."""
    return PLACE.sub(lambda place: f"{place[1]}\n{TABLES[place[2]]()}\n{place[3]}", page)


def render_all() -> None:
    """Write the pages."""
    for path in PAGES:
        if (page := path.read_text()) != (made := render(page)):
            path.write_text(made)


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing, fail when a page is not up to date"
    )
    args = parser.parse_args()
    stale = [path for path in PAGES if render(path.read_text()) != path.read_text()]
    if args.check:
        for path in stale:
            print(
                f"{path.relative_to(ROOT)} differs from bench/results; run python -m bench.tables",
                file=sys.stderr,
            )
        return 1 if stale else 0
    render_all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
