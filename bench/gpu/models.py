"""The three models of the GPU benchmark, and what the optimizer costs their local training."""

from __future__ import annotations

import copy
import functools
import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import nn

from bench.gpu import with_hivemind
from p2pavg import CollaborativeOptimizer
from p2pavg.bench.accumulate import NEVER, lower_bound
from p2pavg.bench.result import percentile

Loss = Callable[[nn.Module], torch.Tensor]


@dataclass
class Job:
    """A model, one microbatch of it, and words about what it is."""

    model: nn.Module
    loss: Loss
    samples: int
    note: str = ""


def _images(name: str, batch: int) -> Job:
    import torchvision

    with torch.device("cuda"):
        model = getattr(torchvision.models, name)(weights=None)
    model = model.to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,), device="cuda")
    return Job(model, lambda m: nn.functional.cross_entropy(m(images), labels), batch)


class Encoder(nn.Module):
    """A stand-in for XLM-R large: the same number of parameters in the same shapes of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(250_002, 1024)
        layer = nn.TransformerEncoderLayer(1024, 16, 4096, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 24, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.embedding(tokens))
        return nn.functional.linear(hidden, self.embedding.weight)


def language_model(batch: int, length: int = 128) -> Job:
    """XLM-R large with random weights, 560M parameters, masked language modelling."""
    tokens = torch.randint(5, 250_000, (batch, length), device="cuda")
    note = "XLMRobertaForMaskedLM of transformers"
    try:
        from transformers import XLMRobertaConfig, XLMRobertaForMaskedLM

        config = XLMRobertaConfig(
            vocab_size=250_002,
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            max_position_embeddings=514,
            type_vocab_size=1,
        )
        with torch.device("cuda"):
            model: nn.Module = XLMRobertaForMaskedLM(config)
        model.train()

        def loss(m: nn.Module) -> torch.Tensor:
            found: torch.Tensor = m(input_ids=tokens, labels=tokens).loss
            return found

        return Job(model, loss, batch, note)
    except Exception as error:
        note = f"torch.nn.TransformerEncoder of the same size, because of {type(error).__name__}: {error}"
    with torch.device("cuda"):
        model = Encoder()

    def stand_in(m: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(m(tokens).flatten(0, 1), tokens.flatten())

    return Job(model, stand_in, batch, note)


# Microbatches that keep the device busy: with small ones the host, which launches a few thousand kernels for
# each, sets the pace, and swings by a third.
MODELS: dict[str, Callable[[], Job]] = {
    "resnet152": lambda: _images("resnet152", 192),
    "convnext_large": lambda: _images("convnext_large", 96),
    "xlmr_large": lambda: language_model(48),
}


def twin_of(model: nn.Module) -> nn.Module:
    """The same weights in the same memory, as other Parameters: nothing hooked on ours is seen there."""
    twin = copy.deepcopy(model)
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        mine.data = theirs.data
    return twin


@dataclass
class Times:
    """One kind of block, turn by turn."""

    wall: list[float] = field(default_factory=list)  # seconds, with the device synchronised
    device: list[float] = field(default_factory=list)  # seconds between events on the stream
    ahead: list[float] = field(default_factory=list)  # seconds of the wall for which the host had finished


class Checked(torch.optim.SGD):
    """Has a GradScaler look for inf at each microbatch, as a CollaborativeOptimizer does, and that is all."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> None:
        """Leave the parameters as they are."""


