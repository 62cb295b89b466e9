"""Are the CUDA kernels right? Each check compares with the CPU to the bit, or with float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from p2pavg import codecs
from p2pavg.codecs import cuda as device

NAMES = tuple(codecs.WIRE_IDS)
POISON = 0xA5


def inputs(seed: int) -> Iterator[tuple[str, np.ndarray, int]]:
    """(what, float32 vector, elements per chunk): many lengths, magnitudes and special values."""
    rng = np.random.default_rng(seed)
    for n, chunk in (
        (1, 1 << 17),
        (1000, 4096),
        (4097, 1000),
        (9001, 1001),
        (13_000, 4097),
        (8192, 4096),
        (300_001, 1 << 17),
        (1 << 20, 1 << 16),
    ):
        plain = rng.standard_normal(n).astype(np.float32)
        yield f"normal {n}/{chunk}", plain, chunk
        wide = plain * np.exp2(rng.uniform(-148, 120, n))
        yield f"wide {n}/{chunk}", np.clip(wide, -3.4e38, 3.4e38).astype(np.float32), chunk
        bits = rng.integers(0, 2**32, n, dtype=np.uint64).astype(np.uint32).view(np.float32)
        yield f"any bits {n}/{chunk}", bits, chunk
        tops = rng.choice(np.array([3.4028235e38, -3.4028235e38, 1e-45, -0.0, 65520.0], np.float32), n)
        yield f"extremes {n}/{chunk}", tops, chunk
        yield f"zeros {n}/{chunk}", np.zeros(n, np.float32), chunk


def on_cpu(codec: codecs.Codec, x: np.ndarray, chunk: int, scale: float) -> tuple[np.ndarray, bool]:
    """All encoded chunks one after the other, and whether all were finite."""
    pieces, finite = [], True
    for at in range(0, len(x), chunk):
        piece = x[at : at + chunk]
        data = np.zeros(codec.encoded_size(len(piece)), np.uint8)
        one = codec
        if isinstance(codec, codecs.StochasticInt8):
            one = codecs.StochasticInt8(codec.seed, codec.epoch, codec.first + at)
        finite &= one.encode(piece, data, scale)
        pieces.append(data)
    return np.concatenate(pieces), finite


def shifted(x: np.ndarray, shift: int) -> torch.Tensor:
    """x on the device, `shift` elements off a 16-byte boundary."""
    room = torch.empty(len(x) + 4, device="cuda")
    room[shift : shift + len(x)].copy_(torch.from_numpy(x))
    return room[shift : shift + len(x)]


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal to the bit, all NaN being one."""
    nan = np.isnan(a)
    return bool((nan == np.isnan(b)).all() and (a.view(np.uint32) == b.view(np.uint32))[~nan].all())


def check_encode() -> None:
    """Encoded bytes and the finite flag equal the CPU's, for every codec, scale and alignment."""
    extra = codecs.StochasticInt8(seed=5, epoch=9, first=2**32 - 3000)
    for codec in [*map(codecs.get, NAMES), extra]:
        for what, x, chunk in inputs(1):
            for scale, shift in ((1.0, 0), (-1 / 3, 1), (2.0**-60, 0)):
                expected, finite = on_cpu(codec, x, chunk, scale)
                dst = torch.full((len(expected) + 64,), POISON, dtype=torch.uint8, device="cuda")
                flag = torch.zeros(1, dtype=torch.int32, device="cuda")
                device.encode(codec, shifted(x, shift), dst, scale, chunk, flag)
                got = dst.cpu().numpy()
                assert (got[: len(expected)] == expected).all(), f"{codec} {what} {scale} {shift}"
                assert (got[len(expected) :] == POISON).all(), f"{codec} {what}: written beyond the end"
                assert bool(flag.item()) == (not finite), f"{codec} {what} {scale}: flag"


