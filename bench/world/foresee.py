"""What `p2pavg predict` says of a run after its quiet beginning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.world.run import World

PRICES = "prices.toml"


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


def foresee(world: World) -> None:
    """Write predict.json, from the reports so far; nobody waits for it."""
    folder: Path = world.folder
    (folder / PRICES).write_text(_prices(world))
    reports = sorted(str(path) for path in folder.glob("*.reports.jsonl"))
    world.note("predicted", epoch=world.epoch())
    argv = [sys.executable, "-m", "p2pavg", "predict", "--from", *reports, "--prices", str(folder / PRICES)]
    with (folder / "predict.log").open("wb") as log:
        subprocess.Popen(
            [*argv, "--json", str(folder / "predict.json")], stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
