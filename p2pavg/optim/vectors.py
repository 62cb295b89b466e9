"""Operations on the exchanged vector: float32[n] on the CPU."""

from __future__ import annotations

import numpy as np

from p2pavg.optim.layout import Layout
from p2pavg.optim.store import F32


def all_finite(vector: F32) -> bool:
    """Whether float32[n] holds no NaN and no infinity. One pass at memory speed in the ordinary case."""
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.dot(vector, vector)):
            return True
    step = 1 << 16
    return all(bool(np.isfinite(vector[at : at + step]).all()) for at in range(0, len(vector), step))


def clip_norm(vector: F32, max_norm: float) -> None:
    """Scale float32[n] in place so that its 2-norm is at most max_norm.

    The norm is summed in float64 and then rounded, so that it does not depend on the number of threads.
    """
    step = 1 << 16
    chunks = (vector[at : at + step].astype(np.float64) for at in range(0, len(vector), step))
    norm = np.float32(np.sqrt(sum(float(np.dot(chunk, chunk)) for chunk in chunks)))
    factor = np.float32(max_norm) / (norm + np.float32(1e-6))
    if factor < 1:
        vector *= factor


def used(vector: F32, layout: Layout, index: int) -> bool:
    """Whether any peer's backward pass reached parameter `index`, told by the averaged bits alone."""
    offset, size = layout.offsets[index], layout.sizes[index]
    return bool(vector[layout.marks + index] != 0 or np.any(vector[offset : offset + size]))