def check_decode() -> None:
    """Decoding, and decoding with addition, give the CPU's bits; hostile bytes too."""
    rng = np.random.default_rng(2)
    for name in NAMES:
        codec = codecs.get(name)
        for what, x, chunk in inputs(3):
            data, _ = on_cpu(codec, x, chunk, 1.0)
            if what.startswith("any bits"):
                data = rng.integers(0, 256, len(data), dtype=np.uint8)
            for scale, shift in ((1.0, 0), (-0.3, 1)):
                _decode_case(codec, data, len(x), chunk, scale, shift, f"{name} {what} {scale} {shift}")


def _decode_case(
    codec: codecs.Codec, data: np.ndarray, n: int, chunk: int, scale: float, shift: int, what: str
) -> None:
    expected, acc = np.empty(n, np.float32), np.linspace(-1, 1, n, dtype=np.float32)
    start, at, finite = acc.copy(), 0, True
    for first in range(0, n, chunk):
        count = min(chunk, n - first)
        piece = data[at : at + codec.encoded_size(count)]
        codec.decode(piece, expected[first : first + count], scale)
        finite &= codec.decode_add(piece, acc[first : first + count], scale)
        at += len(piece)
    src = torch.from_numpy(data).cuda()
    got = shifted(np.full(n, np.nan, np.float32), shift)
    device.decode(codec, src, got, scale, chunk)
    assert same_bits(got.cpu().numpy(), expected), f"decode {what}"
    total = shifted(start, shift)
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    device.decode_add(codec, src, total, scale, chunk, flag)
    assert same_bits(total.cpu().numpy(), acc), f"decode+add {what}"
    assert bool(flag.item()) == (not finite), f"decode+add {what}: flag"


def check_float64() -> None:
    """The encoding error on 16 million normal values is what the documentation of the codecs allows."""
    x = torch.randn(1 << 24, device="cuda")
    reference = x.double() * float(np.float32(0.7))
    for name, bound in (
        ("none", 2.0**-24),
        ("fp16", 2.0**-11),
        ("bf16", 2.0**-8),
        ("int8", 1 / 254),
        ("int4", 1 / 14),
    ):
        codec, chunk = codecs.get(name), 1 << 17
        data = torch.empty(
            device.encoded_bytes(codec, [(0, len(x))], chunk), dtype=torch.uint8, device="cuda"
        )
        y = torch.full_like(x, float("nan"))
        device.encode(codec, x, data, 0.7, chunk, torch.zeros(1, dtype=torch.int32, device="cuda"))
        device.decode(codec, data, y, 1.0, chunk)
        error = (y.double() - reference).abs()
        size = reference.abs()
        if name in ("int8", "int4"):
            size = size.view(-1, 1024).amax(1, keepdim=True).expand(-1, 1024).reshape(-1)
        floor = size.max() * 2.0**-38 if name == "fp16" else 0.0
        assert bool((error <= size * (bound + 2.0**-23) + floor).all()), f"{name}: error above its bound"


