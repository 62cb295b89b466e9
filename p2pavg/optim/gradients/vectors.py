"""Operations on the exchanged vector: float32[n] on the CPU, or on an accelerator in O(1) memory."""

from __future__ import annotations

import numpy as np
import torch

from p2pavg.optim.gradients.layout import VectorLayout
from p2pavg.optim.gradients.store import F32, Vector

STEP = 1 << 16
DEVICE_STEP = 1 << 22
MOST = float(np.finfo(np.float32).max)
SURELY = 2.0**64


def _pieces(vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(vector, DEVICE_STEP)


def all_finite(vector: Vector) -> bool:
    """Whether float32[n] holds no NaN and no infinity. One pass at memory speed in the ordinary case."""
    if isinstance(vector, torch.Tensor):
        sums = torch.stack([torch.linalg.vector_norm(piece) for piece in _pieces(vector)])
        if bool(torch.isfinite(sums).all()):
            return True
        return all(bool(torch.isfinite(piece).all()) for piece in _pieces(vector))
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.dot(vector, vector)):
            return True
    return all(bool(np.isfinite(vector[at : at + STEP]).all()) for at in range(0, len(vector), STEP))


def within(vector: Vector, most: float) -> bool:
    """Whether all of float32[n] are finite, and none is larger than `most` >= 2**64. Like `all_finite`, one
    pass in the ordinary case: a finite sum of squares has no such terms.
    """
    if isinstance(vector, torch.Tensor):
        sums = torch.stack([torch.linalg.vector_norm(piece) for piece in _pieces(vector)])
        if bool((sums < SURELY).all()):
            return True
        return all(bool((piece.abs() <= most).all()) for piece in _pieces(vector))
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.dot(vector, vector)):
            return True
    pieces = (vector[at : at + STEP] for at in range(0, len(vector), STEP))
    return all(bool((np.abs(piece) <= most).all()) for piece in pieces)


def clip_norm(vector: Vector, max_norm: float) -> None:
    """Scale float32[n] in place so that its 2-norm is at most max_norm.

    The norm is summed in float64 and then rounded, so that it does not depend on the number of threads.
    """
    if isinstance(vector, torch.Tensor):
        squares = [piece.double().square_().sum() for piece in _pieces(vector)]
        total = float(torch.stack(squares).sum())
    else:
        chunks = (vector[at : at + STEP].astype(np.float64) for at in range(0, len(vector), STEP))
        total = sum(float(np.dot(chunk, chunk)) for chunk in chunks)
    factor = np.float32(max_norm) / (np.float32(np.sqrt(total)) + np.float32(1e-6))
    if factor < 1:
        vector *= float(factor)


def tail(vector: Vector, start: int) -> F32:
    """vector[start:] in host memory."""
    return vector[start:].cpu().numpy() if isinstance(vector, torch.Tensor) else vector[start:]


def set_tail(vector: Vector, start: int, values: F32) -> None:
    """vector[start:] <- values."""
    if isinstance(vector, torch.Tensor):
        vector[start:].copy_(torch.from_numpy(values))
    else:
        vector[start:] = values


def flat(vector: Vector) -> torch.Tensor:
    """The vector as a tensor, without a copy."""
    return vector if isinstance(vector, torch.Tensor) else torch.from_numpy(vector)


def used(vector: Vector, layout: VectorLayout) -> list[bool]:
    """For each parameter, whether any peer's backward pass reached it, told by the averaged bits alone."""
    marks = tail(vector[: layout.marks + len(layout.sizes)], layout.marks)
    found = []
    for mark, offset, size in zip(marks, layout.offsets, layout.sizes, strict=True):
        found.append(bool(mark != 0) or bool(vector[offset : offset + size].any()))
    return found
