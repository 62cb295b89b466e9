"""Local steps: the counterpart of flat gradients when peers step on their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from p2pavg.optim.outer.reference import Reference
from p2pavg.optim.outer.settings import Outer
from p2pavg.optim.tree import U8
from p2pavg.optim.updates.masters import Masters


class InnerSteps:
    """Steps an inner optimizer at the end of every microbatch, or of every few, on this process's gradients
    alone. Gradients are cleared after every step, whether the training loop does so or not.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        params: list[torch.Tensor],
        settings: Outer,
        scheduler: LRScheduler | None,
        max_norm: float | None,
    ) -> None:
        """params: a live list, of the parameters as they are now."""
        self._params = params
        self._inner = inner
        self._every = settings.accumulate
        self._scheduler = scheduler if settings.schedule == "inner" else None
        self._max_norm = max_norm
        self._calls = 0

    def tick(self) -> None:
        """End a microbatch: step, when enough of them have come. What raises in it comes out, and no gradient
        steps twice.
        """
        self._calls += 1
        if self._calls < self._every:
            return
        self._calls = 0
        try:
            self._step()
        finally:
            self.zero_grad(set_to_none=True)

    def _step(self) -> None:
        grads = [param.grad for param in self._params if param.grad is not None]
        if self._every > 1 and grads:
            torch._foreach_div_(grads, float(self._every))
        if self._max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._params, self._max_norm)
        self._move()
        if self._scheduler is not None:
            self._scheduler.step()

    def _move(self) -> None:
        self._inner.step()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the gradients, unless they are those of microbatches that wait for the step."""
        if self._calls:
            return
        for param in self._params:
            if set_to_none or param.grad is None:
                param.grad = None
            else:
                param.grad.detach_().zero_()


class LocalSteps(InnerSteps):
    """Local steps of a single peer, in the place of `FlatGradients`.

    masters: with offload, what is stepped in the place of the model's parameters, which reference has.
    """

    passes = 1  # backward() passes before a step() are the training loop's affair
    pending = False  # nothing waits to be counted between backward() and step()
    sums: Sequence[torch.Tensor] = ()

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        reference: Reference,
        settings: Outer,
        scheduler: LRScheduler | None,
        max_norm: float | None,
        masters: Masters | None = None,
    ) -> None:
        self.params = reference.params if masters is None else list(masters.live)
        super().__init__(inner, self.params, settings, scheduler, max_norm)
        self.layout = reference.fragments
        self._reference = reference
        self._masters = masters

    def _move(self) -> None:
        if self._masters is None:
            super()._move()
        else:
            self._masters.step_locally()

    def check(self) -> bool:
        """False: with local steps the training loop may change gradients as it likes."""
        return False

    def clear(self) -> None:
        """Go on from the swarm's parameters, and drop how far this peer moved."""
        self._calls = 0
        self.zero_grad(set_to_none=True)
        self._reference.publish()

    def close(self) -> None:
        """Leave the model with the swarm's parameters, as every other peer does."""
        self.clear()

    def replace(self, params: Sequence[torch.Tensor]) -> None:
        """Go on with other parameters of the model, which have the right values."""
        self.params[:] = params

    def allocate(self, nbytes: int) -> U8:
        """Host memory for a round's result."""
        return np.empty(nbytes, np.uint8)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside the block, the model holds θ_ref; afterwards its own parameters, to the bit, unless they
        were given up meanwhile.
        """
        reference = self._reference
        if reference.hidden is not None:
            yield
            return
        if self._masters is not None:
            self._masters.take_edits()
        kept = [param.detach().clone() for param in reference.params]
        reference.publish()
        reference.hidden = kept
        try:
            yield
        finally:
            if reference.hidden is kept:
                reference.hidden = None
                with reference.changing():
                    torch._foreach_copy_(reference.params, kept)
