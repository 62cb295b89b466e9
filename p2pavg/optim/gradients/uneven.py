"""Steps of uneven sizes in the same sums: in lockstep, when a peer was late for a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class RetainedSums:
    """What a step left in the sums because its round went on without it, and of how many samples.

    A step's gradient is the mean over its own samples. When the next one is added it may have another size:
    then what was there is weighed anew, so that the sums are in the units of the last step. That takes a copy
    of the sums, only after a step that was late.

    sums: the buffers.
    """

    def __init__(self, sums: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._sums = sums
        self._copies: list[torch.Tensor] = []
        self._samples = self._unit = 0

    def keep(self, samples: int, unit: int) -> None:
        """After a step(): so many samples are in the sums, which are in units of `unit` samples."""
        self._samples, self._unit = samples, unit
        self._copies = [buffer.clone() for buffer in self._sums()] if samples else []

    def weigh(self, samples: int, unit: int) -> None:
        """Before a step of `unit` samples is counted: `samples` are in the sums, those that were kept."""
        copies, self._copies = self._copies, []
        if not copies or samples != self._samples or unit == self._unit:
            return
        buffers = self._sums()
        if [buffer.shape for buffer in buffers] != [copy.shape for copy in copies]:
            return  # the model moved meanwhile, and the sums with it
        with torch.no_grad():
            for buffer, copy in zip(buffers, copies, strict=True):
                buffer.add_(copy.to(buffer), alpha=self._unit / unit - 1)
