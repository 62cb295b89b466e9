"""A node of several GPUs as one peer, beside DistributedDataParallel alone. Start it on all of them:

torchrun --nproc-per-node 2 -m bench.gpu.node --out node.json

Two things: that a node over NCCL and a single peer end with the same bits, and what the peer costs the node
when it trains an encoder of the size of XLM-R large with delayed updates.
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


def single(address: str, found: Any) -> None:
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
    )
    while opt.epoch < EPOCHS:
        model(torch.randn(16, 64, device=device)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        time.sleep(0.01)
    members = len(opt.last_report.members) if opt.last_report is not None else 0
    found.put((opt.epoch, digest(model), members))
    opt.close()


def equal_bits(device: torch.device) -> dict[str, Any]:
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
    )
    first = dist.get_rank() == 0
    other, found = None, None
    if first:
        context = mp.get_context("spawn")
        found = context.SimpleQueue()
        other = context.Process(target=single, args=(opt.peer.address, found))
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


def rate(
    device: torch.device, steps: int, batch: int, build: Callable[[nn.Module], Any], seconds: float
) -> float:
    """Samples/s of this node: the median over blocks of `steps` steps, for so many seconds."""
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
        going.fill_(float(time.perf_counter() - began < seconds))
        dist.broadcast(going, 0)
    if hasattr(opt, "close"):
        opt.close()
    del model, wrapped, opt
    torch.cuda.empty_cache()
    return median(rates[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    result: dict[str, Any] = {"equal_bits": equal_bits(device)}
    if dist.get_rank() == 0:
        print(result, flush=True)
    target = dist.get_world_size() * args.batch * 40

    def plain(model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def peer(model: nn.Module) -> Any:
        return CollaborativeOptimizer(
            torch.optim.AdamW(model.parameters(), lr=1e-4),
            "large",
            target,
            args.batch,
            listen="127.0.0.1:0",
            initial_peers=[],
            delay_updates=True,
            node_group=dist.group.WORLD,
        )

    rates: dict[str, list[float]] = {"plain": [], "peer": []}
    for name, build in (("plain", plain), ("peer", peer), ("plain", plain)):
        rates[name].append(rate(device, 20, args.batch, build, args.seconds))
        if dist.get_rank() == 0:
            print(name, rates[name][-1], flush=True)
    result |= {"samples_per_second": rates, "ratio": rates["peer"][0] / (sum(rates["plain"]) / 2)}
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
