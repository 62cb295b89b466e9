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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from p2pavg import CollaborativeOptimizer

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


class Steps:
    """The seconds of each step, by epoch, and of those within opt.step(): of the host, which is as fast as
    the device as soon as that one's queue is full.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._inside: list[float] = []
        self.epochs: list[list[float]] = []

    @contextmanager
    def inside(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self._inside.append(time.perf_counter() - begun)

    def epoch(self, step: Callable[[], None]) -> None:
        """One epoch; its last step ends when the device has done all of it."""
        took, before = [], time.perf_counter()
        for at in range(self._steps):
            step()
            if at == self._steps - 1:
                torch.cuda.synchronize()
            now = time.perf_counter()
            took.append(now - before)
            before = now
        self.epochs.append(took)

    def figures(self) -> dict[str, Any]:
        """ms of a step amid an epoch, and within its opt.step(); what an epoch takes beyond so many of these;
        and the longest steps of the median epoch, by their number.
        """
        kept, inside = self.epochs[2:], self._inside[2 * self._steps :]
        amid = range(self._steps // 2, self._steps - 1)
        usual = median(epoch[at] for epoch in kept for at in amid)
        within = median(inside[number * self._steps + at] for number in range(len(kept)) for at in amid)
        middle = sorted(kept, key=sum)[len(kept) // 2]
        longest = sorted(range(self._steps), key=lambda at: -middle[at])[:6]
        return {
            "step_ms": 1e3 * usual,
            "inside_ms": 1e3 * within,
            "boundary_ms": 1e3 * (median(map(sum, kept)) - self._steps * usual),
            "longest_ms": {at: round(1e3 * middle[at], 2) for at in sorted(longest)},
        }

    def tracing(self, step: Callable[[], None], file: Path | None) -> str:
        """The last steps of an epoch and the first of the next under torch's profiler, whose table is
        returned.
        """
        around = min(8, self._steps // 2)
        for _ in range(self._steps - around):
            step()
        with torch.profiler.profile(acc_events=True) as profiler:
            for _ in range(2 * around):
                step()
            torch.cuda.synchronize()
        for _ in range(self._steps - around):
            step()  # the other ranks end an epoch, too
        table: str = profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=30)
        if file is not None:
            profiler.export_chrome_trace(str(file))
        return table


def rate(
    device: torch.device,
    steps: int,
    batch: int,
    build: Callable[[nn.Module], Any],
    seconds: float,
    trace: Path | None = None,
) -> dict[str, Any]:
    """Samples/s of this node: of whole epochs of `steps` steps, after the first two, for so many seconds; and
    what a step and a boundary take. Of a peer also the seconds of the last epoch's phases.

    trace: a file for what `Steps.tracing` sees after that, on this rank.
    """
    torch.manual_seed(0)
    model = Encoder().to(device)
    wrapped = DistributedDataParallel(model, device_ids=[device.index], gradient_as_bucket_view=True)
    opt = build(model)
    words = torch.randint(0, WORDS, (batch, LENGTH), device=device)
    taken = Steps(steps)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = wrapped(words).square().mean()
        loss.backward()
        with taken.inside():
            opt.step()
        opt.zero_grad()

    began = time.perf_counter()
    going = torch.ones((), device=device)
    while going.item():
        taken.epoch(step)
        more = time.perf_counter() - began < seconds or len(taken.epochs) < 5
        going.fill_(float(more))
        dist.broadcast(going, 0)
    rates = [dist.get_world_size() * batch * steps / sum(epoch) for epoch in taken.epochs]
    found: dict[str, Any] = {"samples_per_second": median(rates[2:]), "epochs": len(rates), **taken.figures()}
    if trace is not None:
        found["traced"] = taken.tracing(step, trace if dist.get_rank() == 0 else None)
    peer = getattr(opt, "collaborative", None)
    if peer is not None and peer.last_report is not None:
        phases = peer.last_report.flat().items()
        found["phases"] = {name: value for name, value in phases if name.startswith("seconds_")}
        found["peer_epochs"] = peer.epoch
    if hasattr(opt, "close"):
        opt.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=25.0, help="of each measurement, at least")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, nargs="*", default=[40, 160], help="of an epoch")
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
        target = dist.get_world_size() * args.batch * steps

        def plain(model: nn.Module, every: int = steps) -> Any:
            return Accumulated(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), every)

        def peer(model: nn.Module, target: int = target) -> Any:
            return CollaborativeOptimizer(
                torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
                "large",
                target,
                args.batch,
                listen="127.0.0.1:0",
                initial_peers=[],
                delay_updates=True,
                node_group=dist.group.WORLD,
            )

        found: dict[str, list[Any]] = {"plain": [], "peer": []}
        for name, build in (("plain", plain), ("peer", peer), ("plain", plain)):
            traced = None if args.trace is None or found[name] else args.trace / f"{name}-{steps}.json.gz"
            found[name].append(rate(device, steps, args.batch, build, args.seconds, traced))
            torch.cuda.empty_cache()
            table = found[name][-1].pop("traced", "")
            if first:
                print(steps, name, found[name][-1], table, sep="\n", flush=True)
        alone = sum(it["samples_per_second"] for it in found["plain"]) / 2
        ratio = found["peer"][0]["samples_per_second"] / alone
        result["epochs"].append({"steps": steps, "seconds": target / alone, "ratio": ratio, **found})
    if first:
        print(json.dumps(result), flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
