"""The codecs on CUDA devices, and the way of a gradient between a device and host memory.

Bytes equal those of `codecs` to the bit. A flat float32 tensor is encoded as runs: `parts` of (start, count)
elements, each cut into chunks of `chunk` elements (the last of a part may be shorter), one encoded chunk
after the other without gaps. No call waits for the device, except where its docstring says so.

Only for built-in codecs, and only when `native.cuda()` is there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from p2pavg import native
from p2pavg.codecs import Codec, StochasticInt8, is_built_in, is_sparse
from p2pavg.native import compiled_cuda

U8: TypeAlias = npt.NDArray[np.uint8]
Parts: TypeAlias = Sequence[tuple[int, int]]
Feedback: TypeAlias = tuple[U8, U8, float]  # owed, kept and share of `codecs.encode_feedback`

SLOT_BYTES = 8 << 20
SLOTS = 4
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def usable(codec: Codec) -> bool:
    """Whether this codec runs on CUDA devices here."""
    return is_built_in(codec) and not is_sparse(codec) and native.cuda() is not None


def encode(
    codec: Codec, src: torch.Tensor, dst: torch.Tensor, scale: float, chunk: int, flag: torch.Tensor
) -> None:
    """dst <- encoded chunks of src·scale, enqueued on the current stream of src's device.

    src: float32[n]; dst: uint8 on the same device; flag: int32[1] there, set to 1 when a value is not finite.
    """
    n = _flat(src, torch.float32)
    _room(dst, encoded_bytes(codec, [(0, n)], chunk), src.device)
    compiled_cuda.encode(
        codec.wire_id,
        src.data_ptr(),
        n,
        chunk,
        scale,
        dst.data_ptr(),
        _flag(flag, src),
        _stream(src),
        _draws(codec),
    )


def decode(codec: Codec, src: torch.Tensor, dst: torch.Tensor, scale: float, chunk: int) -> None:
    """dst <- decoded chunks of src, times scale. src: uint8; dst: float32[n] on the same device."""
    n = _flat(dst, torch.float32)
    _room(src, encoded_bytes(codec, [(0, n)], chunk), dst.device)
    compiled_cuda.decode(
        codec.wire_id, src.data_ptr(), n, chunk, scale, False, dst.data_ptr(), 0, _stream(dst)
    )


def decode_add(
    codec: Codec, src: torch.Tensor, acc: torch.Tensor, weight: float, chunk: int, flag: torch.Tensor
) -> None:
    """acc += weight · decoded chunks of src; flag is set to 1 when a term is not finite."""
    n = _flat(acc, torch.float32)
    _room(src, encoded_bytes(codec, [(0, n)], chunk), acc.device)
    compiled_cuda.decode(
        codec.wire_id, src.data_ptr(), n, chunk, weight, True, acc.data_ptr(), _flag(flag, acc), _stream(acc)
    )


def accumulate(
    src: Sequence[torch.Tensor], dst: Sequence[torch.Tensor], scale: float, flag: torch.Tensor
) -> None:
    """dst[i] += src[i]·scale for all i in a few launches, whatever their number.

    src: contiguous float32, float16 or bfloat16; dst: contiguous float32 of the same sizes, on one device.
    flag: int32[1] there, set to 1 when a term is not finite.
    """
    groups: dict[torch.dtype, tuple[list[int], list[int], list[int]]] = {}
    for one, other in zip(src, dst, strict=True):
        n = _flat(other.view(-1), torch.float32)
        if (
            one.numel() != n
            or one.device != other.device
            or not one.is_contiguous()
            or one.dtype not in _TYPES
        ):
            raise ValueError(f"cannot add {one.dtype}[{one.numel()}] on {one.device} to float32[{n}]")
        pointers, targets, counts = groups.setdefault(one.dtype, ([], [], []))
        pointers.append(one.data_ptr())
        targets.append(other.data_ptr())
        counts.append(n)
    for dtype, (pointers, targets, counts) in groups.items():
        compiled_cuda.accumulate(
            pointers, targets, counts, _TYPES[dtype], scale, _flag(flag, dst[0]), _stream(dst[0])
        )


def rescale(data: torch.Tensor, wanted: torch.Tensor, current: torch.Tensor) -> None:
    """data *= wanted / current, then current <- wanted; next to nothing where they are equal.

    data: float32[n]; wanted, current: float32 with one element each, on the same device.
    """
    n = _flat(data, torch.float32)
    compiled_cuda.rescale(data.data_ptr(), n, _scalar(wanted, data), _scalar(current, data), _stream(data))


class ClearUnless:
    """data <- 0 unless a flag is 0, at every step of a training loop: what stays the same is looked at once.

    data: float32[n]; told: one float32 each, in page-locked host memory, where the host sees a flag as soon
    as it is written.
    """

    def __init__(self, data: torch.Tensor, told: Sequence[torch.Tensor]) -> None:
        self._size = _flat(data, torch.float32)
        self._data = data  # held: its memory is written to
        self._told = told
        self._pointers = [one.data_ptr() for one in told]
        self._pointer, self._index = data.data_ptr(), data.device.index
        self._launch = compiled_cuda.clear_if

    def clear(self, flag: torch.Tensor, to: int) -> None:
        """data <- 0 unless flag, one float32 on its device, is 0; told[to] <- flag."""
        pointer = _scalar(flag, self._data)
        self._launch(self._pointer, self._size, pointer, self._pointers[to], _raw_stream(self._index))


def encoded_bytes(codec: Codec, parts: Parts, chunk: int) -> int:
    """Bytes of all encoded chunks."""
    total = 0
    for _, count in parts:
        whole, rest = divmod(count, chunk)
        total += whole * codec.encoded_size(chunk) + (codec.encoded_size(rest) if rest else 0)
    return total


def is_pinned(memory: U8) -> bool:
    """Whether it is page-locked memory, which devices reach."""
    return compiled_cuda.is_pinned(memory.ctypes.data)


class PinnedPool:
    """Page-locked host buffers, which devices reach at full speed; reused, because locking is slow.

    A buffer comes back by itself when nobody refers to it or to a view of it any more. For any thread.
    """

    def __init__(self) -> None:
        self._free: dict[int, U8] = {}  # no lock: a buffer may come back in the midst of anything

    def take(self, nbytes: int) -> U8:
        """uint8[nbytes] of page-locked memory, not cleared."""
        while True:
            fitting = [buffer for buffer in list(self._free.values()) if nbytes <= len(buffer) <= 2 * nbytes]
            if not fitting:
                whole = compiled_cuda.pinned(nbytes)
                break
            best = min(fitting, key=len)
            if self._free.pop(id(best), None) is not None:
                whole = best
                break
        lent = np.frombuffer(memoryview(whole), np.uint8, nbytes)  # views of it keep it, and not `whole`
        weakref.finalize(lent, self._free.__setitem__, id(whole), whole).atexit = False
        return lent


class Transfer:
    """A gradient on its way. Keeps the tensors and arrays that take part alive until it is dropped."""

    def __init__(self, runs: Sequence[compiled_cuda.Transfer], keep: tuple[object, ...]) -> None:
        self._runs = runs
        self._keep = keep

    def chunks_done(self) -> int:
        """Chunks that have arrived, counted from the first; does not wait."""
        return sum(run.done() for run in self._runs)

    def wait(self) -> bool:
        """Wait, without the GIL, until all is in place; True when every value was finite."""
        finite = [run.wait() for run in self._runs]
        return all(finite)

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Let `stream` go on only when the gradient on the device was read (or written) entirely."""
        for run in self._runs:
            run.hold(stream.cuda_stream)


