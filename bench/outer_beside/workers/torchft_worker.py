"""One torchft replica that trains with DiLoCo; the lighthouse is beside the first, which is not killed.

Runs in the environment of torchft (`pip install torchft numpy`), with this repository on PYTHONPATH for the
model and the text alone.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

sys.path.insert(0, str(Path(__file__).parents[2] / "versus" / "workers"))
from lines import interface_of, own_host, serve
from managed import managed

from p2pavg.bench.outer.model import Language, Sleeper, factor

socket.gethostname = own_host  # under this name others fetch a state from it: a lab's hosts have no other

LONG_S = 0.05  # a step() that took so long is told


class Replica:
    def start(self, config):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it logs every step
        torch.set_num_threads(1)
        self.config = config
        host = own_host()
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(host)
        self.lighthouse = None
        if config["initial_peers"]:
            address = config["initial_peers"][0]
        else:
            self.lighthouse = LighthouseServer(bind=f"{host}:0", min_replicas=1, join_timeout_ms=1000)
            port = self.lighthouse.address().rsplit(":", 1)[1]
            address = f"http://{host}:{port}"
        self.address = address
        if config["compute"] == "sleep":
            self.job = Sleeper(config["params"], config["step_seconds"])
            self.inner = torch.optim.SGD(self.job.model.parameters(), lr=1e-3)
        else:
            self.job = Language(config["params"], config["batch"], config["seed"], [config["index"]])
            self.inner = torch.optim.AdamW(
                self.job.model.parameters(), lr=config["lr"], weight_decay=0.01, fused=True
            )
        self.schedule = LambdaLR(self.inner, lambda step: factor(step, config["steps"]))
        parameters = sum(param.numel() for param in self.job.model.parameters())
        return {"address": address, "parameters": parameters}

    def gather(self, command):
        host, config = own_host(), self.config
        self.manager, self.store = managed(
            self.job.model, self.inner, host, self.address, config["index"], config["timeout"]
        )
        return {}

    def train(self, command):
        """Until so many outer steps are committed."""
        config, manager = self.config, self.manager
        outer = torch.optim.SGD(
            self.job.model.parameters(), lr=config["outer_lr"], momentum=config["momentum"], nesterov=True
        )
        every, computing, commits, waits = config["every"], 0.0, [], []
        begun, steps = time.perf_counter(), 0
        with DiLoCo(manager, [self.job.model], self.inner, outer, sync_every=every):
            while manager.current_step() < command["epochs"]:
                start = time.perf_counter()
                self.job.backward()
                computing += time.perf_counter() - start
                before, start = manager.current_step(), time.perf_counter()
                self.inner.step()
                seconds = time.perf_counter() - start
                if seconds > LONG_S:
                    waits.append([time.monotonic(), seconds])
                self.schedule.step()
                self.inner.zero_grad()
                steps += 1
                if steps % every:
                    computing += seconds
                else:
                    done = manager.current_step() > before
                    commits.append([time.monotonic(), manager.num_participants() if done else 0])
        seconds = time.perf_counter() - begun
        vector = torch.cat([param.detach().flatten() for param in self.job.model.parameters()])
        return {
            "loss": self.job.loss(),
            "digest": hashlib.sha256(vector.numpy().tobytes()).hexdigest(),
            "steps": steps,
            "seconds": seconds,
            "computing": computing,
            "commits": commits,
            "waits": waits,
        }

    def leave(self, command):
        self.manager.shutdown(wait=False)
        return {}


if __name__ == "__main__":
    replica = Replica()
    serve(
        {
            "start": replica.start,
            "gather": replica.gather,
            "train": replica.train,
            "leave": replica.leave,
        }
    )
