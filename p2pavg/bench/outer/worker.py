"""One peer of `bench outer`."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from p2pavg.allreduce.feedback import Residual
from p2pavg.bench.outer.model import Language, Sleeper, factor
from p2pavg.bench.outer.pace import Pace
from p2pavg.bench.workers import own_host, serve
from p2pavg.optim.gradients.store import F32
from p2pavg.optim.optimizer import CollaborativeOptimizer
from p2pavg.optim.outer.settings import Outer
from p2pavg.optim.outer.update import OuterUpdate, counts
from p2pavg.report import RoundReport
from p2pavg.rounds.training import Average

REPORT_DEADLINE_S = 10.0
LONG_S = 0.05  # a step() that took so long is told


class Clock:
    """Sums the seconds of the inner optimizer's steps, whoever calls them."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.seconds = 0.0
        self._begun = 0.0
        inner.register_step_pre_hook(self._begin)
        inner.register_step_post_hook(self._end)

    def _begin(self, *_: object) -> None:
        self._begun = time.perf_counter()

    def _end(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._begun


def _lose(residual: Residual) -> None:
    """In the place of a commit: nothing is added to later contributions."""


def _take_all(update: OuterUpdate, average: Average) -> F32 | None:
    """In the place of `_taken`: what was not sent goes, too."""
    return update._moved if counts(average, update._own) else None


class OuterPeer:
    """The worker's commands."""

    def start(self, config: dict[str, Any]) -> dict[str, Any]:
        """Join the swarm, without outer steps where "outer" is null."""
        torch.set_num_threads(config["threads"])
        self._index = config["index"]
        self._pace_path: Path | None = None
        if not config["feedback"]:
            Residual.commit = _lose  # type: ignore[method-assign, assignment]
            OuterUpdate._taken = _take_all  # type: ignore[method-assign, assignment]
        if config["compute"] == "sleep":
            self.job: Language | Sleeper = Sleeper(config["params"], config["step_seconds"])
            inner: torch.optim.Optimizer = torch.optim.SGD(self.job.model.parameters(), lr=1e-3)
        else:
            first, streams = config["index"], config["streams"]
            self.job = Language(
                config["params"], config["batch"], config["seed"], range(first, first + streams)
            )
            inner = torch.optim.AdamW(
                self.job.model.parameters(), lr=config["lr"], weight_decay=0.01, fused=True
            )
            if config["pace"] is not None:
                self._pace_path = Path(config["pace"])
        self._inner, self._clock = inner, Clock(inner)
        self._reports: list[RoundReport] = []
        self._commits: list[tuple[float, int]] = []
        self._told = threading.Condition()
        steps = config["steps"]
        self.opt = CollaborativeOptimizer(
            inner,
            config["run_id"],
            config["target"],
            config["batch"] * config["streams"],
            initial_peers=config["initial_peers"],
            scheduler=LambdaLR(inner, lambda step: factor(step, steps)),
            compression=config["compression"],
            outer=None if config["outer"] is None else Outer(**config["outer"]),
            listen=f"{own_host()}:0",
            on_round=self._report,
        )
        parameters = sum(param.numel() for param in self.job.model.parameters())
        return {"address": self.opt.peer.address, "parameters": parameters}

    def _report(self, report: RoundReport) -> None:
        with self._told:
            self._reports.append(report)
            if report.members:
                self._commits.append((time.monotonic(), len(report.members)))
            self._told.notify()

    def _all_reports(self) -> list[RoundReport]:
        """The reports of all averages, once the callback, on another thread, has brought the last one."""
        last = self.opt.last_report
        with self._told:
            self._told.wait_for(lambda: last is None or last in self._reports, REPORT_DEADLINE_S)
            return [report for report in self._reports if report.members]

    def gather(self, command: dict[str, Any]) -> dict[str, Any]:
        """Wait until all others are linked."""
        self.opt.peer.wait_for_peers(command["peers"] - 1)
        return {}

    def train(self, command: dict[str, Any]) -> dict[str, Any]:
        """Train until the swarm's epoch is the one that the command names."""
        opt, computing, steps = self.opt, 0.0, 0
        pace = None if self._pace_path is None else Pace(self._pace_path, self._index, command["peers"])
        begun, inner = time.perf_counter(), self._clock.seconds
        waits: list[tuple[float, float]] = []  # when a long step() was over, and how long it took
        while opt.epoch < command["epochs"]:
            start = time.perf_counter()
            self.job.backward()
            computing += time.perf_counter() - start
            with nullcontext() if pace is None else pace.step():
                start = time.monotonic()
                opt.step()
                now = time.monotonic()
            if now - start > LONG_S:
                waits.append((now, now - start))
            opt.zero_grad()
            steps += 1
        if pace is not None:
            pace.end()
        seconds = time.perf_counter() - begun
        computing += self._clock.seconds - inner
        with opt.averaged():
            loss = self.job.loss()
            state = b"".join(param.detach().numpy().tobytes() for param in self.job.model.parameters())
        counted = self._all_reports()
        links = [link for report in counted for link in report.links]
        return {
            "loss": loss,
            "digest": hashlib.sha256(state).hexdigest(),
            "theta": {report.epoch: report.extra.get("theta_sha256_low") for report in counted},
            "steps": steps,
            "seconds": seconds,
            "computing": computing,
            "rounds": len(counted),
            "bytes": sum(link.bytes_sent for link in links),
            "wire_bytes": sum(link.wire_bytes_sent for link in links),
            "members": [len(report.members) for report in counted],
            "commits": self._commits,
            "waits": waits,
            "attempts": [report.attempts for report in counted],
            "discarded": sum(report.samples_discarded for report in counted),
        }

    def leave(self, command: dict[str, Any]) -> dict[str, Any]:
        """Close the optimizer."""
        self.opt.close()
        return {}


if __name__ == "__main__":
    peer = OuterPeer()
    sys.exit(serve(peer.start, peer.gather, peer.train, peer.leave))
