"""One peer of `bench rounds`."""

from __future__ import annotations

import sys
from typing import Any

from p2pavg.bench.toy import Epoch, ToyTrainer
from p2pavg.bench.workers import serve, start_peer

NUMEL = 4096


class Rounds:
    """The worker's commands."""

    def start(self, config: dict[str, Any]) -> dict[str, Any]:
        """Join the swarm."""
        self.config = config
        self.epochs: list[Epoch] = []
        self.peer = start_peer(
            "bench-rounds", config, client_only=config.get("client_only", False), compression="none"
        )
        self.trainer = ToyTrainer.of(self.peer, config, numel=NUMEL, on_epoch=self.epochs.append)
        return {"address": self.peer.address}

    def train(self, command: dict[str, Any]) -> dict[str, Any]:
        """Train all epochs."""
        while self.trainer.session.epoch < self.config["epochs"]:
            self.trainer.step()
        rows = []
        for epoch in self.epochs[1:]:
            report = epoch.report
            if report is not None:
                rows.append(
                    {
                        "epoch": epoch.epoch,
                        "counted_at": epoch.counted_at,
                        "first_byte_at": report.first_byte_at,
                        "commit": report.seconds_commit,
                        "attempts": report.attempts,
                        "members": len(report.members),
                        "wrong": epoch.wrong,
                    }
                )
        return {"epochs": rows}


if __name__ == "__main__":
    worker = Rounds()
    sys.exit(serve(worker.start, worker.train))
