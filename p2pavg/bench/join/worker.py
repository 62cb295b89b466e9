"""One peer of `bench join`: a donor that trains, or a newcomer."""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np

from p2pavg.bench.allreduce.worker import peak, peak_reset
from p2pavg.bench.toy import Epoch, ToyTrainer
from p2pavg.bench.workers import serve, start_peer
from p2pavg.errors import ClosedError

POLL_S = 0.01


class JoiningWorker:
    """The worker's commands."""

    def _build(self, config: dict[str, Any]) -> None:
        self.applied: list[dict[str, Any]] = []
        extra = np.random.default_rng(3).integers(0, 256, config["extra_bytes"], np.uint8)
        extra[len(extra) - min(len(extra), config["zero_bytes"]) :] = 0
        self.began = time.monotonic()
        self.peer = start_peer("bench-join", config, compression=config["compression"])
        self.trainer = ToyTrainer.of(
            self.peer, config, numel=config["numel"], on_epoch=self._on_epoch, extra=extra, noise=True
        )

    def _on_epoch(self, epoch: Epoch) -> None:
        report = epoch.report
        self.applied.append(
            {
                "epoch": epoch.epoch,
                "at": time.monotonic(),
                "parameters": epoch.parameters,
                "local_samples": 0 if report is None else report.local_samples,
                "counted_at": epoch.counted_at,
                "bytes_sent": 0 if report is None else report.bytes_sent,
                "bytes_received": 0 if report is None else report.bytes_received,
            }
        )

    def start(self, config: dict[str, Any]) -> dict[str, Any]:
        """A donor joins."""
        self._build(config)
        return {"address": self.peer.address}

    def train_on(self, command: dict[str, Any]) -> dict[str, Any]:
        """A donor trains until it is told to stop; the answer comes after some epochs."""
        goal = self.trainer.session.epoch + command["epochs"]
        self._halt = False
        threading.Thread(target=self._train_on, daemon=True).start()
        while self.trainer.session.epoch < goal:
            time.sleep(POLL_S)
        self.memory = peak_reset()
        return {}

    def _train_on(self) -> None:
        with suppress(ClosedError):  # the bench is over
            while not self._halt:
                self.trainer.step()

    def stop(self, command: dict[str, Any]) -> dict[str, Any]:
        """A donor stops: the epochs it applied, and the most memory it used since the newcomer came."""
        self._halt = True
        return {"extra_memory_bytes": max(0, peak() - self.memory), "applied": list(self.applied)}

    def join(self, config: dict[str, Any]) -> dict[str, Any]:
        """A newcomer joins and trains a little; it says once when half of the state has arrived."""
        arrivals: list[tuple[float, int]] = []
        threading.Thread(target=self._follow, args=(arrivals, config["say_half"]), daemon=True).start()
        self._build(config)
        while self.peer.joined is None:  # a download that failed begins anew at a boundary
            self.trainer.step()
        in_at, joined, received = time.monotonic(), self.peer.joined, self.peer.received_bytes
        trainer = self.trainer
        contributed = 0
        while contributed < config["after_epochs"]:
            trainer.step()
            contributed = sum(e["local_samples"] > 0 for e in self.applied)
        self._halt = False
        threading.Thread(target=self._train_on, daemon=True).start()  # others may still join
        progress = self.peer.download
        assert progress is not None
        assert joined is not None
        return {
            "began": self.began,
            "asked_at": in_at - joined.seconds,
            "in_at": in_at,
            "result_bytes": joined.result_bytes,
            "results": joined.results,
            "received_bytes": received,
            "loaded_at": trainer.loaded_at,
            "state_bytes": progress[1],
            "donors": progress[2],
            "arrivals": arrivals,
            "applied": list(self.applied),
        }

    def _follow(self, arrivals: list[tuple[float, int]], say_half: bool) -> None:
        told = not say_half
        done = False
        while not done:
            time.sleep(POLL_S)
            progress = self.peer.download if hasattr(self, "peer") else None
            if progress is None:
                continue
            done = progress[0] >= progress[1]
            arrivals.append((time.monotonic(), progress[0]))
            if not told and progress[0] >= progress[1] / 2:
                told = True
                sys.stdout.write(json.dumps({"half": True}) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    worker = JoiningWorker()
    sys.exit(serve(worker.start, worker.train_on, worker.stop, worker.join))
