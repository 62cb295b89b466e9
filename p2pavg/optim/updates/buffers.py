"""The model's buffers (BatchNorm statistics): peers average what they changed since the last average."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from p2pavg.optim.gradients.layout import GUARD
from p2pavg.optim.gradients.store import F32


class AveragedBuffers:
    """Floating-point buffers of a model, as deltas to values that all peers agree on.

    Each contribution carries the difference between a buffer and its agreed value, and the averaged
    difference moves the agreed value. So constants stay as they are to the bit, a lossy codec touches only
    what moved, and after every epoch all peers agree again. Other buffers (counters) stay each peer's own.

    live: the model's buffers now, always in the same order and of the same shapes.
    leads: whether this peer leads the round; with it only the leader's difference counts: its share of the
    samples travels along, by which all peers divide. None: everybody's counts.
    """

    def __init__(
        self, live: Callable[[], Sequence[torch.Tensor]], leads: Callable[[], bool] | None = None
    ) -> None:
        self._live = live
        self._leads = leads
        self._agreed = [buffer.detach().clone() for buffer in self._floats()]
        self._handed: list[torch.Tensor] = []  # the buffers when `deltas` was called
        self._sizes = sum(buffer.numel() for buffer in self._agreed)
        # The share lies where no codec scales it together with differences.
        self._share_at = self._sizes + GUARD
        self.size = self._share_at + 1 if leads is not None and self._sizes else self._sizes

    def _floats(self) -> list[torch.Tensor]:
        return [buffer for buffer in self._live() if buffer.is_floating_point()]

    def agreed(self) -> list[torch.Tensor]:
        """All buffers, averaged ones with their agreed values: what a snapshot holds and a download fills."""
        values = iter(self._agreed)
        return [next(values) if buffer.is_floating_point() else buffer for buffer in self._live()]

    def restore(self) -> None:
        """Set the model's buffers to the agreed values, after those were loaded."""
        with torch.no_grad():
            for buffer, agreed in zip(self._floats(), self._agreed, strict=True):
                buffer.copy_(agreed)

    def read_agreed(self) -> None:
        """Agree on what the model's buffers hold now, after a checkpoint was loaded."""
        with torch.no_grad():
            for buffer, agreed in zip(self._floats(), self._agreed, strict=True):
                agreed.copy_(buffer)

    def deltas(self) -> F32:
        """float32[size]: how far the buffers are from the agreed values, for a contribution."""
        self._handed = [buffer.detach().clone() for buffer in self._floats()]
        out = np.zeros(self.size, dtype=np.float32)
        if not self.size or not (self._leads is None or self._leads()):
            return out
        home = self._handed[0].device
        parts = [
            (handed.float() - agreed.float()).flatten().to(home)
            for handed, agreed in zip(self._handed, self._agreed, strict=True)
        ]
        out[: self._sizes] = torch.cat(parts).cpu().numpy()
        out[self._sizes :][GUARD:] = 1.0
        return out

    def agree(self, averaged: F32) -> None:
        """Move the agreed values by the averaged deltas, float32[size]. On any thread."""
        with torch.no_grad():
            for agreed, step in self._steps(averaged, self._agreed):
                agreed.copy_(agreed.float() + step)

    def follow(self, averaged: F32, counted: bool) -> None:
        """Bring the model's buffers to the agreed values, with what they changed since `deltas` on top.

        counted: whether the average holds what `deltas` gave; if not, that stays on top too.
        """
        buffers = self._floats()
        with torch.no_grad():
            for index, (buffer, step) in enumerate(self._steps(averaged, buffers)):
                if counted:
                    since = buffer.float() - self._handed[index].float()
                    buffer.copy_(self._agreed[index].float() + since)
                else:
                    buffer.add_(step)

    def _steps(
        self, averaged: F32, targets: Sequence[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if self._leads is not None and self._sizes:
            share = averaged[self._share_at]
            moved = averaged[: self._sizes]
            averaged = moved / share if share > 0 else np.zeros_like(moved)
        start = 0
        for target in targets:
            end = start + target.numel()
            yield target, torch.from_numpy(averaged[start:end]).view(target.shape).to(target.device)
            start = end
