"""Accumulation in flat buffers: PyTorch adds into `.grad`, and hooks keep every `.grad` a view."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import get_gradient_edge

from p2pavg.errors import ConfigurationError
from p2pavg.optim import tools
from p2pavg.optim.gradients.edits import Edits
from p2pavg.optim.gradients.layout import VectorLayout, exchange_layout
from p2pavg.optim.gradients.path import GradientPath, PathOpener
from p2pavg.optim.gradients.reached import EDITED, Reached
from p2pavg.optim.gradients.store import Store
from p2pavg.optim.tree import U8

log = logging.getLogger("p2pavg.optim")

SPARSE = "sparse gradients cannot be averaged; build the embedding with sparse=False"
CLEARED = (
    "gradients were cleared after a backward() without step(); call discard() to drop what was accumulated"
)
EMPTY = (
    "step() came without a backward() since the last one, and its samples count in the average with a "
    "gradient of zero: call it for batches that have a loss alone"
)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check_averaged(params: Sequence[torch.Tensor]) -> None:
    """Raises ConfigurationError unless each of an optimizer's parameters is one that peers can average."""
    if len({id(param) for param in params}) != len(params):
        raise ConfigurationError("a parameter occurs twice in the optimizer; list each parameter once")
    for param in params:
        if param.dtype not in FLOATS:
            raise ConfigurationError(
                f"a parameter of dtype {param.dtype} cannot be averaged; use float32, float16, bfloat16 "
                "or float64 (store complex values as torch.view_as_real of them)"
            )


