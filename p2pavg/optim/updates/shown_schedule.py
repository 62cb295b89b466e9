"""A stand-in for a scheduler, for frameworks that want one to step."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler


class ShownSchedule(LRScheduler):
    """Tells the learning rate of the last step. An epoch's end steps the real schedule, and the optimizer's
    state_dict() holds it: here step() only looks at the rate again.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.last_epoch = 0
        self.step()

    def step(self, epoch: int | None = None) -> None:
        """The training loop has gone on: what is told from now on is the rate of the coming step."""
        self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """By parameter group."""
        return list(self._rates)

    def state_dict(self) -> dict[str, Any]:
        """An empty dict."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing is in it. The rate may be another one since."""
        self.step()
