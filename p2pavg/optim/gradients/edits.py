"""Changes of the sums after a backward pass, found by checksums once there is a suspicion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

AS_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


class Edits:
    """Version counters tell that somebody wrote to the sums, and nothing of what: clip_grad_norm_ below its
    norm multiplies by 1. So from the first such write on there is a checksum after every backward pass, which
    reads the sums once, as clipping does.

    sums: the buffers.
    """

    def __init__(self, sums: Callable[[], Sequence[torch.Tensor]]) -> None:
        self.watching = [False]  # read by hooks
        self._sums = sums
        self._task = -1
        self._after: list[torch.Tensor] | None = None

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

    def found(self) -> bool:
        """Whether the values of the sums changed, which were written to after the last backward pass. False
        the first time, as there is no checksum to compare with.
        """
        after, self._after = self._after, None
        self.watching[0] = True
        if after is None:
            return False
        return [int(value) for value in after] != [int(value) for value in self._checksums()]

    def _checksums(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return [
                sums.view(AS_INTEGERS[sums.element_size()]).sum(dtype=torch.int64) for sums in self._sums()
            ]
