"""Others in the places of `bench.world`, and p2pavg beside them: `python -m bench.world.others`.

`--hivemind PYTHON`: one that has hivemind, torch and transformers installed; `--torchft PYTHON`: torchft
instead. Each system trains the run's model with a plain loop on the six machines of world.toml, without a
fault; then one peer that others can dial is killed. torchft, whose replicas dial each other, does the same
once more with the three that others can dial alone. What is told comes from the scripts' own logs, and from
what Hivemind says of its rounds. A system that fails is told with its reason, and the next one has its turn.
What is not played now stays in the file of --json as it was.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.world import who
from bench.world.model import BATCH
from bench.world.run import ROOT
from bench.world.session import as_nice_as_this
from p2pavg.bench.result import add_output_options, keep
from p2pavg.bench.workers import Worker
from p2pavg.errors import P2PAvgError
from p2pavg.lab import Lab

START_S = 120.0  # until a peer is in the run, or is counted as one that cannot be
AVERAGED = re.compile(rb"[Aa]veraged \w+ with (\d+) peers")
VICTIM = "campus"
SYSTEMS = {  # whose Python, and where
    "hivemind": who.PLACES,
    "torchft": who.PLACES,
    "torchft, without the homes": tuple(place for place in who.PLACES if place.public),
    "p2pavg": who.PLACES,
}
ACCOUNT = (
    *("joined", "samples", "epochs", "longest_step_s", "epochs_after_kill", "longest_step_after_kill_s"),
    *("averaged_with", "failed_steps"),
)


class Place:
    """One machine's process."""

    def __init__(self, lab: Lab, folder: Path, python: str, name: str, config: dict[str, Any]) -> None:
        self.log = folder / f"{name}.jsonl"
        self.errors = folder / f"{name}.err"
        (folder / name).mkdir()
        home = {"HOME": str(folder / name), "XDG_CONFIG_HOME": str(folder / name / "config")}
        # torchft asks for the names of addresses, and a lab's hosts have nobody who knows them.
        env = {**os.environ, **home, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env |= {"RES_OPTIONS": "timeout:1 attempts:1", "HF_HUB_OFFLINE": "1"}
        argv = [python, "-m", "bench.world.other_trainer", json.dumps({**config, "log": str(self.log)})]
        with self.errors.open("wb") as errors:
            self.process = lab.spawn(
                name, argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )

    def address(self) -> str:
        """Where others reach it, as it says itself. Raises WorkerError when it ends, or does not say so."""
        return str(Worker(0, self.process).receive(START_S)["address"])

    def events(self) -> list[dict[str, Any]]:
        """What it has written down; none when it never came so far."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def end(self) -> None:
        """Let it say how it ended, and end it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20.0)
        except subprocess.TimeoutExpired:
            self.process.kill()


def _account(place: Place, killed_at: float) -> dict[str, Any]:
    """Of one peer, before and after the kill."""
    events = place.events()
    steps = [event for event in events if event["t"] == "step"]
    before = [step for step in steps if step["at"] <= killed_at]
    after = [step for step in steps if step["at"] > killed_at]
    told = [int(found[1]) for found in AVERAGED.finditer(place.errors.read_bytes())]
    groups = Counter(told or [event["peers"] for event in events if event["t"] == "theta"])
    failed = [event["why"] for event in events if event["t"] == "failed"]
    return {
        "joined": bool(events),
        "samples": BATCH * len(before),
        "epochs": sum(event["t"] == "theta" and event["at"] <= killed_at for event in events),
        "epochs_after_kill": sum(event["t"] == "theta" and event["at"] > killed_at for event in events),
        "longest_step_s": max((step["seconds"] for step in before), default=0.0),
        "longest_step_after_kill_s": max((step["seconds"] for step in after), default=0.0),
        "seconds_in_steps": round(sum(step["seconds"] for step in before), 2),
        "averaged_with": {str(size): groups[size] for size in sorted(groups)},
        "failed_steps": len(failed),
        "failed_why": failed[-1] if failed else None,
        "last_words": None if events else place.errors.read_text(errors="replace")[-300:],
        "loss": next((event["loss"] for event in events if event["t"] == "end"), None),
    }


def _equal(places: dict[str, Place]) -> dict[str, int]:
    """After how many averages all that told of one held the same parameters."""
    told: dict[int, list[str]] = defaultdict(list)
    for place in places.values():
        for event in place.events():
            if event["t"] == "theta":
                told[event["epoch"]].append(event["sha256"])
    several = [found for found in told.values() if len(found) > 1]
    return {"averages": len(several), "of_equal_parameters": sum(len(set(found)) == 1 for found in several)}


