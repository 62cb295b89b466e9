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


def rate(
    device: torch.device, steps: int, batch: int, build: Callable[[nn.Module], Any], seconds: float
) -> dict[str, Any]:
    """Samples/s of this node: of whole epochs of `steps` steps, after the first two, for so many seconds.
    Of a peer also the seconds of the last epoch's phases.
    """
    torch.manual_seed(0)
    model = Encoder().to(device)
    wrapped = DistributedDataParallel(model, device_ids=[device.index], gradient_as_bucket_view=True)
    opt = build(model)
    words = torch.randint(0, WORDS, (batch, LENGTH), device=device)
    rates: list[float] = []
    began = time.perf_counter()
    going = torch.ones((), device=device)
    while going.item():
        begun = time.perf_counter()
        for _ in range(steps):
            with torch.autocast("cuda", torch.bfloat16):
                loss = wrapped(words).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
        torch.cuda.synchronize()
        rates.append(dist.get_world_size() * batch * steps / (time.perf_counter() - begun))
        more = time.perf_counter() - began < seconds or len(rates) < 5
        going.fill_(float(more))
        dist.broadcast(going, 0)
    found: dict[str, Any] = {"samples_per_second": median(rates[2:]), "epochs": len(rates)}
    peer = getattr(opt, "collaborative", None)
    if peer is not None and peer.last_report is not None:
        phases = peer.last_report.flat().items()
        found["phases"] = {name: value for name, value in phases if name.startswith("seconds_")}
        found["peer_epochs"] = peer.epoch
    if hasattr(opt, "close"):
        opt.close()
    del model, wrapped, opt
    torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=25.0, help="of each measurement, at least")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, nargs="*", default=[40, 160], help="of an epoch")
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    first = dist.get_rank() == 0
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
            found[name].append(rate(device, steps, args.batch, build, args.seconds))
            if first:
                print(steps, name, found[name][-1], flush=True)
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
