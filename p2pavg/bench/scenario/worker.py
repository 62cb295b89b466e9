"""One peer of a replay: its calculation sleeps, its rounds are real."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from p2pavg.bench.workers import own_host, serve
from p2pavg.optim.optimizer import CollaborativeOptimizer

WARM_UP_EPOCHS = 1  # of delayed updates, without delay


class Sleeper:
    """The worker's commands."""

    def start(self, config: dict[str, Any]) -> dict[str, Any]:
        """Join the swarm with a vector of `values` elements."""
        torch.set_num_threads(1)
        random = torch.Generator().manual_seed(config["index"])  # gradients that no packing makes smaller
        self._param = torch.nn.Parameter(torch.zeros(config["values"]))
        self._grad = 1e-3 * torch.randn(config["values"], generator=random)
        mine = config["sleepers"][config["index"]]
        self._batch, self._seconds = mine["batch"], mine["step_seconds"]
        self._opt = CollaborativeOptimizer(
            torch.optim.SGD([self._param], lr=1e-4),
            config["run_id"],
            config["target"],
            self._batch,
            initial_peers=config["initial_peers"],
            compression=config["compression"],
            delay_updates=config["delayed"],
            delay_warmup_epochs=WARM_UP_EPOCHS,
            listen=f"{own_host()}:0",
            region=mine["region"],
        )
        return {"address": self._opt.peer.address, "peer": self._opt.peer.peer_id.hex()}

    def train(self, command: dict[str, Any]) -> dict[str, Any]:
        """Train until `epochs`."""
        opt = self._opt
        begun = time.monotonic()  # of the microbatch under way
        while opt.epoch < command["epochs"]:
            torch.autograd.backward([self._param], [self._grad])
            ends = begun + self._seconds
            time.sleep(max(0.0, ends - time.monotonic()))
            opt.step()
            opt.zero_grad()
            # An accelerator has its next microbatch in its queue already, unless the step waited for a round.
            begun = time.monotonic() if opt.stepped else max(ends, time.monotonic() - self._seconds)
        return {"epoch": opt.epoch}

    def leave(self, command: dict[str, Any]) -> dict[str, Any]:
        """Close the optimizer, whose reports are written then."""
        self._opt.close()
        return {}


if __name__ == "__main__":
    worker = Sleeper()
    sys.exit(serve(worker.start, worker.train, worker.leave))