class GradientStaging:
    """Moves flat gradients between one device and host memory; uses SLOTS · SLOT_BYTES of device memory.

    Encoding and copying overlap on two streams of their own. The stream that produced the gradient is neither
    synchronised nor used; call `Transfer.hold` on it before it changes the gradient.
    """

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self._staging = compiled_cuda.Staging(index, SLOT_BYTES, SLOTS)
        self._gate = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # it only waits
        self._one_at_a_time = threading.Lock()

    @property
    def device_bytes(self) -> int:
        """Device memory in use beyond the gradients."""
        return self._staging.device_bytes()

    def download(
        self,
        codec: Codec,
        src: torch.Tensor,
        parts: Parts,
        chunk: int,
        scale: float,
        out: U8,
        after: torch.cuda.Event | None = None,
        feedback: Feedback | None = None,
    ) -> Transfer:
        """out <- encoded chunks of src·scale, after `after`, or what the current stream was given so far.

        src: float32[n] on the device; out: page-locked memory (`PinnedPool`), else copies are slow and the
        call waits for them. feedback, for int8 and int4: bfloat16[n] twice, which must be page-locked: the
        device reads and writes the residuals where they are.
        """
        n = _flat(src, torch.float32)
        _fits(codec, parts, chunk, n, out)
        if feedback is not None and any(len(it) < 2 * n or not is_pinned(it) for it in feedback[:2]):
            raise ValueError(f"residuals of {n} elements in page-locked memory are needed")
        runs, at = [], 0
        with self._one_at_a_time:
            stream = _stream(src)
            if after is not None:
                self._gate.wait_event(after)
                stream = int(self._gate.cuda_stream)
            for start, count in parts:
                runs.append(
                    self._staging.download(
                        codec.wire_id,
                        src.data_ptr() + 4 * start,
                        count,
                        chunk,
                        scale,
                        out.ctypes.data + at,
                        stream,
                        _draws(codec, start),
                        _owing(feedback, start),
                    )
                )
                at += encoded_bytes(codec, [(start, count)], chunk)
        return Transfer(runs, (src, out, feedback, self))

    def upload(
        self, codec: Codec, data: U8, parts: Parts, chunk: int, scale: float, dst: torch.Tensor
    ) -> Transfer:
        """dst <- decoded chunks of data, times scale, after what the current stream was given so far.

        dst: float32[n] on the device. `Transfer.hold` on the stream that reads dst afterwards.
        """
        n = _flat(dst, torch.float32)
        _fits(codec, parts, chunk, n, data)
        runs, at = [], 0
        with self._one_at_a_time:
            for start, count in parts:
                target = dst.data_ptr() + 4 * start
                runs.append(
                    self._staging.upload(
                        codec.wire_id, data.ctypes.data + at, count, chunk, scale, target, _stream(dst)
                    )
                )
                at += encoded_bytes(codec, [(start, count)], chunk)
        return Transfer(runs, (dst, data, self))


