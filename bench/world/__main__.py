"""`python -m bench.world`: the command line."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import time
from pathlib import Path

from bench.world.faults import QUIET_S, Faults, schedule
from bench.world.foresee import foresee
from bench.world.page import write
from bench.world.run import TICK_S, World
from bench.world.session import as_nice_as_this
from bench.world_check.__main__ import check
from p2pavg.errors import P2PAvgError

PICTURES = (0.2, 0.5, 0.9)  # shares of the run


def main() -> int:
    """Run, judge, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.world", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the faults and of the data's order")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--gradients", action="store_true", help="average gradients, on the spot peers alone")
    parser.add_argument("--lightning", action="store_true", help="the script is Lightning's Trainer's")
    parser.add_argument("--fault-every", type=float, default=30.0, help="seconds; 0: none (default 30)")
    parser.add_argument("--out", type=Path, default=Path("out/world"), help="where logs and page go")
    parser.add_argument("--no-replay", action="store_true", help="leave out the losses of one process")
    args = parser.parse_args()
    as_nice_as_this()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    folder = args.out.resolve()
    seconds = 60 * args.minutes
    try:
        with World(folder, seed=args.seed, gradients=args.gradients, lightning=args.lightning) as world:
            world.camera.begin()
            world.begin()
            faults = Faults(world, seed=args.seed, seconds=seconds, every=args.fault_every)
            began = time.monotonic()
            due = [began + share * seconds for share in PICTURES]
            foreseen = False
            while (now := time.monotonic()) < began + seconds:
                if not foreseen and now >= began + QUIET_S - 2.0:
                    foreseen = True
                    foresee(world, schedule(args.seed, seconds, args.fault_every), seconds)
                faults.tick(now)
                if due and now >= due[0]:
                    due.pop(0)
                    world.camera.shoot()
                world.hear(TICK_S)
                world.retry()
            faults.end()
            world.finish()
            world.camera.end()
    except P2PAvgError as error:
        print(f"world: {error}", file=sys.stderr)
        return 1
    verdict = check(folder, replay=not args.no_replay)
    (folder / "verdict.json").write_text(json.dumps(verdict, indent=1) + "\n")
    page = write(folder, verdict, shlex.join(["python", "-m", "bench.world", *sys.argv[1:]]))
    broken = ", ".join(verdict["broken"]) or "nothing"
    print(f"{verdict['faults']} faults, {verdict['averages']} averages; broken: {broken}. See {page}")
    if verdict["void"]:
        print(f"VOID as a measurement of time: {verdict['void']}")
    return 1 if verdict["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