@dataclass
class Local:
    """One model, trained plainly and collaboratively by turns, under float16 autocast. With a GradScaler both
    have it look at the gradients after each microbatch: what that costs is torch's.
    """

    job: Job
    microbatches: int
    scaled: bool  # with a GradScaler
    step_us: list[float] = field(default_factory=list)  # of our own step() alone
    scaler_us: list[float] = field(default_factory=list)  # of scaler.step() and update(), ours inside

    def __post_init__(self) -> None:
        self.plain_model = twin_of(self.job.model)
        self.plain_optimizer = Checked(self.plain_model.parameters(), lr=0.0)
        self.scalers = [torch.amp.GradScaler("cuda", enabled=self.scaled) for _ in range(2)]

    def _backward(self, model: nn.Module, scaler: torch.amp.GradScaler) -> None:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.job.loss(model)
        scaler.scale(loss).backward()

    def plain(self) -> None:
        """One accumulation of plain PyTorch, without its optimizer's step."""
        for _ in range(self.microbatches):
            self._backward(self.plain_model, self.scalers[0])
            if self.scaled:
                self.scalers[0].step(self.plain_optimizer)
                self.scalers[0].update()
        self.plain_optimizer.zero_grad()

    def local(self, optimizer: CollaborativeOptimizer) -> None:
        """The same under the optimizer, with the clearing of the buffer that ends every epoch."""
        scaler, own = self.scalers[1], optimizer.step

        @functools.wraps(own)
        def step(*args: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            result = own(*args, **options)
            self.step_us.append((time.perf_counter() - begun) * 1e6)
            return result

        optimizer.step = step  # type: ignore[method-assign]
        for _ in range(self.microbatches):
            self._backward(self.job.model, scaler)
            begun = time.perf_counter()
            if self.scaled:
                scaler.step(optimizer)
                scaler.update()
                self.scaler_us.append((time.perf_counter() - begun) * 1e6)
            else:
                optimizer.step()
            optimizer.zero_grad()
        del optimizer.step
        optimizer.discard()

    def hivemind(self, optimizer: Any, reuse: bool) -> None:
        """The same under Hivemind."""
        for _ in range(self.microbatches):
            self._backward(self.job.model, self.scalers[1])
            optimizer.step()
            if not reuse:
                optimizer.zero_grad()
        with_hivemind.clear(optimizer)

    def timed(self, block: Callable[[], None], times: Times) -> float:
        """Run a block between two synchronisations; seconds by the wall clock."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begun = time.perf_counter()
        first.record()
        block()
        last.record()
        queued = time.perf_counter()
        torch.cuda.synchronize()
        ended = time.perf_counter()
        times.wall.append(ended - begun)
        times.device.append(first.elapsed_time(last) / 1e3)
        times.ahead.append(ended - queued)
        return ended - begun

    def turns(self, blocks: dict[str, Callable[[], None]], pairs: int, until: float) -> dict[str, Times]:
        """All blocks in turn, in an order that changes each time; at least 3 turns, none after `until`."""
        for _ in range(2):
            for block in blocks.values():
                self.timed(block, Times())
        self.step_us.clear()
        self.scaler_us.clear()
        found = {name: Times() for name in blocks}
        names = list(blocks)
        gc.collect()
        gc.disable()  # a collection in the middle of a block would be that block's
        try:
            for pair in range(pairs):
                if pair >= 3 and time.monotonic() > until:
                    break
                for name in names if pair % 2 == 0 else reversed(names):
                    self.timed(blocks[name], found[name])
                    gc.collect(0)
                names.append(names.pop(0))
        finally:
            gc.enable()
        return found

    def wrapped(self, target: int, **options: Any) -> CollaborativeOptimizer:
        return CollaborativeOptimizer(
            torch.optim.SGD(self.job.model.parameters(), lr=0.0),
            run_id=f"bench-gpu-{random.getrandbits(64):x}",
            target_batch_size=target,
            batch_size_per_step=self.job.samples,
            initial_peers=[],
            listen="127.0.0.1:0",
            **options,
        )

    def boundaries(self, count: int, **options: Any) -> list[float]:
        """Seconds of the step()s that end an epoch of one peer, the device synchronised before and after."""
        seconds: list[float] = []
        with self.wrapped(self.job.samples * 2, **options) as optimizer:
            while len(seconds) < count + 1:  # the first allocates
                self._backward(self.job.model, self.scalers[1])
                epoch = optimizer.epoch
                elapsed = self.timed(optimizer.step, Times())
                if optimizer.epoch > epoch or options.get("delay_updates"):
                    seconds.append(elapsed)
        return seconds[1:]


def ratios(plain: list[float], other: list[float]) -> list[float]:
    """By how much plain PyTorch is faster (under 1) or slower, turn by turn."""
    return [a / b for a, b in zip(plain, other, strict=True)]


def measure(job: Job, microbatches: int, pairs: int, scaled: bool, until: float) -> dict[str, Any]:
    """Plain PyTorch, ours, and plain PyTorch again as control."""
    local = Local(job, microbatches, scaled)
    memory = torch.cuda.memory_allocated()
    with local.wrapped(NEVER) as optimizer:
        found = local.turns(
            {"plain": local.plain, "local": lambda: local.local(optimizer), "control": local.plain},
            pairs,
            until,
        )
    plain, ours, control = (found[name] for name in ("plain", "local", "control"))
    return {
        "parameters": sum(p.numel() for p in job.model.parameters()),
        "note": job.note,
        "samples_per_microbatch": job.samples,
        "microbatches_per_block": microbatches,
        "grad_scaler": scaled,
        "pairs": len(ours.wall),
        "plain_sps": job.samples * microbatches / median(plain.wall),
        "local_sps": job.samples * microbatches / median(ours.wall),
        "ratio_median": median(ratios(plain.wall, ours.wall)),
        "ratio_low95": lower_bound(ratios(plain.wall, ours.wall)),
        "control_ratio": median(ratios(plain.wall, control.wall)),
        "control_low95": lower_bound(ratios(plain.wall, control.wall)),
        "device_ms_per_microbatch": {k: median(t.device) / microbatches * 1e3 for k, t in found.items()},
        "device_ratio_median": median(ratios(plain.device, ours.device)),
        "device_ratio_low95": lower_bound(ratios(plain.device, ours.device)),
        "device_control_ratio": median(ratios(plain.device, control.device)),
        "host_ahead_ms": {k: median(t.ahead) * 1e3 for k, t in found.items()},
        "step_us_median": median(local.step_us),
        "step_us_p99": percentile(local.step_us, 99),
        "scaler_us_median": median(local.scaler_us) if scaled else 0.0,
        "memory_before_wrapping": memory,
        "memory_peak": torch.cuda.max_memory_allocated(),
        "ratios": ratios(plain.wall, ours.wall),
        "controls": ratios(plain.wall, control.wall),
    }


def measure_hivemind(job: Job, microbatches: int, pairs: int, reuse: bool, until: float) -> dict[str, Any]:
    """Plain PyTorch and Hivemind, with p2pavg's optimizer closed."""
    local = Local(job, microbatches, scaled=False)
    with with_hivemind.wrapped(job.model.parameters(), job.samples, reuse) as optimizer:
        blocks = {"plain": local.plain, "hivemind": lambda: local.hivemind(optimizer, reuse)}
        found = local.turns(blocks, pairs, until)
    for param in job.model.parameters():
        param.grad = None
    plain, theirs = found["plain"], found["hivemind"]
    return {
        "reuse_grad_buffers": reuse,
        "pairs": len(theirs.wall),
        "plain_sps": job.samples * microbatches / median(plain.wall),
        "hivemind_sps": job.samples * microbatches / median(theirs.wall),
        "ratio_median": median(ratios(plain.wall, theirs.wall)),
        "ratio_low95": lower_bound(ratios(plain.wall, theirs.wall)),
        "device_ratio_median": median(ratios(plain.device, theirs.device)),
        "host_ahead_ms": median(theirs.ahead) * 1e3,
        "ratios": ratios(plain.wall, theirs.wall),
    }


def boundary(job: Job) -> dict[str, Any]:
    """What the end of an epoch of one peer costs, waiting, and delayed (handing in and taking over)."""
    local = Local(job, 1, scaled=False)
    return {
        "waiting_seconds": local.boundaries(3),
        "delayed_seconds_per_step": local.boundaries(6, delay_updates=True, delay_warmup_epochs=0),
    }


def forget() -> None:
    """Give memory back before the next model."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
