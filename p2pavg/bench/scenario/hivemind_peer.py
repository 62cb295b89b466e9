"""One Hivemind peer of a replay. Run as a file by an interpreter that has hivemind, not p2pavg."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


class Peer:
    """The commands; as `worker` has them."""

    def start(self, config: dict[str, Any]) -> dict[str, Any]:
        import hivemind  # type: ignore[import-not-found]
        import torch

        torch.set_num_threads(1)
        mine = config["sleepers"][config["index"]]
        self.batch, self.seconds = mine["batch"], mine["step_seconds"]
        random = torch.Generator().manual_seed(config["index"])
        self.param = torch.nn.Parameter(torch.zeros(config["values"]))
        self.grad = 1e-3 * torch.randn(config["values"], generator=random)
        host = os.environ.get("P2PAVG_LAB_ADDRESS", "127.0.0.1")
        self.dht = hivemind.DHT(
            initial_peers=config["initial_peers"], host_maddrs=[f"/ip4/{host}/tcp/0"], start=True
        )
        self.opt = hivemind.Optimizer(
            dht=self.dht,
            run_id="replay",
            batch_size_per_step=self.batch,
            target_batch_size=config["target"],
            params=[self.param],
            optimizer=lambda params: torch.optim.SGD(params, lr=1e-4),
            grad_compression=hivemind.compression.Float16Compression(),
            state_averaging_compression=hivemind.compression.Float16Compression(),
            matchmaking_time=config["matchmaking_s"],
            averaging_timeout=600.0,
            use_local_updates=False,
        )
        return {"address": str(self.dht.get_visible_maddrs()[0])}

    def train(self, command: dict[str, Any]) -> dict[str, Any]:
        import torch

        ends: list[float] = []
        epoch, begun = self.opt.local_epoch, time.monotonic()
        while self.opt.local_epoch < command["epochs"]:
            torch.autograd.backward([self.param], [self.grad])
            due = begun + self.seconds
            time.sleep(max(0.0, due - time.monotonic()))
            self.opt.step()
            self.opt.zero_grad()
            stepped = self.opt.local_epoch != epoch
            if stepped:
                epoch = self.opt.local_epoch
                ends.append(time.monotonic())
            begun = time.monotonic() if stepped else max(due, time.monotonic() - self.seconds)
        return {"ends": ends}

    def leave(self, command: dict[str, Any]) -> dict[str, Any]:
        self.opt.shutdown()
        self.dht.shutdown()
        return {}


def main() -> None:
    """One JSON command a line in, one JSON answer a line out, on what was stdout at the start."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library prints
    peer = Peer()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(peer, command.pop("do"))(command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(answer) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