def _flat(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    if (
        tensor.device.type != "cuda"
        or tensor.dtype != dtype
        or tensor.dim() != 1
        or not tensor.is_contiguous()
    ):
        raise ValueError(
            f"a flat contiguous {dtype} tensor on a CUDA device is needed, "
            f"not {tensor.dtype}{list(tensor.shape)} on {tensor.device}"
        )
    return tensor.numel()


def _room(tensor: torch.Tensor, nbytes: int, device: torch.device) -> None:
    if tensor.data_ptr() % 16:
        raise ValueError("encoded bytes on a device must start at a multiple of 16 bytes")
    if _flat(tensor, torch.uint8) < nbytes or tensor.device != device:
        raise ValueError(
            f"{nbytes} encoded bytes on {device} are needed, not {tensor.numel()} on {tensor.device}"
        )


def _fits(codec: Codec, parts: Parts, chunk: int, n: int, host: U8) -> None:
    if any(start < 0 or count < 0 or start + count > n for start, count in parts):
        raise ValueError(f"a part lies outside the {n} elements of the gradient")
    need = encoded_bytes(codec, parts, chunk)
    if len(host) < need:
        raise ValueError(f"{need} encoded bytes are needed, but the host buffer has {len(host)}")


def _flag(flag: torch.Tensor, like: torch.Tensor) -> int:
    if flag.dtype != torch.int32 or flag.device != like.device or flag.numel() != 1:
        raise ValueError("the flag must be one int32 on the device of the gradient")
    return flag.data_ptr()


def _scalar(tensor: torch.Tensor, like: torch.Tensor) -> int:
    if tensor.dtype != torch.float32 or tensor.device != like.device or tensor.numel() != 1:
        raise ValueError("one float32 on the device of the gradient is needed")
    return tensor.data_ptr()


def _stream(tensor: torch.Tensor) -> int:
    return _raw_stream(tensor.device.index)


def _current_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


# Torch's own compiled code asks so for the current stream of a device, without an object of it.
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)


def _draws(codec: Codec, start: int = 0) -> tuple[int, int, int] | None:
    return (codec.seed, codec.epoch, codec.first + start) if isinstance(codec, StochasticInt8) else None


def _owing(feedback: Feedback | None, start: int) -> tuple[int, int, float] | None:
    if feedback is None:
        return None
    before, after, share = feedback
    return before.ctypes.data + 2 * start, after.ctypes.data + 2 * start, share