def check_accumulate() -> None:
    """The fused accumulation equals float32 arithmetic per tensor, for all dtypes, sizes and alignments."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        sizes = [0, 1, 7, 4096, 4097, 100_003, *([513] * 200)]
        source = torch.randn(sum(sizes) + 1, device="cuda").to(dtype)[1:]
        target = torch.randn(sum(sizes) + 1, device="cuda")[1:]
        src, dst = list(torch.split(source, sizes)), list(torch.split(target.clone(), sizes))
        flag = torch.zeros(1, dtype=torch.int32, device="cuda")
        device.accumulate(src, dst, 0.3, flag)
        scale = torch.tensor(0.3, device="cuda")
        for before, a, b in zip(torch.split(target, sizes), src, dst, strict=True):
            assert torch.equal(b, before + a.float() * scale), f"accumulate {dtype} {a.numel()}"
        assert flag.item() == 0
        src[4][4096] = float("inf")
        device.accumulate(src, dst, 0.3, flag)
        assert flag.item() == 1, f"accumulate {dtype}: an infinity went unnoticed"


def check_scale() -> None:
    """Sums are rescaled when the scale differs, and cleared when the flag is set, else left to the bit."""
    for n in (0, 1, 4097, 10_000_019):
        x = torch.randn(n + 1, device="cuda")[1:]
        wanted, current = torch.tensor(1024.0, device="cuda"), torch.tensor(1024.0, device="cuda")
        y = x.clone()
        device.rescale(y, wanted, current)
        assert torch.equal(x, y), f"rescale by 1: {n}"
        wanted.fill_(300.0)
        device.rescale(y, wanted, current)
        assert torch.equal(y, x * (wanted / 1024.0)), f"rescale: {n}"
        assert current.item() == 300.0
        told = torch.full((1,), -1.0, pin_memory=True)
        clearing = device.ClearUnless(y, [told[0]])
        clearing.clear(torch.zeros((), device="cuda"), 0)
        torch.cuda.synchronize()
        assert told.item() == 0.0, f"a flag of 0 was not told: {n}"
        assert torch.equal(y, x * (wanted / 1024.0)), f"clear without need: {n}"
        clearing.clear(torch.ones((), device="cuda"), 0)
        assert not y.any(), f"clear: {n}"
        assert told.item() == 1.0, f"a flag was not told: {n}"


def check_host_path() -> None:
    """Downloads give the CPU's bytes, uploads its values, part by part, with little device memory."""
    _through_the_host()  # loads the kernels, which stay on the device
    free = _free()
    staging = _through_the_host()
    used = free - _free()
    assert used <= staging.device_bytes + (40 << 20), f"{used} bytes in use"


def _free() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def _through_the_host() -> device.GradientStaging:
    n, chunk = 20_000_003, 1 << 17
    parts = [(0, 5_000_000), (5_000_000, 0), (5_000_000, 1), (5_000_001, n - 5_000_001)]
    x = torch.randn(n, device="cuda")
    host = x.cpu().numpy()
    staging, pool = device.GradientStaging(x.device), device.PinnedPool()
    for codec in map(codecs.get, NAMES):
        out = pool.take(device.encoded_bytes(codec, parts, chunk))
        out[:] = POISON
        transfer = staging.download(codec, x, parts, chunk, 0.7, out)
        transfer.hold(torch.cuda.current_stream())
        y = torch.full_like(x, float("nan"))
        assert transfer.wait()
        assert transfer.chunks_done() == sum(-(-count // chunk) for _, count in parts)
        expected = np.concatenate(
            [on_cpu(codec, host[a : a + count], chunk, 0.7)[0] for a, count in parts if count]
        )
        assert (out == expected).all(), f"download {codec.name}"
        arrival = staging.upload(codec, out, parts, chunk, 0.5, y)
        arrival.hold(torch.cuda.current_stream())
        twice = y * 2  # on the trainer's stream, right behind
        meaning = torch.empty_like(y)
        at = 0
        for a, count in parts:
            size = device.encoded_bytes(codec, [(a, count)], chunk)
            piece = torch.from_numpy(expected[at : at + size].copy()).cuda()
            if count:
                device.decode(codec, piece, meaning[a : a + count], 0.5, chunk)
            at += size
        assert torch.equal(twice, meaning * 2), f"upload {codec.name}"
        del transfer, arrival, out
    bad = x.clone()
    bad[n - 1] = float("nan")
    out = pool.take(device.encoded_bytes(codecs.get("fp16"), parts, chunk))
    assert not staging.download(codecs.get("fp16"), bad, parts, chunk, 1.0, out).wait(), "NaN went unnoticed"
    return staging


CHECKS: tuple[Callable[[], None], ...] = (
    check_encode,
    check_decode,
    check_float64,
    check_accumulate,
    check_scale,
    check_host_path,
)
