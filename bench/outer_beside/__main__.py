"""Outer steps beside torchft's DiLoCo: two peers, the same model, local steps, seeds and samples.

    python -m venv /tmp/torchft && /tmp/torchft/bin/pip install torchft numpy
    python -m bench.outer_beside --torchft /tmp/torchft/bin/python --json bench/results/outer_beside.json

loss: both train on loopback, with the same outer optimizer, without compression.
lab: nothing is learned; over 100 Mb/s and 100 ms, the seconds of an outer step and the bytes that a peer
sends.
kill: one of the two is killed (SIGKILL) between two averages: the longest step() of the other one from then
on, the seconds until its next outer step, and the local steps that it lost.

A section that is not measured now stays in the file as it was.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.outer_bars import spread
from p2pavg.bench.options import positive_int
from p2pavg.bench.outer.pace import Pace
from p2pavg.bench.result import add_section_options, emit_sections
from p2pavg.bench.workers import WorkerError, Workers

HERE = Path(__file__).resolve()
HOMES = str(HERE.parents[1] / "two_homes.toml")
THEIRS = str(HERE.parent / "workers" / "torchft_worker.py")
OURS = "p2pavg.bench.outer.worker"
DEADLINE_S = 600.0
BATCH = 8
Figures = dict[str, Any]


class System:
    """Two peers of p2pavg with some codec, or of torchft."""

    def __init__(self, args: argparse.Namespace, compression: str | None = None) -> None:
        """compression: of p2pavg's outer steps; None: these are torchft's."""
        self.args = args
        self.compression = compression
        self.name = "torchft" if compression is None else f"p2pavg_{compression}"

    def workers(self, lab: str | None = None) -> Workers:
        if self.compression is not None:
            return Workers(2, OURS, topology=lab)
        path = f"{HERE.parents[2]}:{os.environ.get('PYTHONPATH', '')}"
        # It asks for the names of addresses, and a lab's hosts have nobody who knows them.
        environment = {"PYTHONPATH": path, "RES_OPTIONS": "timeout:1 attempts:1"}
        return Workers(2, "", topology=lab, environment=environment, argv=[self.args.torchft, THEIRS])

    def join(self, workers: Workers, folder: str, **job: Any) -> list[Figures]:
        """Both, and all that they need to know. job: `steps`, `compute` and what goes with it."""
        every, outer = self.args.every, {"lr": self.args.outer_lr, "momentum": self.args.momentum}
        common = {"batch": BATCH, "lr": self.args.lr, "step_seconds": 0.05, "seed": 0, **job}
        if self.compression is None:
            more = {"every": every, "outer_lr": outer["lr"], "momentum": outer["momentum"], "timeout": 10.0}
            begun = workers.join(**common, **more)
        else:
            pace = Path(folder, "pace")
            Pace.make(pace, 2)
            begun = workers.join(
                **common,
                run_id=f"beside-{job.get('seed', 0)}",
                target=BATCH * (2 * every - 1),  # all are due when the first has its last step
                compression=self.compression,
                outer=outer,
                feedback=True,
                streams=1,
                threads=1,
                pace=str(pace),
            )
        workers.all(deadline_s=DEADLINE_S, do="gather", peers=2)
        return begun


def trained(system: System, lab: str | None, epochs: int, **job: Any) -> list[Figures]:
    """The answers of two peers after so many outer steps; of the lab's bytes the first has "sent"."""
    with tempfile.TemporaryDirectory() as folder, system.workers(lab) as workers:
        begun = system.join(workers, folder, steps=epochs * system.args.every, **job)
        before = workers.lab.stats() if lab else None
        answers = workers.all(deadline_s=DEADLINE_S, do="train", epochs=epochs, peers=2)
        if before is not None:
            paths = workers.lab.stats().since(before).paths.values()
            answers[0]["sent"] = sum(path.sent_bytes for path in paths) / 2
        answers[0]["parameters"] = begun[0]["parameters"]
        workers.all(deadline_s=DEADLINE_S, do="leave")
    return answers


