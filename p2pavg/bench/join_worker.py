"""One peer of `bench join`: a donor that trains, or a newcomer."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from p2pavg.bench.allreduce_worker import peak, peak_reset
from p2pavg.bench.toy import Epoch, ToyTrainer
from p2pavg.bench.workers import serve
from p2pavg.peer import Peer

POLL_S = 0.02


class Joining:
    """The worker's commands."""

    def _build(self, config: dict[str, Any]) -> None:
        self.applied: list[dict[str, Any]] = []
        self.began = time.monotonic()
        host = os.environ.get("P2PAVG_LAB_ADDRESS", "127.0.0.1")
        self.peer = Peer(
            "bench-join", initial_peers=config["initial_peers"], listen=f"{host}:0", compression="fp16"
        ).start()
        self.trainer = ToyTrainer(
            self.peer,
            target=config["target"],
            samples_per_step=1,
            step_seconds=config["step_seconds"],
            numel=config["numel"],
            on_epoch=self._on_epoch,
            extra_bytes=config["extra_bytes"],
        )

    def _on_epoch(self, epoch: Epoch) -> None:
        report = epoch.report
        self.applied.append(
            {
                "epoch": epoch.epoch,
                "at": time.monotonic(),
                "parameters": epoch.parameters,
                "local_samples": 0 if report is None else report.local_samples,
            }
        )

    def start(self, config: dict[str, Any]) -> dict[str, Any]:
        """A donor joins."""
        self._build(config)
        return {"address": self.peer.address}

    def train(self, command: dict[str, Any]) -> dict[str, Any]:
        """A donor trains some epochs alone with the other donors: its samples/s before."""
        goal = self.trainer.session.epoch + command["epochs"]
        steps, start = 0, time.monotonic()
        while self.trainer.session.epoch < goal:
            self.trainer.step()
            steps += 1
        return {"sps": steps / (time.monotonic() - start)}

    def train_on(self, command: dict[str, Any]) -> dict[str, Any]:
        """A donor trains until the next command; the answer comes then."""
        self.memory = peak_reset()
        self.applied.clear()
        self._halt = False
        self._steps = 0
        self._since = time.monotonic()
        self._thread = threading.Thread(target=self._train_on, daemon=True)
        self._thread.start()
        return {}

    def _train_on(self) -> None:
        while not self._halt:
            self.trainer.step()
            self._steps += 1

    def stop(self, command: dict[str, Any]) -> dict[str, Any]:
        """A donor stops: its samples/s meanwhile, and the most memory it used."""
        sps = self._steps / (time.monotonic() - self._since)
        self._halt = True
        return {
            "sps_during": sps,
            "extra_memory_bytes": max(0, peak() - self.memory),
            "applied": self.applied,
        }

    def join(self, config: dict[str, Any]) -> dict[str, Any]:
        """A newcomer joins and trains a little; says once when half of the state is there."""
        arrivals: list[tuple[float, int]] = []
        threading.Thread(target=self._follow, args=(arrivals, config["say_half"]), daemon=True).start()
        self._build(config)
        trainer = self.trainer
        contributed = 0
        while contributed < config["after_epochs"]:
            trainer.step()
            contributed = sum(e["local_samples"] > 0 for e in self.applied)
        progress = self.peer.download
        assert progress is not None
        first = next((at for at, size in arrivals if size), trainer.loaded_at)
        return {
            "seconds": trainer.loaded_at - self.began,
            "transfer_seconds": trainer.loaded_at - first,
            "state_bytes": progress[1],
            "donors": progress[2],
            "loaded_at": trainer.loaded_at,
            "arrivals": [(at - self.began, size) for at, size in arrivals],
            "applied": self.applied,
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
    worker = Joining()
    commands = (worker.start, worker.train, worker.train_on, worker.stop, worker.join)
    sys.exit(serve({command.__name__: command for command in commands}))
