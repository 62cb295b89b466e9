"""Nested state with tensors inside, as plain data that msgpack carries and one run of bytes. No pickle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from p2pavg.errors import StateError
from p2pavg.rounds.training import PIECE_BYTES

U8 = npt.NDArray[np.uint8]

ALIGN = 64
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.complex64, torch.complex128),
    )
}
MAX_DEPTH = 32


class TreeWriter:
    """Turns trees into plain data, and gathers the bytes of their tensors."""

    def __init__(self) -> None:
        self._tensors: list[tuple[int, torch.Tensor]] = []
        self._end = 0

    def pack(self, value: Any, *, depth: int = 0) -> Any:
        """Pack None, bool, int, float, str, bytes, tensors, and lists, tuples and mappings of them.

        Raises StateError, naming the type, for anything else.
        """
        if depth > MAX_DEPTH:
            raise StateError("optimizer state is nested too deeply to be sent to other peers")
        if value is None or isinstance(value, bool | str | bytes):
            return value
        if isinstance(value, int | float):
            return value.item() if isinstance(value, np.generic) else value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, list | tuple):
            tag = "list" if isinstance(value, list) else "tuple"
            return {tag: [self.pack(item, depth=depth + 1) for item in value]}
        if isinstance(value, Mapping):
            tag = "counter" if isinstance(value, Counter) else "dict"
            items = ((self.pack(k, depth=depth + 1), self.pack(v, depth=depth + 1)) for k, v in value.items())
            return {tag: [list(item) for item in items]}
        raise StateError(
            f"state of type {type(value).__name__} cannot be sent to other peers; "
            "keep it out of the state_dict() of the optimizer and its scheduler"
        )

    def _tensor(self, tensor: torch.Tensor) -> Any:
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in DTYPES or tensor.layout != torch.strided:
            raise StateError(
                f"a {tensor.layout} tensor of dtype {tensor.dtype} cannot be sent to other peers"
            )
        start = self._end
        self._tensors.append((start, tensor))
        self._end += -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN
        return {"tensor": [name, list(tensor.shape), start]}

    @property
    def places(self) -> Sequence[tuple[int, torch.Tensor]]:
        """The tensors in the order of packing, each with the offset of its bytes."""
        return self._tensors

    @property
    def nbytes(self) -> int:
        """Bytes that `copy_to` writes."""
        return self._end

    def copy_to(self, out: U8) -> Iterator[None]:
        """out: uint8[nbytes] <- all packed tensors' bytes, each tensor contiguous at a multiple of 64."""
        target = torch.from_numpy(out)
        for start, tensor in self._tensors:
            size = tensor.numel() * tensor.element_size()
            target[start + size : start + -(-size // ALIGN) * ALIGN] = 0
            if size:
                place = target[start : start + size].view(tensor.dtype)
                yield from _copy(place, tensor.detach())

    def bytes(self) -> U8:
        """A copy of all packed tensors' bytes."""
        out = np.empty(self.nbytes, dtype=np.uint8)
        for _ in self.copy_to(out):
            pass
        return out


def _copy(place: torch.Tensor, tensor: torch.Tensor) -> Iterator[None]:
    """place: flat, of the same dtype."""
    if not tensor.is_contiguous():
        place.view(tensor.shape).copy_(tensor)
        yield
        return
    flat = tensor.view(-1)
    step = PIECE_BYTES // tensor.element_size()
    for at in range(0, flat.numel(), step):
        place[at : at + step].copy_(flat[at : at + step])
        yield


def unpack(data: Any, buffer: U8, *, depth: int = 0) -> Any:
    """The tree that `TreeWriter.pack` was given. Tensors are copies on the CPU.

    Raises StateError when `data` and `buffer` are not what a TreeWriter makes.
    """
    if depth > MAX_DEPTH:
        raise StateError("a state is nested too deeply; the donor's copy, or the checkpoint, is broken")
    if data is None or isinstance(data, bool | int | float | str | bytes):
        return data
    if not isinstance(data, Mapping) or len(data) != 1:
        raise _malformed("no mapping")
    ((tag, body),) = data.items()
    try:
        match tag:
            case "list":
                return [unpack(item, buffer, depth=depth + 1) for item in body]
            case "tuple":
                return tuple(unpack(item, buffer, depth=depth + 1) for item in body)
            case "dict" | "counter":
                pairs = {
                    unpack(key, buffer, depth=depth + 1): unpack(value, buffer, depth=depth + 1)
                    for key, value in body
                }
                return Counter(pairs) if tag == "counter" else pairs
            case "tensor":
                return _untensor(body, buffer)
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError, OverflowError) as error:
        raise _malformed(str(error)) from error
    raise StateError(f"a state has an unknown part {tag!r}; another version of p2pavg wrote it")


def _malformed(why: str) -> StateError:
    return StateError(f"a state is malformed ({why}); the donor's copy, or the checkpoint, is broken")


def _untensor(body: Any, buffer: U8) -> torch.Tensor:
    name, shape, start = body
    dtype = DTYPES[name]
    if any(not isinstance(size, int) or size < 0 for size in (*shape, start)):
        raise ValueError("a negative size")
    numel = int(np.prod(shape, dtype=np.int64)) if shape else 1
    size = numel * dtype.itemsize
    if start + size > len(buffer):
        raise ValueError("a tensor beyond the end")
    out = torch.empty(shape, dtype=dtype, device="cpu")
    if size:
        out.view(-1).view(torch.uint8).copy_(torch.from_numpy(buffer[start : start + size]))
    return out
