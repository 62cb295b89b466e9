"""A warning, given once, when averages stay above the target: a larger batch is another training."""

from __future__ import annotations

import logging

log = logging.getLogger("p2pavg.optim")

EPOCHS = 10  # in a row, after which the warning is given
MORE = 1.25  # an average above so many times the target counts


class Overshoot:
    """Watches how many samples averages hold."""

    def __init__(self, target: int | None) -> None:
        """target: samples; None: epochs have no target."""
        self._target = target
        self._above: list[int] = []
        self._told = False

    def saw(self, samples: int) -> None:
        """Take the samples of the next average."""
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
