"""The scheduler that steps once per epoch."""

from __future__ import annotations

import logging

from torch.optim.lr_scheduler import LRScheduler

log = logging.getLogger("p2pavg.optim")


class Schedule:
    """Steps a scheduler, or none, after the optimizer, and notices when somebody else steps it."""

    def __init__(self, scheduler: LRScheduler | None) -> None:
        self._scheduler = scheduler
        self._told = False
        self.loaded()

    def loaded(self) -> None:
        """Note that the scheduler's state was replaced."""
        self._at = getattr(self._scheduler, "last_epoch", None)

    def step(self) -> Exception | None:
        """Step the scheduler. Returns the exception that it raised: the epoch is over all the same, as
        parameters moved.
        """
        scheduler = self._scheduler
        if scheduler is None:
            return None
        if getattr(scheduler, "last_epoch", None) != self._at and not self._told:
            self._told = True
            log.warning(
                "the scheduler was stepped by the training loop, too: scheduler= steps it once per epoch; "
                "take its step() out of the loop"
            )
        try:
            scheduler.step()
        except Exception as error:
            return error
        finally:
            self.loaded()
        return None
