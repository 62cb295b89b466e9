"""Changes of the sums after a backward pass, found by samples of them, and by checksums after a suspicion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from p2pavg.optim.gradients.store import Store

AS_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
SAMPLED = 256  # elements of a buffer that are remembered, and one of each parameter at least


class Edits:
    """Version counters tell that somebody wrote to the sums, and nothing of what: clip_grad_norm_ below its
    norm multiplies by 1. So some elements of every parameter are remembered after each backward pass, which
    finds whatever scales gradients the first time. A write that left these as they are may have changed
    others: from the first one on there is a checksum of all elements, which reads the sums once, as clipping
    does.

    store: the sums.
    """

    def __init__(self, store: Callable[[], Store]) -> None:
        self.watching = [False]  # read by hooks
        self._store = store
        self._task = -1
        self._after: list[torch.Tensor] | None = None
        self._places: list[torch.Tensor] = []  # of the elements that are remembered, by buffer
        self._sampled: list[torch.Tensor] = []
        self._versions: list[int] = []  # of the buffers when they were

    def begins(self) -> None:
        """Remember elements when this backward pass is over. Called in a microbatch's first hook."""
        if not self.watching[0]:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._remember)

    def reached(self) -> None:
        """Take a checksum when this backward pass is over. Called in a hook, while watching."""
        task: int = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task

        def over() -> None:
            self._after = self._checksums()

        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(over)

    def rebuilt(self) -> None:
        """Note that the store has other buffers than before."""
        self._places, self._versions = [], []

    def noticed(self, buffer: int, expected: int, version: int) -> bool:
        """Whether a microbatch's gradients have other values than after its last backward pass, as far as is
        known.

        buffer: one that the pass added to. expected, version: of that buffer, after the pass and now.
        """
        known = bool(self._versions) and self._versions[buffer] == expected
        if version <= expected:  # nobody wrote to it, unless through p.grad.data, which counts for no version
            return known and not self.watching[0] and self._sampled[buffer].is_cpu and self._differ()
        after, self._after = self._after, None
        self.watching[0] = True
        if after is not None:
            return [int(value) for value in after] != [int(value) for value in self._checksums()]
        return known and self._differ()

    def _remember(self) -> None:
        store = self._store()
        if not self._places:
            self._places = [store.places(buffer, SAMPLED) for buffer in range(len(store.buffers))]
        self._sampled = self._sample()
        self._versions = [buffer._version for buffer in store.buffers]

    def _differ(self) -> bool:
        return not all(map(torch.equal, self._sampled, self._sample()))

    def _sample(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return [
                _integers(sums).index_select(0, places)
                for sums, places in zip(self._store().buffers, self._places, strict=True)
            ]

    def _checksums(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return [_integers(sums).sum(dtype=torch.int64) for sums in self._store().buffers]


def _integers(sums: torch.Tensor) -> torch.Tensor:
    """The bits, of which a NaN equals itself."""
    return sums.view(AS_INTEGERS[sums.element_size()])
