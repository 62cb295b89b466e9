"""Gradients that accumulate in flat buffers: PyTorch adds into `.grad`, and every `.grad` is a view."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import get_gradient_edge

from p2pavg.errors import ConfigurationError
from p2pavg.optim.gradients.layout import Layout, exchange_layout
from p2pavg.optim.gradients.path import GradientPath, PathOpener
from p2pavg.optim.gradients.store import F32, Store, Vector
from p2pavg.optim.gradients.vectors import all_finite, clip_norm, set_tail, used
from p2pavg.optim.tree import U8

log = logging.getLogger("p2pavg.optim")

SPARSE = "sparse gradients cannot be averaged; build the embedding with sparse=False"
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, slots=True)
class Taken:
    """Sums that left the accumulation: their memory, as a vector, and which parameters they touch."""

    store: Store
    vector: Vector
    touched: list[bool]


class FlatGradients:
    """The gradient sums of `params`, as one float32 vector for the rounds.

    Every parameter's `.grad` is a view into a flat buffer, so `backward()` accumulates there by itself. A
    hook that runs just before PyTorch accumulates into a parameter puts the view back whenever something took
    it away (`model.zero_grad()`, `create_graph=True`, `model.to(...)`, an assignment to `.grad`), without
    losing the sum. Gradients that the parameters hold at construction are dropped. Sums start at zero.

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
        if len({id(param) for param in params}) != len(params):
            raise ConfigurationError("a parameter occurs twice in the optimizer; list each parameter once")
        self.params = list(params)
        self._grad_dtype = grad_dtype
        for param in self.params:
            if param.dtype not in FLOATS:
                raise ConfigurationError(
                    f"a parameter of dtype {param.dtype} cannot be averaged; use float32, float16, bfloat16 "
                    "or float64 (store complex values as torch.view_as_real of them)"
                )
        self.layout: Layout = exchange_layout([param.numel() for param in self.params], extra_size)
        self._clock = [0]  # counts step()s; shared with the hooks
        self._cleared = 0
        self._seen = [-1] * (len(self.params) + 1)  # clock at its last backward; the last: any's
        self._hooks: dict[int, tuple[Any, Any]] = {}  # index -> (AccumulateGrad node, hook handle)
        self._loose = False
        self._staging: F32 | None = None
        self._spare: Store | None = None
        # Called with the sums once per backward, before it adds to them.
        self.before_backward: Callable[[Sequence[torch.Tensor]], None] = lambda sums: None
        self._last: list[Any] = [None, 0]  # the last hook's gradient, and its buffer's version before
        self._pointers: list[int] = []  # of the views now installed; shared with the hooks
        self._open_path = open_path
        self.path: GradientPath | None = None
        self._path_of: torch.device | None = None
        self._build()

    def _dtype(self, param: torch.Tensor) -> torch.dtype:
        half = param.dtype in (torch.float16, torch.bfloat16)
        return self._grad_dtype if half and self._grad_dtype is not None else param.dtype

    def _build(self) -> None:
        dtypes = [self._dtype(param) for param in self.params]
        self._kind = [
            (param.device, param.dtype, dtype) for param, dtype in zip(self.params, dtypes, strict=True)
        ]
        places = {(device, dtype) for device, _, dtype in self._kind}
        alone = next(iter(places))[0] if len(places) == 1 and next(iter(places))[1] == torch.float32 else None
        if alone != self._path_of:
            self.path = None if alone is None else self._open_path(alone, self.layout.numel)
            self._path_of = alone
        self._store = self._new_store()
        self._spare = None
        self._pointers[:] = self._store.pointers
        self._moved = False
        for index, param in enumerate(self.params):
            param.grad = None
            if param.grad_dtype not in (None, dtypes[index]):
                param.grad_dtype = dtypes[index]
            if param.requires_grad:
                self._hook(index)

    def _new_store(self) -> Store:
        dtypes = [kind[2] for kind in self._kind]
        return Store(self.params, dtypes, self.layout, self.path is not None)

    def allocate(self, nbytes: int) -> U8:
        """Host memory for a round's result."""
        return np.empty(nbytes, np.uint8) if self.path is None else self.path.allocate(nbytes)

    def _hook(self, index: int) -> None:
        param, dtype = self.params[index], self._kind[index][2]
        if param.numel() == 0:
            return
        if dtype != param.dtype:
            param.grad_dtype = dtype
        param.grad = self._store.renew(index, param)
        if index in self._hooks:
            self._hooks.pop(index)[1].remove()
        node = get_gradient_edge(param).node  # held, or autograd would make a new one without the hook
        clock, seen, pointers, adopt = self._clock, self._seen, self._pointers, self._adopt
        begin, last = self._begin, self._last

        grad_enabled = torch.is_grad_enabled

        # Once per parameter and microbatch: every line here is paid for thousands of times a second.
        def before_accumulation(grads: tuple[torch.Tensor | None, ...]) -> None:
            incoming = grads[0]
            if incoming is None:
                return
            now = clock[0]
            if seen[-1] != now:
                begin()
            grad = param.grad
            if grad is None or grad.data_ptr() != pointers[index] or incoming.is_sparse:
                adopt(index, incoming)
                grad = param.grad
            if grad_enabled():  # create_graph=True: a new tensor is about to replace the view
                self._loose = True
            seen[index] = seen[-1] = now
            last[0] = grad
            last[1] = 0 if grad is None else grad._version

        self._hooks[index] = (node, node.register_prehook(before_accumulation))

    def _begin(self) -> None:
        if self._loose or self._moved:
            self.repair()
        with torch.no_grad():
            self.before_backward(self._store.buffers)

    def _adopt(self, index: int, incoming: torch.Tensor | None = None) -> None:
        """Put the view back under parameter `index`, with what `.grad` holds if it holds anything."""
        param = self.params[index]
        grad = param.grad
        if incoming is not None and incoming.is_sparse:
            raise ConfigurationError(SPARSE)
        if (param.device, param.dtype, self._dtype(param)) != self._kind[index]:
            self._moved = True  # the model went to another device or dtype: rebuild at the next step()
            return
        if incoming is not None and grad is None and self._seen[index] == self._clock[0]:
            raise ConfigurationError(
                "gradients were cleared after a backward() without step(); "
                "call discard() to drop what was accumulated"
            )
        view = self._store.renew(index, param)
        if grad is not None:
            with torch.no_grad():
                view.copy_(grad.detach())
        param.grad = view

    @property
    def sums(self) -> list[torch.Tensor]:
        """The buffers that the sums are in now."""
        return self._store.buffers

    @property
    def pending(self) -> bool:
        """Whether a backward pass ran since the last `tick`."""
        return self._seen[-1] == self._clock[0]

    @property
    def edited(self) -> bool:
        """Whether something wrote into the sums after the last backward pass: clipping in place. O(1)."""
        grad, version = self._last
        return grad is not None and grad._version > version + 1 and self.pending

    def tick(self) -> None:
        """A microbatch ended. O(1), unless views were displaced or no hook ran: then they are put right."""
        if self._moved or self._loose or not self.pending:
            self.repair()
        self._clock[0] += 1

    def repair(self) -> None:
        """Make every `.grad` a view again, with what it holds; hook unfrozen parameters. O(parameters)."""
        self._loose = False
        if self._moved or any(
            (param.device, param.dtype, self._dtype(param)) != kind
            for param, kind in zip(self.params, self._kind, strict=True)
        ):
            self._rebuild()
        for index, param in enumerate(self.params):
            if not param.requires_grad or param.numel() == 0:
                continue
            grad = param.grad
            if grad is not None and grad.is_sparse:
                raise ConfigurationError(SPARSE)
            if grad is None or grad.data_ptr() != self._pointers[index]:
                if grad is not None and grad is not self._store.views[index]:
                    self._seen[index] = self._seen[-1] = self._clock[0]
                self._adopt(index)
            if index not in self._hooks:
                self._hook(index)

    def replace(self, params: Sequence[torch.Tensor]) -> None:
        """Go on with other parameters of the same shapes, with their gradients added to the sums so far."""
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        sums = [self._store.slice(index) for index in range(len(self.params))]
        fresh = [None if param.grad is None else param.grad.detach() for param in params]
        for param in self.params:
            param.grad = None
        self.params = list(params)
        self._build()
        with torch.no_grad():
            for index, (flat, grad) in enumerate(zip(sums, fresh, strict=True)):
                self._store.slice(index).copy_(flat)
                if grad is not None:
                    self._store.views[index].add_(grad)
                    self._seen[index] = self._seen[-1] = self._clock[0]

    def _rebuild(self) -> None:
        log.info("parameters changed device or dtype: gradient buffers are built anew")
        sums = [
            self._store.slice(index) if param.grad is None else None
            for index, param in enumerate(self.params)
        ]
        swapped = [
            param.grad is view for param, view in zip(self.params, self._store.views, strict=True)
        ]  # the view object itself, its data converted
        grads = [None if param.grad is None else param.grad.detach() for param in self.params]
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._build()
        with torch.no_grad():
            for index, (flat, grad, same) in enumerate(zip(sums, grads, swapped, strict=True)):
                if grad is not None:
                    self._store.views[index].copy_(grad)
                    if not same:
                        self._seen[index] = self._seen[-1] = self._clock[0]
                elif flat is not None:
                    self._store.slice(index).copy_(flat)

    def total(self, mark: float, extra: F32 | None = None) -> Vector | None:
        """The sums as float32[layout.numel], with `mark` at every touched parameter's mark, and extra * mark.

        None when a sum is not finite. It stays as it is until the next backward, `averaged` or `clear`.
        """
        self.repair()
        vector = self._vector()
        if self._store.vector is None:
            assert isinstance(vector, np.ndarray)
            self._store.collect(vector)
        layout = self.layout
        tail = np.zeros(layout.numel - layout.marks, np.float32)
        for index in range(len(self.params)):
            if self._seen[index] >= self._cleared:
                tail[index] = mark
        if extra is not None:
            start = layout.extra - layout.marks
            np.multiply(extra, np.float32(mark), out=tail[start : start + len(extra)])
        set_tail(vector, layout.marks, tail)
        return vector if all_finite(vector) else None

    def take(self, mark: float, extra: F32 | None = None) -> Taken | None:
        """Like `total`, but the sums leave: the parameters accumulate from zero in another buffer.

        Give them back with `merge` or `recycle`.
        """
        vector = self.total(mark, extra)
        if vector is None:
            return None
        touched = [seen >= self._cleared for seen in self._seen[:-1]]
        taken = Taken(self._store, vector, touched)
        self._staging = None
        self._store = self._spare if self._spare is not None else self._new_store()
        self._spare = None
        self._pointers[:] = self._store.pointers
        self._clock[0] += 1
        self._cleared = self._clock[0]
        self._install()
        return taken

    def merge(self, taken: Taken, factor: float = 1.0) -> None:
        """Add sums back, times `factor`, that are in no average. `taken.vector` must be as it was."""
        for ours, theirs in zip(self._store.buffers, taken.store.buffers, strict=True):
            ours.add_(theirs, alpha=factor)
        for index, touched in enumerate(taken.touched):
            if touched:
                self._seen[index] = max(self._seen[index], self._cleared)
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
            self._seen[index] = max(self._seen[index], self._cleared)

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

    def _install(self) -> None:
        for index, param in enumerate(self.params):
            param.grad = None
            if not param.requires_grad:
                continue
            if index not in self._hooks:
                self._hook(index)  # unfrozen since
                continue
            if self._kind[index][2] != param.dtype:
                param.grad_dtype = self._kind[index][2]
            param.grad = self._store.views[index]

    def clear(self) -> None:
        """Sums and marks to zero, as after an epoch or a discarded batch."""
        self._store.zero()
        self._clock[0] += 1
        self._cleared = self._clock[0]

    def close(self) -> None:
        """Take hooks and views away; the parameters are ordinary again, without gradients."""
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        for index, param in enumerate(self.params):
            param.grad = None
            if self._kind[index][2] != param.dtype:
                param.grad_dtype = param.dtype
