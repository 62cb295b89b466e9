"""Is the optimizer's way between device and rounds right, small and asynchronous?"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from p2pavg import CollaborativeOptimizer, codecs
from p2pavg.allreduce.encoded import EncodedResult, Layout
from p2pavg.allreduce.encoding import HostGradient
from p2pavg.allreduce.feedback import Residual
from p2pavg.bench.accumulate import NEVER
from p2pavg.codecs import cuda as device
from p2pavg.optim.gradients.path import CudaPath
from p2pavg.optim.gradients.vectors import all_finite, clip_norm
from p2pavg.plan.part import Part

MIB = 1 << 20


def _layout(numel: int, chunk: int, codec: codecs.Codec) -> Layout:
    third = numel // 3 + 7
    counts = [third, 0, third, numel - 2 * third]
    starts = np.concatenate([[0], np.cumsum(counts)])[:-1].tolist()
    return Layout(tuple(Part(0, s, c) for s, c in zip(starts, counts, strict=True)), chunk, codec)


def _encoded(values: np.ndarray, layout: Layout, scale: float) -> np.ndarray:
    out, at = np.zeros(layout.nbytes, np.uint8), 0
    for start, count in layout.chunks():
        size = layout.codec.encoded_size(count)
        layout.codec.encode(values[start : start + count], out[at : at + size], scale)
        at += size
    return out


def check_bits() -> dict[str, Any]:
    """Contributions have the CPU's bytes and results the CPU's floats, behind a busy training stream."""
    numel, chunk = 30_000_011, 1 << 17
    place, x = torch.device("cuda", 0), torch.randn(30_000_011, device="cuda")
    for name in codecs.WIRE_IDS:
        codec = codecs.get(name)
        path, layout = CudaPath(place, numel, codec), _layout(numel, chunk, codec)
        parts = [(part.start, part.count) for part in layout.parts]
        torch.cuda._sleep(20_000_000)
        y = x * 3  # still to come when encoding is asked for
        encoding = path.gradient(y).encode(codec, parts, chunk, 0.37)
        y = None
        seen = []
        while not seen or seen[-1] < sum(1 for _ in layout.chunks()):
            seen.append(encoding.chunks_done())
        assert encoding.finite()
        assert seen == sorted(seen)
        host = (x * 3).cpu().numpy()
        assert (encoding.data == _encoded(host, layout, 0.37)).all(), f"{name}: other bytes than the CPU's"
        whole = path.gradient(x).encode(codec, [(0, numel)], numel, 0.37)  # as a peer that leaves does
        assert whole.finite()
        alone = np.empty(codec.encoded_size(numel), np.uint8)
        codec.encode(x.cpu().numpy(), alone, 0.37)
        assert (whole.data == alone).all(), f"{name}: other bytes in one chunk"
        result, expected = EncodedResult(layout, encoding.data), np.empty(numel, np.float32)
        result.decode_into(expected)
        target = torch.full((numel,), float("nan"), device="cuda")
        path.decode(result, target)
        assert (target.cpu().numpy() == expected).all(), f"{name}: other floats than the CPU's"
        bad = x.clone()
        bad[numel - 1] = float("inf")
        assert not path.gradient(bad).encode(codec, parts, chunk, 1.0).finite(), f"{name}: infinity unseen"
    return {"codecs": list(codecs.WIRE_IDS), "numel": numel}


def check_feedback() -> dict[str, Any]:
    """int8 and int4 with their residuals: the device's bytes and residuals are the CPU's, and over epochs of
    changing weights nothing is lost; by chance, the device encodes, each epoch anew.
    """
    numel, chunk = 3_000_017, 1 << 17
    place, x = torch.device("cuda", 0), torch.randn(numel, device="cuda")
    x[1000:3000] = 0
    host, off, tops = x.cpu().numpy(), {}, {"int8": 127, "int4": 7}
    for name, top in tops.items():
        codec = codecs.get(name)
        layout, path = _layout(numel, chunk, codec), CudaPath(place, numel, codec)
        parts = [(part.start, part.count) for part in layout.parts]
        here, there = Residual(numel), Residual(numel, path.allocate)
        total, exact = np.zeros(numel), np.zeros(numel)
        for epoch in range(30):
            share = (0.9, 0.05, 0.4)[epoch % 3]
            by_host = HostGradient(host, partial(here.encode, share=share), path.allocate)
            by_device = path.gradient(x).with_feedback(there.owed(share))
            found = [it.encode(codec, parts, chunk, 0.37) for it in (by_host, by_device)]
            assert all(it.finite() for it in found)
            assert all(it.whole() for it in found)
            assert (found[0].data == found[1].data).all(), f"{name}: other bytes than the CPU's"
            kept = [it.owed(share).after for it in (here, there)]
            assert (kept[0] == kept[1]).all(), f"{name}: other residuals than the CPU's"
            if epoch % 4:  # every fourth attempt fails
                here.commit(), there.commit()
                values = np.empty(numel, np.float32)
                EncodedResult(layout, found[1].data).decode_into(values)
                total += share * values
                exact += share * (host * np.float32(0.37)).astype(np.float64)
        off[name] = float(np.abs(total - exact).max()) / (0.37 * float(np.abs(host).max()) / top)
        assert off[name] < 0.6, f"{name}: {off[name]} steps are lost"
    moved = Residual(numel)  # of a model that was on the CPU before
    encoding = path.gradient(x).with_feedback(moved.owed(0.4)).encode(codec, parts, chunk, 0.37)
    alone = HostGradient(host, partial(Residual(numel).encode, share=0.4), path.allocate)
    expected = alone.encode(codec, parts, chunk, 0.37)
    assert encoding.finite() == expected.finite()
    assert (encoding.data == expected.data).all(), "other bytes than the CPU's from ordinary memory"
    int8 = codecs.get("int8")
    layout, path = _layout(numel, chunk, int8), CudaPath(place, numel, int8)
    chance = codecs.StochasticInt8(seed=5)
    for epoch in (1, 2):
        drawn = path.gradient(x).encode(chance.at(epoch, 0), parts, chunk, 0.37)
        assert drawn.finite()
        expected, at = np.zeros(layout.nbytes, np.uint8), 0
        for start, count in layout.chunks():
            size = int8.encoded_size(count)
            chance.at(epoch, start).encode(host[start : start + count], expected[at : at + size], 0.37)
            at += size
        assert (drawn.data == expected).all(), "other draws than the CPU's"
    return {"epochs": 30, "steps_off": off}


def check_vectors() -> dict[str, Any]:
    """The finite check and clipping on the device: as on the CPU, and the norm near float64's."""
    x = torch.randn(50_000_001, device="cuda")
    host = x.cpu().numpy()
    assert all_finite(x)
    for at in (0, 12_345_678, len(x) - 1):
        for bad in (float("nan"), float("inf")):
            y = x.clone()
            y[at] = bad
            assert not all_finite(y)
    assert all_finite(torch.full((5_000_000,), 3e38, device="cuda"))
    clip_norm(host, 0.5)
    clip_norm(x, 0.5)
    norm = float(x.double().norm())
    assert abs(norm - 0.5) < 1e-6
    return {"equal_bits": bool((x.cpu().numpy() == host).all()), "norm": norm}