class Accumulation:
    """The sums of microbatches, and the views of them under all parameters.

    A hook that runs just before PyTorch accumulates into a parameter puts the view back whenever something
    took it away (`model.zero_grad()`, `create_graph=True`, `model.to(...)`, an assignment to `.grad`),
    without losing the sum. A gradient that the loop assigned is added like one that `backward()` made; what
    changes sums of earlier microbatches is refused. Gradients that the parameters hold at construction are
    dropped.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        grad_dtype: torch.dtype | None = None,
        extra_size: int = 0,
        open_path: PathOpener = lambda device, numel: None,
    ) -> None:
        check_averaged(params)
        self.params = list(params)
        self._grad_dtype = grad_dtype
        self.layout: VectorLayout = exchange_layout([param.numel() for param in self.params], extra_size)
        self._reached = Reached(len(self.params))  # shared with the hooks
        self._hooks: dict[int, tuple[Any, Any]] = {}  # index -> (AccumulateGrad node, hook handle)
        self._loose = False
        self._spare: Store | None = None  # buffers for the next sums
        # Called with the sums once per backward pass, before it adds to them.
        self.before_backward: Callable[[Sequence[torch.Tensor]], None] = lambda sums: None
        self._last: list[Any] = [None, 0, -1]  # of the last hook: gradient, its version before, index
        self._told = False  # of a microbatch without a gradient
        self._quiet: list[int] = []  # the buffers' versions after the last microbatch
        self._edits = Edits(lambda: self._store)
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
        self._edits.rebuilt()
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
        when = self._reached
        clock, seen, repeated = when.clock, when.seen, when.repeated
        pointers, adopt, begin, last = self._pointers, self._adopt, self._begin, self._last
        watching = self._edits.watching

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
            if seen[index] == now:
                repeated[index] = repeated.get(index, 0) + 1
            seen[index] = seen[-1] = now
            last[0] = grad
            last[1] = 0 if grad is None else grad._version
            last[2] = index
            if watching[0]:
                self._edits.reached()

        self._hooks[index] = (node, node.register_prehook(before_accumulation))

    def _begin(self) -> None:
        self._reached.judge(self._displaced(self._last[2]))
        if self._loose or self._moved:
            self.repair()
        with torch.no_grad():
            self.before_backward(self._store.buffers)
        self._edits.begins()

    def _displaced(self, index: int) -> bool:
        """Whether parameter `index` has another gradient than its view. index -1: no parameter."""
        grad = None if index < 0 else self.params[index].grad
        if grad is None or grad is self._store.views[index]:
            return False
        return grad.data_ptr() != self._pointers[index]

    def _adopt(self, index: int, incoming: torch.Tensor | None = None) -> None:
        """Put the view back under parameter `index`, with the values of `.grad` where there are any."""
        param = self.params[index]
        grad = param.grad
        if incoming is not None and incoming.is_sparse:
            raise ConfigurationError(SPARSE)
        if (param.device, param.dtype, self._dtype(param)) != self._kind[index]:
            self._moved = True  # the model went to another device or dtype: rebuild at the next step()
            return
        if incoming is not None and grad is None and self._reached.seen[index] == self._reached.clock[0]:
            raise ConfigurationError(CLEARED)
        if grad is None:
            param.grad = self._store.renew(index, param)
            return
        adds = self._adds(index, grad)
        view = self._store.renew(index, param)
        with torch.no_grad():
            if adds:
                view.add_(grad.detach())
            else:
                view.copy_(grad.detach())
        param.grad = view

    def _adds(self, index: int, grad: torch.Tensor) -> bool:
        """Whether a gradient in the place of the view is added to the sums; else it replaces them."""
        if grad is self._store.views[index]:
            return False  # the view itself, whose data model.to(...) moved
        return index not in self._hooks or self._reached.adds(index, self._loose)

    @property
    def sums(self) -> list[torch.Tensor]:
        """The buffers that hold the sums now."""
        return self._store.buffers

    @property
    def pending(self) -> bool:
        """Whether a backward pass ran since the last `tick`."""
        return self._reached.pending

    @property
    def passes(self) -> int:
        """How many backward passes this microbatch had, as far as parameters tell."""
        return self._reached.passes

    def check(self) -> bool:
        """At the end of a microbatch: whether something changed its gradients after the last backward pass.
        Raises ConfigurationError when earlier microbatches are in the same sums. O(1) where nothing did.
        """
        grad, version, index = self._last
        if not self.pending or grad is None:
            return False
        if not self._edits.noticed(self._store.place(index), version + 1, grad._version):
            return False
        if not self._reached.alone:
            advice = tools.adapter()
            raise ConfigurationError(EDITED if advice is None else f"{EDITED}; and {advice}")
        return True

    def tick(self) -> None:
        """End a microbatch. O(1), unless views were displaced or no hook ran: then the views are put back.

        Tells once of one without a gradient. Raises ConfigurationError when its gradient was cleared.
        """
        last, silent = self._last[2], not self.pending
        if not silent and self.params[last].grad is None:
            raise ConfigurationError(CLEARED)
        displaced = self._displaced(last)
        if silent:
            self._reached.judge(displaced)
        repairs = silent or displaced or self._moved or self._loose
        if repairs:
            versions = self._versions()
            if not self.repair() and silent:
                if versions == self._quiet:
                    self._tell_of_nothing()
                elif not self._reached.alone:
                    raise ConfigurationError(EDITED)
        self._reached.end(whole=repairs)
        self._quiet = self._versions()

    def _tell_of_nothing(self) -> None:
        if not self._told:
            self._told = True
            log.warning(EMPTY)

    def _versions(self) -> list[int]:
        return [buffer._version for buffer in self._store.buffers]

    def repair(self, ended: bool = False) -> bool:
        """Make every `.grad` a view again, with what it holds; hook unfrozen parameters. O(parameters).

        ended: the microbatch that gradients belong to has ended. Returns whether anything was to be done.
        """
        done = False
        self._reached.look_back(ended)
        if self._moved or any(
            (param.device, param.dtype, self._dtype(param)) != kind
            for param, kind in zip(self.params, self._kind, strict=True)
        ):
            self._rebuild()
            done = True
        for index, param in enumerate(self.params):
            if not param.requires_grad or param.numel() == 0:
                continue
            grad = param.grad
            if grad is not None and grad.is_sparse:
                raise ConfigurationError(SPARSE)
            if grad is None or grad.data_ptr() != self._pointers[index]:
                self._adopt(index)
                done = done or grad is not None
                if grad is not None and grad is not self._store.views[index]:
                    self._reached.assigned(index)
            if index not in self._hooks:
                self._hook(index)
        self._loose = False
        self._reached.look_back(False)
        return done

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
                    self._reached.assigned(index)

    def _rebuild(self) -> None:
        log.info("parameters changed device or dtype: gradient buffers are built anew")
        swapped = [
            param.grad is view for param, view in zip(self.params, self._store.views, strict=True)
        ]  # the view object itself, its data converted
        sums = [
            self._store.slice(index)
            if param.grad is None or not (same or not self._adds(index, param.grad))
            else None
            for index, (param, same) in enumerate(zip(self.params, swapped, strict=True))
        ]
        grads = [None if param.grad is None else param.grad.detach() for param in self.params]
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._build()
        with torch.no_grad():
            for index, (flat, grad, same) in enumerate(zip(sums, grads, swapped, strict=True)):
                if flat is not None:
                    self._store.slice(index).copy_(flat)
                if grad is not None and flat is not None:
                    self._store.views[index].add_(grad)
                elif grad is not None:
                    self._store.views[index].copy_(grad)
                if grad is not None and not same:
                    self._reached.assigned(index)
        self._reached.installed()

    def _filled(self) -> None:
        self._reached.filled()
        self._quiet = self._versions()

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
        self._reached.installed()
        self._quiet = self._versions()

    def zero_grad(self, set_to_none: bool) -> None:
        """Gradients are cleared when an epoch ends."""

    def clear(self) -> None:
        """Set sums and marks to zero, as after an epoch or a discarded batch."""
        self._store.zero()
        for index, param in enumerate(self.params):
            if self._displaced(index):
                param.grad = None  # it belongs to what is dropped
        self._reached.clear()
        self._quiet = self._versions()

    def close(self) -> None:
        """Remove hooks and views. The parameters are ordinary again, without gradients."""
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        for index, param in enumerate(self.params):
            param.grad = None
            if self._kind[index][2] != param.dtype:
                param.grad_dtype = param.dtype
