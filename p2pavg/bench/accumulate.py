"""`bench accumulate`: the cost of CollaborativeOptimizer in a local training loop, beside plain PyTorch."""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import nn

from p2pavg.bench.options import at_least, positive_int, torch_device
from p2pavg.bench.progress import progress
from p2pavg.bench.result import add_output_options, emit, percentile
from p2pavg.optim.optimizer import CollaborativeOptimizer
from p2pavg.report.plot import whole

NEVER = 10**15
"""A target batch size that no benchmark reaches."""
LEAST_PAIRS = 5  # an interval of fewer says nothing


def register(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "accumulate",
        description="Times blocks of microbatches with plain gradient accumulation and with "
        "CollaborativeOptimizer (its peer alive, alone in its swarm), taken in turn in changing order, and a "
        "second plain block as control.",
        epilog="example: p2pavg bench accumulate --params 10000000 --json -",
    )
    parser.add_argument("--device", default="cpu", help="a torch device (default: cpu)")
    parser.add_argument("--params", type=positive_int, default=10_000_000, help="parameters of the model")
    parser.add_argument("--batch", type=positive_int, default=32, help="samples per microbatch")
    parser.add_argument("--microbatches", type=positive_int, default=8, help="microbatches per block")
    parser.add_argument("--pairs", type=positive_int, default=20, help="blocks of each kind, at most")
    parser.add_argument(
        "--seconds",
        type=at_least(0.0),
        default=240.0,
        help=f"after so long no blocks begin any more, and there are {LEAST_PAIRS} of each at least; "
        "default: %(default)g",
    )
    parser.add_argument("--threads", type=positive_int, help="torch threads (default: torch's own choice)")
    add_output_options(parser)
    parser.set_defaults(func=run)


def model_of(params: int, device: torch.device) -> nn.Sequential:
    """A chain of square linear layers with about `params` parameters."""
    width = 512 if params < 50_000_000 else 1024 if params < 200_000_000 else 2048
    depth = max(1, round(params / (width * width + width)))
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(width, width, device=device)
        nn.init.kaiming_normal_(linear.weight)  # smaller weights give denormal gradients, which are slow
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers)


def twin_of(model: nn.Sequential) -> nn.Sequential:
    """Other Parameter objects over the same memory, which do not have the hooks of the model's own."""
    twin: list[nn.Module] = []
    for layer in model:
        if isinstance(layer, nn.Linear):
            copy = nn.Linear(layer.in_features, layer.out_features, device="meta")
            copy.weight = nn.Parameter(layer.weight.data)
            assert layer.bias is not None
            copy.bias = nn.Parameter(layer.bias.data)
            twin.append(copy)
        else:
            twin.append(nn.ReLU())
    return nn.Sequential(*twin)


@dataclass
class Bench:
    """One model, trained by plain PyTorch and by the collaborative optimizer in turn."""

    model: nn.Sequential
    batch: int
    microbatches: int
    device: torch.device
    step_us: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plain_model = twin_of(self.model)
        self.plain_optimizer = torch.optim.SGD(self.plain_model.parameters(), lr=0.0)
        width = next(self.model.parameters()).shape[1]
        self.inputs = torch.randn(self.batch, width, device=self.device)

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, block: Callable[[], None]) -> tuple[float, float]:
        """Seconds of wall-clock time and of this thread's CPU time; a busy machine disturbs CPU time less."""
        self.synchronise()
        begun, busy = time.perf_counter(), time.thread_time()
        block()
        self.synchronise()
        return time.perf_counter() - begun, time.thread_time() - busy

    def plain(self) -> None:
        """One accumulation of plain PyTorch, without its optimizer step."""
        for _ in range(self.microbatches):
            self.plain_model(self.inputs).mean().backward()
        self.plain_optimizer.zero_grad()

    def local(self, optimizer: CollaborativeOptimizer) -> None:
        """One accumulation under CollaborativeOptimizer, including the clearing of the buffer after each
        epoch.
        """
        for _ in range(self.microbatches):
            self.model(self.inputs).mean().backward()
            begun = time.perf_counter()
            optimizer.step()
            self.step_us.append((time.perf_counter() - begun) * 1e6)
            optimizer.zero_grad()
        optimizer.discard()

    def collaborative(self, target_batch_size: int) -> CollaborativeOptimizer:
        return CollaborativeOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.0),
            run_id=f"bench-accumulate-{random.getrandbits(64):x}",
            target_batch_size=target_batch_size,
            batch_size_per_step=self.batch,
            initial_peers=[],
            listen="127.0.0.1:0",
        )

    def epoch_ends(self, count: int = 3) -> list[float]:
        """Seconds of the step()s that end an epoch of a lone peer: an average of one, and the inner step."""
        seconds: list[float] = []
        with self.collaborative(self.batch * self.microbatches) as optimizer:
            while len(seconds) < count:
                self.model(self.inputs).mean().backward()
                epoch = optimizer.epoch
                elapsed, _ = self.timed(optimizer.step)
                if optimizer.epoch > epoch:
                    seconds.append(elapsed)
        return seconds