def _wrap(model: nn.Module, target: int, **options: Any) -> CollaborativeOptimizer:
    return CollaborativeOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3),
        run_id=f"gpu-path-{random.getrandbits(64):x}",
        target_batch_size=target,
        batch_size_per_step=4,
        initial_peers=[],
        listen="127.0.0.1:0",
        **options,
    )


def _chain(params: int) -> nn.Sequential:
    width = 4096
    with torch.device("cuda"):
        return nn.Sequential(*[nn.Linear(width, width) for _ in range(params // (width * width))])


def _used() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def check_memory() -> dict[str, Any]:
    """Beyond the gradients' own buffer, wrapping and whole epochs take device memory for chunks alone."""
    found = {}
    for params in (50_000_000, 400_000_000):
        model = _chain(params)
        size = 4 * sum(p.numel() for p in model.parameters())
        x = torch.randn(4, 4096, device="cuda")
        model(x).square().mean().backward()
        gradients = 4 * sum(p.grad.numel() for p in model.parameters() if p.grad is not None)
        torch.cuda.empty_cache()
        before = _used()
        opt = _wrap(model, 8)
        torch.cuda.empty_cache()
        wrapped = _used() - before
        torch.cuda.reset_peak_memory_stats()
        at_rest = torch.cuda.memory_allocated()
        for _ in range(4):
            model(x).square().mean().backward()
            opt.step()
        peak = torch.cuda.max_memory_allocated() - at_rest
        assert opt.epoch == 2
        found[str(params)] = {
            "gradient_bytes": gradients,
            "parameter_bytes": size,
            "wrapping_bytes": wrapped,
            "peak_allocated_in_epochs": peak,
        }
        opt.close()
        del model, opt, x
        torch.cuda.empty_cache()
    extra = [entry["wrapping_bytes"] for entry in found.values()]
    # Plain gradients are gone when the buffer comes: what is left is staging, streams and rounding.
    assert max(extra) <= 4 * 8 * MIB + 64 * MIB, f"wrapping takes {extra} bytes"
    peaks = [entry["peak_allocated_in_epochs"] for entry in found.values()]
    # With what autograd holds of a layer or two, 64 MiB each.
    assert max(peaks) <= 256 * MIB, f"epochs take {peaks} bytes"
    return found


def check_asynchronous() -> dict[str, Any]:
    """step() before the target returns while the device still computes the microbatch, scaler or not."""
    model = _chain(50_000_000)
    x = torch.randn(4, 4096, device="cuda")
    found = {}
    with _wrap(model, NEVER) as opt:
        for _ in range(3):
            model(x).square().mean().backward()
            opt.step()
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)  # about 0.2 s
        model(x).square().mean().backward()
        done = torch.cuda.Event()
        done.record()
        begun = time.perf_counter()
        opt.step()
        elapsed = time.perf_counter() - begun
        assert not done.query(), "the device had finished: nothing was shown"
        found["step_seconds"] = elapsed
        assert elapsed < 0.05
    return found


def check_scaler() -> dict[str, Any]:
    """Under a GradScaler the same, and an inf is found later: this peer's share of the epoch is dropped."""
    model = _chain(50_000_000)
    x = torch.randn(4, 4096, device="cuda")
    found = {}
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    with _wrap(model, NEVER) as opt:
        for _ in range(3):
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(opt)
            scaler.update()
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)
        scaler.scale(model(x).square().mean()).backward()
        done = torch.cuda.Event()
        done.record()
        begun = time.perf_counter()
        scaler.step(opt)
        scaler.update()
        found["step_seconds"] = time.perf_counter() - begun
        found["synchronised"] = bool(done.query())
        counted = opt._training.samples()
        scaler.scale(model(x).square().mean() * float("inf")).backward()
        scaler.step(opt)
        scaler.update()
        for _ in range(3):
            torch.cuda.synchronize()
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(opt)
            scaler.update()
        assert opt._training.samples() < counted, "the samples of the bad microbatch still count"
        assert opt._flat.total(1.0) is not None, "inf is still in the sums"
    assert not found["synchronised"], "step() under a GradScaler waited for the device"
    return found


def rates() -> dict[str, Any]:
    """Seconds of a contribution's way to the host and a result's way back, beside pinned copies."""
    numel, chunk, codec = 1 << 28, 1 << 17, codecs.get("fp16")
    x = torch.randn(numel, device="cuda")
    path, layout = CudaPath(x.device, numel, codec), Layout((Part(0, 0, numel),), chunk, codec)
    nbytes = layout.nbytes
    pinned, packed = (
        torch.empty(nbytes, dtype=torch.uint8, pin_memory=True),
        torch.empty(nbytes, dtype=torch.uint8, device="cuda"),
    )
    seconds: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.setdefault(name, []).append(time.perf_counter() - begun)

    for _ in range(7):
        timed("copy to host", lambda: pinned.copy_(packed, non_blocking=True))
        timed("contribution", lambda: path.gradient(x).encode(codec, [(0, numel)], chunk, 0.5).finite())
        timed("copy to device", lambda: packed.copy_(pinned, non_blocking=True))
        encoding = path.gradient(x).encode(codec, [(0, numel)], chunk, 0.5)
        encoding.finite()
        result = EncodedResult(layout, encoding.data)
        timed("result", lambda result=result: path.decode(result, x))
        timed("finite check", lambda: all_finite(x))
    best = {name: sorted(values)[len(values) // 2] for name, values in seconds.items()}
    return {
        "encoded_bytes": nbytes,
        "median_seconds": best,
        "to_host_of_copy": best["copy to host"] / best["contribution"],
        "to_device_of_copy": best["copy to device"] / best["result"],
        "device_bytes": path.staging.device_bytes,
        "chunk_bytes": device.SLOT_BYTES,
    }


CHECKS: tuple[Callable[[], dict[str, Any]], ...] = (
    check_bits,
    check_feedback,
    check_vectors,
    check_memory,
    check_asynchronous,
    check_scaler,
    rates,
)