def play(
    system: str, python: str, folder: Path, seconds: float, after: float, chosen: Sequence[who.Place]
) -> dict[str, Any]:
    """One system's run in these places. seconds: without a fault; after: from the kill to the end."""
    folder.mkdir(parents=True)
    target = int(who.LOCAL_STEPS * BATCH * who.speed(tuple(chosen)))
    with Lab(who.TOPOLOGY) as lab:
        common = {
            "system": system, "target": target, "port": who.PORT, "overlap": who.OVERLAP,
            "interface": "wan0",
        }  # fmt: skip
        host = lab.address(who.BOOTSTRAP)
        way_in = f"{host}:{who.PORT}"
        if system == "p2pavg":
            argv = ["bootstrap", "--listen", f"0.0.0.0:{who.PORT}", "--run", who.RUN]
            env = {**os.environ, "HOME": str(folder), "PYTHONPATH": str(ROOT)}
            lab.spawn(who.BOOTSTRAP, [python, "-m", "p2pavg", *argv], env=env, stdout=subprocess.DEVNULL)
        else:
            config = {**common, "bootstrap": True, "host": host}
            way_in = Place(lab, folder, python, who.BOOTSTRAP, config).address()
        places = {
            place.name: Place(
                lab, folder, python, place.name,
                {
                    **common, "bootstrap": False, "host": lab.address(place.name), "rank": rank,
                    "initial_peers": [way_in], "public": place.public,
                    "pace_s": who.PACE_S * place.slowness,
                    "every": round(who.LOCAL_STEPS / place.slowness),
                },
            )
            for rank, place in enumerate(chosen)
        }  # fmt: skip
        end = time.monotonic() + START_S
        while time.monotonic() < end and not all(place.log.exists() for place in places.values()):
            time.sleep(0.5)
        began = time.monotonic()
        time.sleep(seconds)
        places[VICTIM].process.kill()
        killed_at = time.monotonic()
        time.sleep(after)
        for place in places.values():
            place.end()
        void = lab.void_reason()
    peers = {name: _account(place, killed_at) for name, place in places.items()}
    living = [account for name, account in peers.items() if name != VICTIM]
    epochs = statistics.median(account["epochs"] for account in living)
    return {
        "void": void,
        "seconds": round(killed_at - began, 1),
        "peers": peers,
        "samples_per_second": round(sum(a["samples"] for a in peers.values()) / (killed_at - began), 2),
        "longest_step_after_kill_s": max(account["longest_step_after_kill_s"] for account in living),
        "epochs": epochs,
        "epochs_after_kill": statistics.median(account["epochs_after_kill"] for account in living),
        **_equal(places),
    }


def main() -> int:
    """Play all, and write after each what came of it."""
    parser = argparse.ArgumentParser(prog="python -m bench.world.others", description=__doc__)
    parser.add_argument("--hivemind", help="a Python that has hivemind, torch and transformers installed")
    parser.add_argument("--torchft", help="a Python that has torchft, torch and transformers installed")
    parser.add_argument("--seconds", type=float, default=180.0, help="before the kill (default 180)")
    parser.add_argument("--after", type=float, default=120.0, help="from the kill to the end (default 120)")
    parser.add_argument("--out", type=Path, default=Path("out/others"), help="where the logs go")
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="SYSTEM")
    add_output_options(parser, plot=False)
    args = parser.parse_args()
    as_nice_as_this()
    shutil.rmtree(args.out, ignore_errors=True)
    path = Path(args.json) if args.json not in (None, "-") else None
    found: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {}
    found = {"victim": VICTIM} | {name: found[name] for name in SYSTEMS if name in found}
    pythons = {"hivemind": args.hivemind, "torchft": args.torchft, "p2pavg": sys.executable}
    for name in args.only:
        system = name.partition(",")[0]
        if not (python := pythons[system]):
            continue
        folder = args.out.resolve() / name.replace(", ", "-").replace(" ", "-")
        try:
            found[name] = play(system, python, folder, args.seconds, args.after, SYSTEMS[name])
        except (P2PAvgError, OSError, ValueError) as error:
            found[name] = {"failed": str(error)}
        keep(args, found)
        for peer, account in found[name].get("peers", {}).items():
            print(name, peer, *(f"{key} {account[key]}" for key in ACCOUNT), flush=True)
        if "failed" in found[name]:
            print(f"{name} failed: {found[name]['failed']}; see {folder}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
