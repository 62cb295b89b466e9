"""The accumulated gradients as the one vector that peers average."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from p2pavg.optim.gradients.accumulation import Accumulation
from p2pavg.optim.gradients.path import PathOpener
from p2pavg.optim.gradients.store import F32, Store, Vector
from p2pavg.optim.gradients.vectors import MOST, clip_norm, set_tail, used, within


@dataclass(frozen=True, slots=True)
class Taken:
    """Sums that left the accumulation: their memory, as a vector, and which parameters they touch."""

    store: Store
    vector: Vector
    touched: list[bool]


class FlatGradients(Accumulation):
    """The gradient sums of `params`, as one float32 vector for the rounds.

    Every parameter's `.grad` is a view into a flat buffer, so `backward()` accumulates there by itself; see
    `Accumulation`. Sums start at zero.

    Which parameters took part travels with the average: the vector ends with one mark per parameter, not 0
    where a backward pass of this peer reached it. After averaging, a parameter gets `.grad = None` for the
    optimizer's step exactly when its averaged mark is 0 and its averaged slice is all 0. The rule reads
    nothing but the averaged bits, so all peers follow it alike: a parameter used by any peer moves on every
    peer (weight decay and momentum included, as in one process), and one used by nobody rests on every peer.

    params: leaf tensors, float32, float16, bfloat16 or float64, each once, in the same order on all peers.
    grad_dtype: the dtype in which float16 and bfloat16 parameters accumulate; None: their own.
    extra_size: elements at the vector's end that travel along, `vector[layout.extra:][:extra_size]`.
    open_path: asked for the way to the rounds when all gradients are float32 on one device; with one, vectors
    stay on that device, else they are in host memory. Raises ConfigurationError for other dtypes.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        grad_dtype: torch.dtype | None = None,
        extra_size: int = 0,
        open_path: PathOpener = lambda device, numel: None,
    ) -> None:
        self._staging: F32 | None = None  # the vector, where the buffers are not it
        super().__init__(params, grad_dtype, extra_size, open_path)

    def total(self, mark: float, extra: F32 | None = None, most: float = MOST) -> Vector | None:
        """The sums as float32[layout.numel], with `mark` at every touched parameter's mark, and extra * mark.

        None when a sum is not finite, or larger than `most`. It stays as it is until the next backward,
        `averaged` or `clear`.
        """
        self.repair(ended=True)
        vector = self._vector()
        if self._store.vector is None:
            assert isinstance(vector, np.ndarray)
            self._store.collect(vector)
        layout = self.layout
        tail = np.zeros(layout.numel - layout.marks, np.float32)
        for index in range(len(self.params)):
            if self._reached.touched(index):
                tail[index] = mark
        if extra is not None:
            start = layout.extra - layout.marks
            np.multiply(extra, np.float32(mark), out=tail[start : start + len(extra)])
        set_tail(vector, layout.marks, tail)
        return vector if within(vector, most) else None

    def take(self, mark: float, extra: F32 | None = None, most: float = MOST) -> Taken | None:
        """Like `total`, but the sums leave: the parameters accumulate from zero in another buffer.

        Give them back with `merge` or `recycle`.
        """
        vector = self.total(mark, extra, most)
        if vector is None:
            return None
        touched = [self._reached.touched(index) for index in range(len(self.params))]
        taken = Taken(self._store, vector, touched)
        self._staging = None
        self._store = self._spare if self._spare is not None else self._new_store()
        self._spare = None
        self._pointers[:] = self._store.pointers
        self._reached.clear()
        self._install()
        return taken

    def merge(self, taken: Taken, factor: float = 1.0) -> None:
        """Add sums back, times `factor`, that are in no average. `taken.vector` must be as it was."""
        for ours, theirs in zip(self._store.buffers, taken.store.buffers, strict=True):
            ours.add_(theirs, alpha=factor)
        for index, touched in enumerate(taken.touched):
            if touched:
                self._reached.touch(index)
        self._filled()
        self.recycle(taken)

    def add(self, vector: F32, factor: float) -> None:
        """Add another peer's sums: `vector` as from `total`, times `factor`. Extra elements stay out."""
        self.repair()
        source = torch.from_numpy(vector)
        for index, (offset, size) in enumerate(zip(self.layout.offsets, self.layout.sizes, strict=True)):
            if vector[self.layout.marks + index] == 0:
                continue
            sums = self._store.slice(index)
            sums.add_(source[offset : offset + size].to(sums.device, sums.dtype), alpha=factor)
            self._reached.touch(index)
        self._filled()

    def add_each(self, sums: Sequence[torch.Tensor | None], factor: float = 1.0) -> None:
        """Add gradients that were made elsewhere, times `factor`, one for each parameter, on its device;
        None: no backward pass reached it. A node calls this at every step, so `.grad` is looked at by `total`
        alone.
        """
        views = self._store.views
        pairs = [(views[at], total) for at, total in enumerate(sums) if total is not None and total.numel()]
        if pairs:
            ours, theirs = zip(*pairs, strict=True)
            with torch.no_grad():
                torch._foreach_add_(ours, theirs, alpha=factor)
        for index, total in enumerate(sums):
            if total is not None:
                self._reached.touch(index)
        self._filled()

    def recycle(self, taken: Taken) -> None:
        """Keep the memory of sums that were averaged. May run on another thread."""
        taken.store.zero()
        self._spare = taken.store
        if taken.store.vector is None:
            assert isinstance(taken.vector, np.ndarray)
            self._staging = taken.vector

    def _vector(self) -> Vector:
        if self._store.vector is not None:
            return self._store.vector
        if self._staging is None:
            pinned = any(buffer.is_cuda for buffer in self._store.buffers)
            room = torch.zeros(self.layout.numel, dtype=torch.float32, device="cpu", pin_memory=pinned)
            self._staging = room.numpy()
        return self._staging

    @contextmanager
    def averaged(
        self, decode: Callable[[Vector], None], keep: bool, max_norm: float | None = None
    ) -> Iterator[None]:
        """Inside, every `.grad` is its part of the vector that `decode` writes, or None where nobody had one.

        keep: the sums accumulated so far stay (a second buffer holds the average); else they are cleared.
        max_norm: clip the average's 2-norm to this, like torch.nn.utils.clip_grad_norm_.
        A parameter whose buffer has another dtype than itself gets its gradient in its own dtype.
        """
        store = self._new_store() if keep else self._store
        vector = store.vector if store.vector is not None else self._vector()
        try:
            decode(vector)
            if max_norm is not None:
                clip_norm(vector[: self.layout.marks], max_norm)
            if store.vector is None:
                assert isinstance(vector, np.ndarray)
                store.spread(vector)
            self._show(store, used(vector, self.layout))
            yield
        finally:
            if not keep:
                self.clear()
            self._install()

    def _show(self, store: Store, reached: Sequence[bool]) -> None:
        """`.grad` of the parameters that were reached <- their views of `store`, in their own dtype."""
        for index, param in enumerate(self.params):
            param.grad = None
            if not reached[index]:
                continue
            if self._kind[index][2] != param.dtype:
                param.grad_dtype = param.dtype
            param.grad = store.views[index].to(param.dtype)
