"""What `p2pavg predict` says of a run after its quiet beginning."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.world import who
from bench.world.faults import Planned
from bench.world.run import World
from p2pavg.rounds.machine.rules.deadlines import MOST_BEHIND

PRICES = "prices.toml"
ABSENCES = ("stop", "sleep", "cut", "cut-one-way")


def _prices(world: World) -> str:
    lines = ["[peer_hour]", "default = 0.0"]
    lines += [f'"{p.region}" = {p.dollars_per_hour}' for p in world.places if p.dollars_per_hour]
    lines += ["", "[gb]", "host = 0.0", "zone = 0.0", "region = 0.0", "continent = 0.0", "world = 0.0"]
    for place in world.places:
        if place.dollars_per_gb:
            others = {other.region for other in world.places if other.region != place.region}
            lines += ["", f'[egress."{place.region}"]']
            lines += [f'"{other}" = {place.dollars_per_gb}' for other in sorted(others)]
    return "\n".join(lines) + "\n"


def joins(planned: Sequence[Planned], epoch_s: float) -> int:
    """How many of these faults end with a peer that needs the state: a process begins anew, or has missed
    more averages than members keep the results of.
    """
    longest = (MOST_BEHIND + 1) * epoch_s
    return sum(
        fault.kind in ("kill", "spot") or (fault.kind in ABSENCES and fault.seconds > longest)
        for fault in planned
    )


def foresee(world: World, planned: Sequence[Planned], seconds: float) -> None:
    """Write predict.json, from the reports so far and the joins that are to come; nobody waits for it."""
    folder: Path = world.folder
    (folder / PRICES).write_text(_prices(world))
    reports = sorted(str(path) for path in folder.glob("*.reports.jsonl"))
    steps = who.GRADIENT_STEPS if world.gradients else who.LOCAL_STEPS
    coming = joins(planned, steps * who.PACE_S)
    world.note("predicted", epoch=world.epoch(), joins=coming)
    argv = [sys.executable, "-m", "p2pavg", "predict", "--from", *reports, "--prices", str(folder / PRICES)]
    argv += ["--joins-per-hour", str(3600 * coming / seconds)] if coming else []
    with (folder / "predict.log").open("wb") as log:
        subprocess.Popen(
            [*argv, "--json", str(folder / "predict.json")], stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