def loss(args: argparse.Namespace) -> Figures:
    figures: Figures = {}
    losses: dict[str, list[float]] = {}
    for system in (System(args), System(args, "none"), System(args, "int4")):
        found = [
            trained(system, None, args.outer_steps, compute="torch", params=args.params, seed=seed)
            for seed in range(args.seeds)
        ]
        losses[system.name] = [answers[0]["loss"] for answers in found]
        figures[f"{system.name}_loss"] = mean(losses[system.name])
        figures[f"{system.name}_equal"] = all(len({a["digest"] for a in answers}) == 1 for answers in found)
    for name in ("p2pavg_none", "p2pavg_int4"):
        above = [one / other - 1 for one, other in zip(losses[name], losses["torchft"], strict=True)]
        figures |= spread(f"{name}_loss_above_torchft", above)
    return figures


def lab(args: argparse.Namespace) -> Figures:
    figures: Figures = {}
    for system in (System(args), System(args, "none"), System(args, "int8"), System(args, "int4")):
        rounds = 4
        answers = trained(system, HOMES, rounds, compute="sleep", params=args.sent_params)
        waited = [(answer["seconds"] - answer["computing"]) / rounds for answer in answers]
        figures[f"{system.name}_outer_step_s"] = max(waited)
        figures[f"{system.name}_bytes_per_value"] = answers[0]["sent"] / rounds / answers[0]["parameters"]
    return figures


def kill(args: argparse.Namespace) -> Figures:
    """With steps of 50 ms, of a small vector; struck in the midst of the local steps."""
    figures: Figures = {}
    for system in (System(args), System(args, "none")):
        rows = [one_kill(system, args) for _ in range(args.kills)]
        figures[f"{system.name}_after_kill"] = rows
        for key in ("blocked_s", "outer_step_s", "lost_steps"):
            figures[f"{system.name}_after_kill_{key}"] = median(row[key] for row in rows)
    return figures


def one_kill(system: System, args: argparse.Namespace) -> Figures:
    epochs, before = 8, 4
    usual = 0.05 * args.every
    with tempfile.TemporaryDirectory() as folder, system.workers() as workers:
        system.join(workers, folder, steps=10**6, compute="sleep", params=100_000)
        killed = threading.Event()
        at: list[float] = []

        def strike() -> None:
            if not killed.wait((before + 0.5) * usual):
                at.append(time.monotonic())
                workers.workers[1].process.kill()

        for worker in workers.workers:
            worker.send(do="train", epochs=epochs, peers=2)
        thread = threading.Thread(target=strike)
        thread.start()
        try:
            answer = workers.workers[0].receive(DEADLINE_S)
        finally:
            killed.set()
            thread.join()
    if not at:
        raise WorkerError("the run was over before the kill")
    failed = sum(members == 0 for _, members in answer["commits"])
    lost = args.every * failed if system.compression is None else answer["discarded"] / BATCH
    return {
        "blocked_s": max((seconds for end, seconds in answer["waits"] if end > at[0]), default=0.0),
        "outer_step_s": min(end for end, members in answer["commits"] if members and end > at[0]) - at[0],
        "lost_steps": lost,
    }


SECTIONS = {"loss": loss, "lab": lab, "kill": kill}


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--torchft", metavar="PYTHON", required=True, help="an interpreter that has torchft")
    add_section_options(parser, SECTIONS)
    parser.add_argument("--seeds", type=positive_int, default=3)
    parser.add_argument("--params", type=positive_int, default=30_000, help="of the model that learns")
    parser.add_argument("--sent-params", type=positive_int, default=2_000_000, help="of the one in the lab")
    parser.add_argument("--every", type=positive_int, default=30, metavar="H", help="local steps")
    parser.add_argument("--outer-steps", type=positive_int, default=20)
    parser.add_argument("--kills", type=positive_int, default=3)
    parser.add_argument("--lr", type=float, default=1e-2, help="of the local steps")
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--momentum", type=float, default=0.9)
    args = parser.parse_args()
    return emit_sections(args, SECTIONS)


if __name__ == "__main__":
    sys.exit(main())
