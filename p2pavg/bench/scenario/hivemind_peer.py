"""One Hivemind peer of a replay. Run as a file by an interpreter that has hivemind, not p2pavg."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

AVERAGED = re.compile(r"Averaged gradients with (\d+) peers")
FAILED = re.compile(r"Averaging gradients failed|Skipped averaging")


class Rounds(logging.Handler):
    """How many peers each average of gradients had, as the library says; 0: it failed."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        if found := AVERAGED.search(said):
            self.sizes.append(int(found[1]))
        elif FAILED.search(said):
            self.sizes.append(0)


def scale_buffers(scale: float) -> None:
    """Let a connection of this host hold so much unsent, times the scale, as bytes and rates are: what is
    said behind megabytes comes too late where they take ten times as long.
    """
    path = Path("/proc/sys/net/ipv4/tcp_wmem")
    least, usual, most = map(int, path.read_text().split())
    most = max(usual, round(scale * most))
    path.write_text(f"{least} {usual} {most}")


class Peer:
    """The commands, as `worker` has them; it does not leave, and ends with its input."""

    def start(self, config: dict[str, Any]) -> dict[str, Any]:
        import hivemind  # type: ignore[import-not-found]
        import torch

        torch.set_num_threads(1)
        scale_buffers(config["scale"])
        mine = config["sleepers"][config["index"]]
        self.batch, self.seconds = mine["batch"], mine["step_seconds"]
        random = torch.Generator().manual_seed(config["index"])
        self.param = torch.nn.Parameter(torch.zeros(config["values"]))
        self.grad = 1e-3 * torch.randn(config["values"], generator=random)
        host = os.environ.get("P2PAVG_LAB_ADDRESS", "127.0.0.1")
        self.dht = hivemind.DHT(
            initial_peers=config["initial_peers"],
            host_maddrs=[f"/ip4/{host}/tcp/0"],
            startup_timeout=120.0,
            start=True,
        )
        self.rounds = Rounds()
        said = logging.getLogger("hivemind.optim.optimizer")
        said.addHandler(self.rounds)
        said.propagate = False
        for chatty in ("progress_tracker", "state_averager"):
            logging.getLogger(f"hivemind.optim.{chatty}").setLevel(logging.WARNING)
        # Messages are as many as at full scale: a peer that sends none within matchmaking_time is left out.
        part = max(1024, round(config["scale"] * hivemind.averaging.partition.DEFAULT_PART_SIZE_BYTES))
        self.opt = hivemind.Optimizer(
            dht=self.dht,
            run_id="replay",
            batch_size_per_step=self.batch,
            target_batch_size=config["target"],
            params=[self.param],
            optimizer=lambda params: torch.optim.SGD(params, lr=1e-4),
            grad_compression=hivemind.compression.Float16Compression(),
            grad_averager_factory=partial(
                hivemind.optim.grad_averager.GradientAverager, part_size_bytes=part
            ),
            averager_opts={"part_size_bytes": part},
            state_averaging_compression=hivemind.compression.Float16Compression(),
            matchmaking_time=config["matchmaking_s"],
            averaging_timeout=600.0,
            use_local_updates=False,
            verbose=True,
        )
        return {"address": str(self.dht.get_visible_maddrs()[0])}

    def train(self, command: dict[str, Any]) -> dict[str, Any]:
        """Train until `epochs`, for `seconds` at most: when each epoch ended, and how its average went."""
        import torch

        ends: dict[int, float] = {}
        groups: dict[int, list[int]] = {}
        epoch, begun = self.opt.local_epoch, time.monotonic()
        last = begun + command["seconds"]
        while self.opt.local_epoch < command["epochs"] and time.monotonic() < last:
            torch.autograd.backward([self.param], [self.grad])
            due = begun + self.seconds
            time.sleep(max(0.0, due - time.monotonic()))
            self.opt.step()
            self.opt.zero_grad()
            stepped = self.opt.local_epoch != epoch
            if stepped:
                epoch = self.opt.local_epoch
                ends[epoch] = time.monotonic()
                groups[epoch], self.rounds.sizes = self.rounds.sizes, []
            begun = time.monotonic() if stepped else max(due, time.monotonic() - self.seconds)
        return {"ends": ends, "groups": groups}


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
