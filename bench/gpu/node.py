"""A node of several GPUs as one peer, beside DistributedDataParallel alone. Start it on all of them:

torchrun --nproc-per-node 2 -m bench.gpu.node --out node.json

Two things: that a node over NCCL and a single peer end with the same bits, with and without delayed updates,
and what the peer costs the node when it trains an encoder of the size of XLM-R large with delayed updates,
in epochs of so many steps of the node. DDP alone accumulates as many steps and then steps its optimizer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from p2pavg import CollaborativeOptimizer
from p2pavg.bench.accumulate import lower_bound

EPOCHS = 6
WIDTH, LAYERS, HEADS, WORDS, LENGTH = 1024, 24, 16, 250_002, 128  # XLM-R large


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))


def digest(model: nn.Module) -> str:
    whole = torch.cat([param.detach().float().cpu().flatten() for param in model.parameters()])
    return hashlib.sha256(whole.numpy().tobytes()).hexdigest()[:16]


def single(address: str, found: Any, delayed: bool) -> None:
    """The single peer, in a process of its own on the first GPU."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    device = torch.device("cuda", 0)
    model = small().to(device)
    opt = CollaborativeOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        "node",
        512,
        16,
        listen="127.0.0.1:0",
        compression="none",
        initial_peers=[address],
        delay_updates=delayed,
    )
    while opt.epoch < EPOCHS:
        model(torch.randn(16, 64, device=device)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        time.sleep(0.01)
    members = len(opt.last_report.members) if opt.last_report is not None else 0
    found.put((opt.epoch, digest(model), members))
    opt.close()


def equal_bits(device: torch.device, delayed: bool) -> dict[str, Any]:
    """A node of all ranks and a single peer, to the same epoch."""
    model = small().to(device)
    wrapped = DistributedDataParallel(model, device_ids=[device.index])
    opt = CollaborativeOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        "node",
        512,
        16,
        listen="127.0.0.1:0",
        compression="none",
        initial_peers=[],
        node_group=dist.group.WORLD,
        delay_updates=delayed,
    )
    first = dist.get_rank() == 0
    other, found = None, None
    if first:
        context = mp.get_context("spawn")
        found = context.SimpleQueue()
        other = context.Process(target=single, args=(opt.peer.address, found, delayed))
        other.start()
        opt.peer.wait_for_peers(1)
    dist.barrier()
    while opt.epoch < EPOCHS:
        wrapped(torch.randn(16, 64, device=device)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        time.sleep(0.01)
    said = [""] * dist.get_world_size()
    dist.all_gather_object(said, digest(model))
    result: dict[str, Any] = {"ranks": said}
    if first:
        assert found is not None
        assert other is not None
        result["single"] = found.get()
        other.join()
    opt.close()
    return result


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(words)).mean(1))


class Accumulated:
    """DDP alone: an optimizer that steps once in so many calls, on the mean of their gradients."""

    def __init__(self, inner: torch.optim.Optimizer, every: int) -> None:
        self._inner = inner
        self._every = every
        self._calls = 0

    def step(self) -> None:
        self._calls += 1
        if self._calls % self._every == 0:
            grads = [p.grad for group in self._inner.param_groups for p in group["params"]]
            torch._foreach_div_(grads, float(self._every))
            self._inner.step()
            self._inner.zero_grad(set_to_none=False)

    def zero_grad(self) -> None:
        """Gradients accumulate."""


