"""One peer of `bench penalty`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from p2pavg.bench.options import codec_of
from p2pavg.bench.workers import own_host, serve
from p2pavg.optim.optimizer import CollaborativeOptimizer

LAYER = 512


def place_of(device: str, index: int) -> torch.device:
    """The device of the peer with this index; for `cuda`, peers take the GPUs in turn."""
    if device == "cuda":
        return torch.device("cuda", index % torch.cuda.device_count())
    return torch.device(device)


class TimedModel:
    """A model whose microbatches sleep for a known time, as beside an accelerator, or compute here."""

    def __init__(self, config: dict[str, Any], seconds: float) -> None:
        torch.manual_seed(0)
        device = place_of(config["device"], config["index"])
        params, batch = config["params"], config["batch"]
        depth = max(1, round(params / (LAYER * LAYER)))
        self.model = nn.Sequential(
            *(nn.Linear(LAYER, LAYER, bias=False, device=device) for _ in range(depth))
        )
        self.params = list(self.model.parameters())
        for param in self.params:  # keeps activations the same size: denormal gradients are slow to add
            nn.init.normal_(param, std=LAYER**-0.5)
        self._inputs = torch.randn(batch, LAYER, device=device)
        self._grads = [torch.full_like(p, 1e-3) for p in self.params]
        self._device = device
        self._seconds = seconds
        self.microbatch: Callable[[], None] = self._compute if config["compute"] == "torch" else self._sleep

    def inner(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.params, lr=1e-4, momentum=0.9)

    def _compute(self) -> None:
        self.model(self._inputs).square().mean().backward()
        self.wait()  # else the microbatch's time would count in the next call that waits for the device

    def wait(self) -> None:
        """Wait until the device has finished all queued work."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _sleep(self) -> None:
        end = time.monotonic() + self._seconds
        torch.autograd.backward(self.params, self._grads)
        time.sleep(max(0.0, end - time.monotonic()))


class Penalty:
    """The worker's commands."""

    def start(self, config: dict[str, Any]) -> dict[str, Any]:
        """Join the swarm."""
        torch.set_num_threads(config["threads"])
        slow = config["slow"] if config["index"] == config["peers"] - 1 else 1.0
        self.batch = config["batch"]
        self.job = TimedModel(config, config["step_seconds"] * slow)
        self.opt = CollaborativeOptimizer(
            self.job.inner(),
            "bench-penalty",
            config["target"],
            self.batch,
            initial_peers=config["initial_peers"],
            compression=codec_of(config["compression"]),
            delay_updates=config["delay"],
            offload_optimizer=config["offload"],
            listen=f"{own_host()}:0",
        )
        return {"address": self.opt.peer.address}

    def baseline(self, command: dict[str, Any]) -> dict[str, Any]:
        """Plain PyTorch, alone: samples per second, with an optimizer step every `steps` microbatches."""
        torch.set_num_threads(command["threads"])
        job = TimedModel(command, command["step_seconds"])
        inner = job.inner()
        begun = 0.0
        for epoch in range(command["epochs"] + 1):
            if epoch == 1:  # the first epoch is warm-up
                begun = time.perf_counter()
            for _ in range(command["steps"]):
                job.microbatch()
            inner.step()
            inner.zero_grad()
        job.wait()
        seconds = time.perf_counter() - begun
        return {"sps": command["epochs"] * command["steps"] * command["batch"] / seconds}

    def train(self, command: dict[str, Any]) -> dict[str, Any]:
        """Train until `epochs`; the first two epochs are warm-up."""
        opt = self.opt
        rows: list[dict[str, float]] = []
        calculating = samples = 0.0
        begun, cpu, epoch = time.perf_counter(), _averaging_cpu(), opt.epoch
        while opt.epoch < command["epochs"]:
            start = time.perf_counter()
            self.job.microbatch()
            calculating += time.perf_counter() - start
            opt.step()
            opt.zero_grad()
            samples += self.batch
            if opt.epoch != epoch:
                now = time.perf_counter()
                rows.append(
                    {
                        "epoch": epoch,
                        "seconds": now - begun,
                        "calculating": calculating,
                        "samples": samples,
                        "averaging_cpu": _averaging_cpu() - cpu,
                    }
                )
                calculating = samples = 0.0
                begun, cpu, epoch = now, _averaging_cpu(), opt.epoch
        return {"epochs": rows[2:]}

    def leave(self, command: dict[str, Any]) -> dict[str, Any]:
        """Close the optimizer."""
        self.opt.close()
        return {}


def _averaging_cpu() -> float:
    """CPU seconds of every thread but the training thread."""
    return time.process_time() - time.thread_time()


if __name__ == "__main__":
    worker = Penalty()
    sys.exit(serve(worker.start, worker.baseline, worker.train, worker.leave))
