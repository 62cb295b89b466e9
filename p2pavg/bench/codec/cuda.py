"""`bench codec --device cuda`: the CUDA kernels against a device copy, and the way to and from the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from p2pavg import codecs, native
from p2pavg.bench.codec.kernel import COPY, Kernel, summary
from p2pavg.bench.progress import progress
from p2pavg.codecs import cuda as device
from p2pavg.errors import ConfigurationError

CHUNK = 1 << 17
TENSORS = 256


@dataclass(frozen=True)
class HostCopy:
    """A way between device and host: `run()` moves `encoded` bytes and returns when they are there."""

    name: str
    encoded: int
    run: Callable[[], object]


def measure(numel: int, rounds: int) -> dict[str, Any]:
    """Median GB/s of each kernel (events) and of each way to the host (wall clock, encoded bytes)."""
    if native.cuda() is None:
        raise ConfigurationError(
            "There is no usable CUDA device, or p2pavg was built without its CUDA module."
        )
    with progress("kernels"):
        rates = _rates(list(kernels(numel)), rounds)
        result = summary("cuda", torch.cuda.get_device_name(), numel, rates)
        result["host"] = _host_rates(list(host_copies(numel)), rounds)
    return result


def kernels(numel: int) -> Iterator[Kernel]:
    """The device copy and every kernel, over `numel` elements."""
    x = torch.randn(numel, device="cuda")
    y = torch.zeros(numel, device="cuda")
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    yield Kernel(COPY, 8 * numel, lambda: y.copy_(x))
    room = device.encoded_bytes(codecs.get("none"), [(0, numel)], CHUNK)
    encoded = torch.zeros(room, dtype=torch.uint8, device="cuda")
    named: list[tuple[str, codecs.Codec]] = [(name, codecs.get(name)) for name in codecs.WIRE_IDS]
    for name, codec in [*named, ("int8 stochastic", codecs.StochasticInt8(1, 1))]:
        yield from _codec_kernels(name, codec, x, y, encoded, flag)
    sizes = _uneven(numel, TENSORS)
    targets = list(torch.split(y, sizes))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        sources = list(torch.split(x.to(dtype), sizes))
        moved = numel * (sources[0].element_size() + 8)
        yield Kernel(
            f"accumulate {str(dtype).removeprefix('torch.')}",
            moved,
            lambda sources=sources: device.accumulate(sources, targets, 1e-6, flag),  # type: ignore[misc]
        )


def _codec_kernels(
    name: str,
    codec: codecs.Codec,
    x: torch.Tensor,
    y: torch.Tensor,
    encoded: torch.Tensor,
    flag: torch.Tensor,
) -> Iterator[Kernel]:
    once = 4 * x.numel() + device.encoded_bytes(codec, [(0, x.numel())], CHUNK)
    yield Kernel(f"encode {name}", once, lambda: device.encode(codec, x, encoded, 0.7, CHUNK, flag))
    if name not in codecs.WIRE_IDS:
        return
    yield Kernel(f"decode {name}", once, lambda: device.decode(codec, encoded, y, 0.7, CHUNK))
    yield Kernel(
        f"decode+add {name}",
        once + 4 * x.numel(),
        lambda: device.decode_add(codec, encoded, y, 1e-6, CHUNK, flag),
    )


def _uneven(numel: int, count: int) -> list[int]:
    """`count` sizes, each a multiple of 16 but the last, from small to large, as layers have them."""
    unit = numel // (count * (count + 1) // 2) // 16 * 16
    sizes = [unit * (i + 1) for i in range(count - 1)]
    return [*sizes, numel - sum(sizes)]


def host_copies(numel: int) -> Iterator[HostCopy]:
    """Plain pinned copies of the encoded bytes, and the same bytes with encoding or decoding on the way."""
    x = torch.randn(numel, device="cuda")
    staging, pool = device.GradientStaging(x.device), device.PinnedPool()
    for name in ("fp16", "int8"):
        yield from _host_copies(name, x, staging, pool)


def _host_copies(
    name: str, x: torch.Tensor, staging: device.GradientStaging, pool: device.PinnedPool
) -> Iterator[HostCopy]:
    codec, parts = codecs.get(name), [(0, x.numel())]
    nbytes = device.encoded_bytes(codec, parts, CHUNK)
    host, packed = pool.take(nbytes), torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    pinned = torch.from_numpy(host)

    def download() -> None:
        staging.download(codec, x, parts, CHUNK, 0.7, host).wait()

    def upload() -> None:
        staging.upload(codec, host, parts, CHUNK, 1.0, x).wait()

    yield HostCopy(f"{name}: copy to host", nbytes, lambda: pinned.copy_(packed, non_blocking=True))
    yield HostCopy(f"{name}: encode, copy to host", nbytes, download)
    yield HostCopy(f"{name}: copy to device", nbytes, lambda: packed.copy_(pinned, non_blocking=True))
    yield HostCopy(f"{name}: decode, copy to device", nbytes, upload)


def _rates(everything: list[Kernel], rounds: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {kernel.name: [] for kernel in everything}
    for repetition in range(rounds + 1):  # the first warms up
        marks = []
        for kernel in everything:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            before.record()
            kernel.run()
            after.record()
            marks.append((kernel.name, before, after))
        torch.cuda.synchronize()
        for name, before, after in marks:
            if repetition:
                seconds[name].append(before.elapsed_time(after) / 1e3)
    return {kernel.name: kernel.moved / median(seconds[kernel.name]) / 1e9 for kernel in everything}


def _host_rates(everything: list[HostCopy], rounds: int) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {copy.name: [] for copy in everything}
    for repetition in range(rounds + 1):
        for copy in everything:
            torch.cuda.synchronize()
            started = time.perf_counter()
            copy.run()
            torch.cuda.synchronize()
            if repetition:
                seconds[copy.name].append(time.perf_counter() - started)
    rates = {copy.name: copy.encoded / median(seconds[copy.name]) / 1e9 for copy in everything}
    rows = []
    for copy in everything:
        plain = f"{copy.name.split(': ')[0]}: {copy.name.split(', ')[-1].split(': ')[-1]}"
        rate = rates[copy.name]
        rows.append({"name": copy.name, "gb_per_s": rate, "fraction_of_copy": rate / rates[plain]})
    return rows
