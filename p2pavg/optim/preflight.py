"""A forecast of the memory that offload takes, made before anything is allocated."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from p2pavg import codecs
from p2pavg.allreduce import feedback
from p2pavg.codecs import cuda as device
from p2pavg.errors import ConfigurationError
from p2pavg.optim.outer.settings import Outer

PROBE = (64, 64)  # the shape of the parameter on which an optimizer shows what state it keeps
RESIDUAL = 2 * feedback.BYTES  # per element: one residual of the last commit, one of the attempt under way
MARGIN = 1.02  # factor for alignment, small buffers and allocators


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes that offload takes beyond the process's memory now, by purpose."""

    host: dict[str, int]
    device: dict[str, int]

    @property
    def host_bytes(self) -> int:
        return int(MARGIN * sum(self.host.values()))

    @property
    def device_bytes(self) -> int:
        return int(MARGIN * sum(self.device.values()))


def forecast(
    numel: int,
    state_bytes: float,
    wire_bytes: float,
    *,
    accelerator: bool,
    sent_bytes: float = 0,
    live_bytes: int = 4,
    gradient_bytes: int = 4,
    gradients_held: int = 0,
    delayed: bool = False,
) -> Forecast:
    """Offload of `numel` parameters.

    state_bytes: what the optimizer keeps, wire_bytes: what a result takes, sent_bytes: what is held of
    contributions, live_bytes, gradient_bytes: what the model and its sums take, all per parameter.
    gradients_held: bytes of `.grad` now, which are let go. delayed: a round's result may still be in use when
    the next round begins.
    """
    sums = {"gradient sums": max(0, 2 * gradient_bytes * numel - gradients_held)}
    host = {"master parameters": 4 * numel, "optimizer state": int(state_bytes * numel)}
    if not accelerator:
        results = 2 if delayed else 1
        return Forecast(host | sums | {"rounds": int((results * wire_bytes + sent_bytes) * numel)}, {})
    host |= {"averages": 4 * numel, "rounds": int((2 * wire_bytes + sent_bytes) * numel)}
    if live_bytes != 4:
        host["rounded parameters"] = live_bytes * numel
    return Forecast(host, sums | {"staging": device.SLOTS * device.SLOT_BYTES})


def forecast_of_outer_steps(
    numel: int,
    state_bytes: float,
    round_bytes: float,
    *,
    outer: Outer,
    accelerator: bool,
    live_bytes: int = 4,
) -> Forecast:
    """Offload with outer steps. round_bytes: what rounds take, and live_bytes: the model, per parameter."""
    vectors = 2 + bool(outer.momentum) + 2 * bool(outer.overlap)  # θ_ref, Δ, velocity, an outer step ahead
    host = {
        "master parameters": 4 * numel,
        "optimizer state": int(state_bytes * numel),
        "outer steps": 4 * vectors * numel,
        "rounds": int(round_bytes * numel),
    }
    if accelerator:
        host["gradients"] = live_bytes * numel
        if live_bytes != 4:
            host["rounded parameters"] = live_bytes * numel
    return Forecast(host, {})


def state_bytes_per_parameter(optimizer: torch.optim.Optimizer) -> float:
    """Bytes of state per element that the optimizer keeps for a float32 parameter of PROBE's shape."""
    param = torch.nn.Parameter(torch.zeros(PROBE, dtype=torch.float32, device="cpu"))
    param.grad = torch.ones_like(param)
    probe: Any = object.__new__(type(optimizer))
    probe.__dict__.update(optimizer.__dict__)  # copy.copy() would leave out what a subclass added
    probe.state = defaultdict(dict)
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    probe.param_groups = [{**group, "params": [param], "capturable": False, "fused": None}]
    probe._optimizer_step_pre_hooks = OrderedDict()
    probe._optimizer_step_post_hooks = OrderedDict()
    type(optimizer).step(probe)
    kept = [value for value in probe.state[param].values() if isinstance(value, torch.Tensor)]
    return sum(value.numel() * value.element_size() for value in kept) / param.numel()


def host_available() -> int | None:
    """Bytes that this process can still take; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    facts = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    available = facts.get("MemAvailable")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    if not limit.isdigit() or available is None:
        return available
    return min(available, max(0, int(limit) - used))


def device_available(place: torch.device) -> int | None:
    """Bytes that this process can still take on an accelerator; None where it does not tell."""
    if place.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(place)
    return int(free) + torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)


def check(
    optimizer: torch.optim.Optimizer,
    compression: str | codecs.Codec,
    grad_dtype: torch.dtype | None,
    *,
    delayed: bool,
    outer: Outer | None = None,
) -> Forecast:
    """The forecast for this optimizer. Raises ConfigurationError, with numbers, when it does not fit."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    places = {param.device for param in params if param.device.type != "cpu"}
    numel = sum(param.numel() for param in params)
    codec = codecs.get(compression)
    state_bytes, wire_bytes = state_bytes_per_parameter(optimizer), _wire_bytes(codecs.for_results(codec))
    live_bytes = _mean([param.element_size() for param in params], params)
    if outer is not None:
        round_bytes = wire_bytes + _sent_bytes(codec, accelerator=False)
        expected = forecast_of_outer_steps(
            numel, state_bytes, round_bytes, outer=outer, accelerator=bool(places), live_bytes=live_bytes
        )
    else:
        expected = forecast(
            numel,
            state_bytes,
            wire_bytes,
            accelerator=bool(places),
            sent_bytes=_sent_bytes(codec, bool(places)),
            live_bytes=live_bytes,
            gradient_bytes=_mean([_gradient_size(param, grad_dtype) for param in params], params),
            gradients_held=sum(p.grad.numel() * p.grad.element_size() for p in params if p.grad is not None),
            delayed=delayed,
        )
    _compare("host", expected.host, expected.host_bytes, host_available())
    for place in places:
        _compare(str(place), expected.device, expected.device_bytes, device_available(place))
    return expected


def _wire_bytes(codec: codecs.Codec) -> float:
    return codec.encoded_size(1 << 17) / (1 << 17)


def _sent_bytes(codec: codecs.Codec, accelerator: bool) -> float:
    """Bytes of contributions that are held, per parameter; 0 on the host, which encodes them while they
    leave.
    """
    encoded = _wire_bytes(codec)
    if codecs.has_feedback(codec):
        return RESIDUAL + encoded + (4 if accelerator else 0)
    return encoded if accelerator or isinstance(codec, codecs.StochasticInt8) else 0


def _gradient_size(param: torch.Tensor, grad_dtype: torch.dtype | None) -> int:
    half = param.dtype in (torch.float16, torch.bfloat16)
    return grad_dtype.itemsize if half and grad_dtype is not None else param.element_size()


def _mean(sizes: Sequence[int], params: Sequence[torch.Tensor]) -> int:
    whole = sum(param.numel() for param in params)
    total = sum(size * param.numel() for size, param in zip(sizes, params, strict=True))
    return -(-total // whole) if whole else 4


def _compare(where: str, parts: dict[str, int], needed: int, available: int | None) -> None:
    if available is None or needed <= available:
        return
    told = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
    raise ConfigurationError(
        f"offload_optimizer=True needs {needed / 1e9:.2f} GB more memory on {where} ({told}), and "
        f"{available / 1e9:.2f} GB are free: use a smaller model or optimizer state, or free memory"
    )