class Training:
    """A node's training of one model, plain or as a peer, epoch by epoch."""

    def __init__(
        self, device: torch.device, steps: int, batch: int, build: Callable[[nn.Module], Any]
    ) -> None:
        torch.manual_seed(0)
        model = Encoder().to(device)
        self.opt = build(model)
        self._wrapped = DistributedDataParallel(
            model, device_ids=[device.index], gradient_as_bucket_view=True
        )
        self._words = torch.randint(0, WORDS, (batch, LENGTH), device=device)
        self._steps = steps
        self.seconds: list[float] = []  # of a whole epoch, the device synchronised at its end
        self.step_ms: list[float] = []  # of the host, amid an epoch
        self.inside_ms: list[float] = []  # of opt.step() among these

    def step(self) -> float:
        """One step of this rank; ms within opt.step()."""
        with torch.autocast("cuda", torch.bfloat16):
            loss = self._wrapped(self._words).square().mean()
        loss.backward()
        begun = time.perf_counter()
        self.opt.step()
        inside = 1e3 * (time.perf_counter() - begun)
        self.opt.zero_grad()
        return inside

    def epoch(self, kept: bool) -> None:
        """One epoch, whose times are kept or not."""
        torch.cuda.synchronize()
        begun = before = time.perf_counter()
        for at in range(self._steps):
            inside, now = self.step(), time.perf_counter()
            if kept and self._steps // 2 <= at < self._steps - 1:
                self.step_ms.append(1e3 * (now - before))
                self.inside_ms.append(inside)
            before = now
        torch.cuda.synchronize()
        if kept:
            self.seconds.append(time.perf_counter() - begun)

    def trace(self, file: Path) -> None:
        """Write what torch's profiler sees of the last steps of an epoch and the first of the next."""
        around = min(8, self._steps // 2)
        for _ in range(self._steps - around):
            self.step()
        with torch.profiler.profile() as profiler:
            for _ in range(2 * around):
                self.step()
            torch.cuda.synchronize()
        for _ in range(self._steps - around):
            self.step()  # so that all ranks end an epoch
        if dist.get_rank() == 0:
            profiler.export_chrome_trace(str(file))

    def figures(self) -> dict[str, Any]:
        """Medians, and the phases of the peer's last epoch."""
        found: dict[str, Any] = {
            "seconds": self.seconds,
            "step_ms": median(self.step_ms),
            "inside_ms": median(self.inside_ms),
        }
        peer = getattr(self.opt, "collaborative", None)
        if peer is not None and peer.last_report is not None:
            phases = peer.last_report.flat().items()
            found["phases"] = {name: value for name, value in phases if name.startswith("seconds_")}
            found["peer_epochs"] = peer.epoch
        return found


def compare(device: torch.device, steps: int, batch: int, turns: int, trace: Path | None) -> dict[str, Any]:
    """DDP alone and a delayed peer by turns, three epochs each, the first of which is not kept: what was
    delayed in it belongs to the turn before. The ratios of their samples/s, turn by turn.
    """
    target = dist.get_world_size() * batch * steps

    def plain(model: nn.Module) -> Any:
        return Accumulated(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), steps)

    def peer(model: nn.Module) -> Any:
        return CollaborativeOptimizer(
            torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
            "large",
            target,
            batch,
            listen="127.0.0.1:0",
            initial_peers=[],
            delay_updates=True,
            node_group=dist.group.WORLD,
        )

    arms = {"plain": Training(device, steps, batch, plain), "peer": Training(device, steps, batch, peer)}
    for arm in arms.values():
        arm.epoch(kept=False)
        arm.epoch(kept=False)
    for turn in range(turns):
        for arm in arms.values() if turn % 2 == 0 else reversed(arms.values()):
            for kept in (False, True, True):
                arm.epoch(kept)
    if trace is not None:
        for name, arm in arms.items():
            arm.trace(trace / f"{name}-{steps}.json.gz")
    found = {name: arm.figures() for name, arm in arms.items()}
    arms["peer"].opt.close()
    ratios = [a / b for a, b in zip(found["plain"]["seconds"], found["peer"]["seconds"], strict=True)]
    seconds = median(found["plain"]["seconds"])
    return {
        "steps": steps,
        "batch": batch,
        "seconds": seconds,
        "samples_per_second": target / seconds,
        "ratio": median(ratios),
        "ratio_low95": lower_bound(ratios),
        "ratios": ratios,
        **found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turns", type=int, default=3, help="of two kept epochs each")
    parser.add_argument(
        "--batch", type=int, default=160, help="so that the device, not the host, is busy all the time"
    )
    parser.add_argument("--steps", type=int, nargs="*", default=[40], help="of an epoch")
    parser.add_argument(
        "--trace", type=Path, help="a folder for what torch's profiler sees around a boundary"
    )
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    first = dist.get_rank() == 0
    if args.trace is not None:
        args.trace.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {}
    for name, delayed in (("equal_bits", False), ("equal_bits_delayed", True)):
        result[name] = equal_bits(device, delayed)
        if first:
            print(name, result[name], flush=True)
    result["epochs"] = []
    for steps in args.steps:
        result["epochs"].append(compare(device, steps, args.batch, args.turns, args.trace))
        torch.cuda.empty_cache()
        if first:
            print(json.dumps(result), flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
