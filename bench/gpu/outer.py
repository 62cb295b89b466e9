"""Outer steps of a GPT of 124M parameters on one device: `python -m bench.gpu.outer --out DIR`.

alone: one peer that never ends an outer step, by turns with plain PyTorch, and the device memory it takes.
four: replicas that share the device, with an upload limit each: whole outer steps beside plain steps.
transfer: the way of int8 with error feedback to the host, in gradient mode, beside that of fp16.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

from p2pavg import CollaborativeOptimizer, Outer, codecs
from p2pavg.allreduce.feedback import Residual
from p2pavg.bench.accumulate import NEVER, lower_bound
from p2pavg.optim.gradients.path import CudaPath
from p2pavg.report import RoundReport

WIDTH, LAYERS, HEADS, WORDS, LENGTH = 768, 12, 12, 50_257, 512  # GPT-2 small
DEADLINE_S = 300.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.mixed(self.first(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.narrow(nn.functional.gelu(self.wide(self.second(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(1024, WIDTH)
        self.layers, self.last = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDTH)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places.weight[: words.shape[1]]
        x = self.last(self.layers(x))
        logits = nn.functional.linear(x, self.words.weight)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


class Trainer:
    """A model with an AdamW, plain or in a swarm."""

    def __init__(self, batch: int, seed: int) -> None:
        torch.manual_seed(0)
        self.model = Gpt().cuda()
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.opt: Any = self.inner
        torch.manual_seed(seed)
        self.words = torch.randint(0, WORDS, (batch, LENGTH), device="cuda")
        self.batch = batch

    def collaborate(self, **options: Any) -> CollaborativeOptimizer:
        """Put the optimizer into a swarm with outer steps in int4."""
        self.opt = CollaborativeOptimizer(
            self.inner, batch_size_per_step=self.batch, listen="127.0.0.1:0", compression="int4", **options
        )
        return self.opt

    def step(self) -> None:
        """One local step, as far as the host is concerned."""
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model(self.words)
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()

    def block(self, steps: int) -> float:
        """Seconds of so many steps, the device synchronised before and after."""
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(steps):
            self.step()
        torch.cuda.synchronize()
        return time.perf_counter() - begun


def _used() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def alone(batch: int, steps: int, pairs: int) -> dict[str, Any]:
    """One peer far from its target, by turns with plain PyTorch and a control of plain PyTorch."""
    plain, ours = Trainer(batch, 0), Trainer(batch, 0)
    for trainer in (plain, ours):
        trainer.block(3)
    before = _used()
    opt = ours.collaborate(run_id="alone", target_batch_size=NEVER, initial_peers=[], outer=Outer())
    ours.block(3)
    memory = _used() - before
    parameters = sum(p.numel() for p in ours.model.parameters())
    times: dict[str, list[float]] = {"plain": [], "local": [], "control": []}
    order = [("plain", plain), ("local", ours), ("control", plain)]
    for pair in range(pairs):
        for name, trainer in order if pair % 2 == 0 else reversed(order):
            times[name].append(trainer.block(steps))
        order.append(order.pop(0))
    opt.close()
    ratios = [a / b for a, b in zip(times["plain"], times["local"], strict=True)]
    controls = [a / b for a, b in zip(times["plain"], times["control"], strict=True)]
    return {
        "parameters": parameters,
        "fragment_bytes": 4 * parameters,
        "memory_beyond_plain": memory,
        "milliseconds_per_step": median(times["plain"]) / steps * 1e3,
        "ratio_median": median(ratios),
        "ratio_low95": lower_bound(ratios),
        "control_ratio": median(controls),
        "times": times,
    }


def _replica(index: int, args: argparse.Namespace, barrier: Any, addresses: Any, found: Any) -> None:
    """One of the replicas: plain, the swarm, plain again; all begin each phase together."""
    torch.set_num_threads(2)
    trainer, plain = Trainer(args.batch, index), Trainer(args.batch, index)
    count, inner = args.replicas, args.inner_steps
    trainer.block(3)

    def plain_step() -> float:
        barrier.wait(DEADLINE_S)
        return plain.block(inner) / inner

    reports: list[RoundReport] = []

    def join(initial: list[str]) -> CollaborativeOptimizer:
        return trainer.collaborate(
            run_id="four",
            target_batch_size=count * args.batch * inner,
            initial_peers=initial,
            on_round=reports.append,
            outer=Outer(fragments=args.fragments, overlap=args.overlap),
        )

    if index == 0:
        opt = join([])
        for _ in range(count - 1):
            addresses.put(opt.peer.address)
    else:
        opt = join([addresses.get()])
    opt.peer.wait_for_peers(count - 1)
    barrier.wait(DEADLINE_S)
    # Only now: 2 GB of state would take three newcomers minutes otherwise.
    thread, runtime = opt.peer._thread, opt.peer._runtime
    assert thread is not None
    assert runtime is not None
    thread.loop.call_soon_threadsafe(runtime._engine.set_upload_limit, args.upload_mbps * 1e6 / 8)
    plain_steps = [plain_step()]
    barrier.wait(DEADLINE_S)
    while opt.epoch < args.fragments * args.warm:  # the first allocates; then links are known as they are now
        trainer.step()
    torch.cuda.synchronize()
    began, steps, longest = time.perf_counter(), 0, [0.0]
    while opt.epoch < args.fragments * (args.warm + args.turns):
        before = time.perf_counter()
        trainer.step()
        longest.append(time.perf_counter() - before)
        steps += 1
    torch.cuda.synchronize()
    swarm_step = (time.perf_counter() - began) / steps
    plain_steps.append(plain_step())
    whole = [report for report in reports if report.members]
    found.put(
        {
            "index": index,
            "plain_seconds_per_step": plain_steps,
            "swarm_seconds_per_step": swarm_step,
            "steps": steps,
            "longest_steps": sorted(longest)[-6:],
            "members": [len(report.members) for report in whole],
            "theta": {report.epoch: report.extra.get("theta_sha256_low") for report in whole},
            "bytes_sent": sum(link.wire_bytes_sent for report in whole for link in report.links),
            "phases": {name: it for name, it in whole[-1].flat().items() if name.startswith("seconds_")},
        }
    )
    barrier.wait(DEADLINE_S)
    opt.close()


def four(args: argparse.Namespace) -> dict[str, Any]:
    """All replicas on this device, in processes of their own."""
    context = mp.get_context("spawn")
    barrier, addresses, found = context.Barrier(args.replicas), context.Queue(), context.Queue()
    workers = [
        context.Process(target=_replica, args=(index, args, barrier, addresses, found))
        for index in range(args.replicas)
    ]
    for worker in workers:
        worker.start()
    told = [found.get(timeout=2 * DEADLINE_S) for _ in workers]
    for worker in workers:
        worker.join(DEADLINE_S)
    ratios = [sum(one["plain_seconds_per_step"]) / 2 / one["swarm_seconds_per_step"] for one in told]
    epochs = set.intersection(*(set(one["theta"]) for one in told))
    equal = all(len({one["theta"][epoch] for one in told}) == 1 for epoch in epochs)
    return {
        "utilisation": median(ratios),
        "ratios": ratios,
        "outer_steps": len(epochs),
        "bit_identical": equal and bool(epochs),
        "replicas": told,
    }


def transfer() -> dict[str, Any]:
    """Seconds from a gradient on the device to a contribution: fp16, and int8 and int4 with residuals."""
    numel, chunk = 124_000_000, 1 << 17
    x = torch.randn(numel, device="cuda")
    seconds: dict[str, list[float]] = {"fp16": [], "int8": [], "int4": []}
    paths = {name: CudaPath(x.device, numel, codecs.get(name)) for name in seconds}
    residuals = {name: Residual(numel, path.allocate) for name, path in paths.items()}
    for _ in range(9):
        for name, path in paths.items():
            codec, residual = codecs.get(name), residuals[name]
            torch.cuda.synchronize()
            begun = time.perf_counter()
            gradient = path.gradient(x)
            source = gradient if name == "fp16" else gradient.with_feedback(residual.owed(0.5))
            assert source.encode(codec, [(0, numel)], chunk, 0.5).finite()
            residual.commit()
            seconds[name].append(time.perf_counter() - begun)
    best = {name: median(values) for name, values in seconds.items()}
    of_fp16 = {name: value / best["fp16"] for name, value in best.items()}
    return {"numel": numel, "seconds": best, "of_fp16": of_fp16}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--only", nargs="*", choices=("alone", "transfer", "four"), default=None)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--inner-steps", type=int, default=100)
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--overlap", type=int, default=90)
    parser.add_argument("--warm", type=int, default=4, help="outer steps before those that are timed")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--upload-mbps", type=float, default=100.0)
    args = parser.parse_args()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    sections = {"alone": lambda: alone(args.batch, 50, 9), "transfer": transfer, "four": lambda: four(args)}
    for name, section in sections.items():
        if args.only and name not in args.only:
            continue
        begun = time.perf_counter()
        found[name] = section()
        gc.collect()
        torch.cuda.empty_cache()
        print(name, f"{time.perf_counter() - begun:.0f} s", json.dumps(found[name])[:1500], flush=True)
        (args.out / "gpu_outer.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
