"""Averages that stay above the target: said once, since a larger batch is another training."""

from __future__ import annotations

import logging

log = logging.getLogger("p2pavg.optim")

EPOCHS = 10  # in a row
MORE = 1.25  # times the target


class Overshoot:
    """Watches how many samples averages hold."""

    def __init__(self, target: int | None) -> None:
        """target: None: there is none."""
        self._target = target
        self._above: list[int] = []
        self._told = False

    def saw(self, samples: int) -> None:
        """The next average holds so many."""
        if self._told or self._target is None or samples < MORE * self._target:
            self._above.clear()
            return
        self._above.append(samples)
        if len(self._above) == EPOCHS:
            self._told = True
            log.warning(
                "averages hold %d samples, where target_batch_size=%d: the peers' steps bring more at once "
                "than is missing; take smaller steps, or a larger target with the learning rate for it",
                sum(self._above) // EPOCHS,
                self._target,
            )