def lower_bound(ratios: Sequence[float], draws: int = 2000) -> float:
    """The 95% lower confidence bound of the median, by bootstrap."""
    rng = random.Random(0)
    medians = [median(rng.choices(ratios, k=len(ratios))) for _ in range(draws)]
    return percentile(medians, 5)


def measure(
    bench: Bench, pairs: int, advance: Callable[[float], None], seconds: float = math.inf
) -> dict[str, Any]:
    """All figures of the verb. The blocks run in turn, in an order that changes each time: so many times, or
    until `seconds` are over, as a block of a large model may take a minute.
    """
    begun = time.monotonic()
    times: dict[str, list[float]] = {"plain": [], "local": [], "control": []}
    busy: dict[str, list[float]] = {"plain": [], "local": [], "control": []}
    with bench.collaborative(NEVER) as optimizer:
        blocks: dict[str, Callable[[], None]] = {
            "plain": bench.plain,
            "local": lambda: bench.local(optimizer),
            "control": bench.plain,
        }
        for block in blocks.values():
            block()  # warm up: allocator, threads, caches
        bench.step_us.clear()
        names = list(blocks)
        for pair in range(pairs):
            if pair >= LEAST_PAIRS and time.monotonic() > begun + seconds:
                break
            for name in names if pair % 2 == 0 else reversed(names):
                wall, thread = bench.timed(blocks[name])
                times[name].append(wall)
                busy[name].append(thread)
            names.append(names.pop(0))
            advance(1)
    ratios = [plain / local for plain, local in zip(times["plain"], times["local"], strict=True)]
    controls = [plain / again for plain, again in zip(times["plain"], times["control"], strict=True)]
    cpu_ratios = [plain / local for plain, local in zip(busy["plain"], busy["local"], strict=True)]
    cpu_controls = [plain / again for plain, again in zip(busy["plain"], busy["control"], strict=True)]
    samples = bench.batch * bench.microbatches
    return {
        "plain_sps": samples / median(times["plain"]),
        "local_sps": samples / median(times["local"]),
        "ratio_median": median(ratios),
        "ratio_low95": lower_bound(ratios),
        "control_ratio": median(controls),
        "control_low95": lower_bound(controls),
        "thread_cpu_ratio_median": median(cpu_ratios),
        "thread_cpu_control_ratio": median(cpu_controls),
        "step_us_median": median(bench.step_us),
        "step_us_p99": percentile(bench.step_us, 99),
        "pairs": len(ratios),
        "ratios": ratios,
        "controls": controls,
    }


def run(args: argparse.Namespace) -> int:
    """Run the verb."""
    device = torch_device(args.device)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    bench = Bench(model_of(args.params, device), args.batch, args.microbatches, device)
    with progress("accumulating", args.pairs) as advance:
        result = measure(bench, args.pairs, advance, args.seconds)
        ends = bench.epoch_ends()
    result |= {
        "epoch_end_seconds": median(ends),
        "device": str(device),
        "params": sum(p.numel() for p in bench.model.parameters()),
        "batch": args.batch,
        "microbatches": args.microbatches,
        "threads": torch.get_num_threads(),
    }
    lines = [
        f"{result['params'] / 1e6:.1f}M parameters on {device}, "
        f"blocks of {args.microbatches} x {args.batch} samples",
        f"plain {result['plain_sps']:.1f} samples/s, with the optimizer {result['local_sps']:.1f} samples/s",
        f"ratio {result['ratio_median']:.3f} (95% bound {result['ratio_low95']:.3f}), "
        f"plain against plain {result['control_ratio']:.3f}; "
        f"by the training thread's CPU time {result['thread_cpu_ratio_median']:.3f} "
        f"and {result['thread_cpu_control_ratio']:.3f}",
        f"step() before the target {result['step_us_median']:.1f} us; "
        f"the end of an epoch {result['epoch_end_seconds'] * 1e3:.0f} ms",
    ]
    emit(args, result, lines, lambda figure: draw(figure, result))
    return 0


def draw(figure: Any, result: dict[str, Any]) -> None:
    """Every pair's ratio, and the control's."""
    axes = figure.subplots()
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.plot(result["ratios"], "o", label="with the optimizer")
    axes.plot(result["controls"], "x", label="plain again (control)")
    axes.set_title(f"{result['params'] / 1e6:.0f}M parameters, with the optimizer beside plain PyTorch")
    axes.set_xlabel("pair of measurements")
    axes.set_ylabel("samples/s over plain PyTorch's")
    whole(axes.xaxis)
    axes.legend()
