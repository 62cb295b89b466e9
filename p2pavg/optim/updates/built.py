"""The options that an optimizer was built with, and what a user is told when the run's take their place."""

from __future__ import annotations

import logging

import torch
from torch.optim.lr_scheduler import LRScheduler

from p2pavg.optim.updates.options import Columns, columns, differences

log = logging.getLogger("p2pavg.optim")

CHOSEN = frozenset(
    [
        "lr",
        "initial_lr",
        "momentum",
        "betas",
        "eps",
        "weight_decay",
        "dampening",
        "nesterov",
        "amsgrad",
        "maximize",
        "alpha",
        "centered",
        "rho",
        "momentum_decay",
        "lr_decay",
        "lambd",
        "etas",
    ]
)
"""Options that a user chooses. Some optimizers keep counters and the like beside them in their groups."""
KINDS = frozenset(["momentum", "nesterov", "amsgrad", "maximize", "centered"])
"""Those that say what an optimizer does, and what it keeps."""
RATE, FIRST_RATE = "lr", "initial_lr"  # what a scheduler sets, and what it began from
CYCLED = ("momentum", "betas")  # what OneCycleLR and CyclicLR set beside the rate
CYCLES = "max_momentum"  # an option that these two leave in the groups


class Built:
    """The options of an optimizer, as they are before it takes over the state of a run."""

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> None:
        self._optimizer = optimizer
        self._any = all(type(one).__module__ == LRScheduler.__module__ for one in _parts(scheduler))
        self._options = columns(optimizer.param_groups)

    def tell_replaced(self, among: frozenset[str] = CHOSEN | {FIRST_RATE}) -> None:
        """Warn of options that have other values by now, except of those that a scheduler sets."""
        now = columns(self._optimizer.param_groups)
        before = {name: column for name, column in self._comparable(now).items() if name in among}
        found = differences(before, now, len(self._optimizer.param_groups))
        if found:
            told = ", ".join(
                f"{name} {mine!r} by {theirs!r}" for name, (mine, theirs) in sorted(found.items())
            )
            log.warning(
                "the run's state replaces options that this optimizer was built with (%s): build it as the "
                "other peers do, and change an option in a run by scheduler=, or as a function of opt.epoch, "
                "the same on all peers; if the loop does so, all is well",
                told,
            )

    def _comparable(self, now: Columns) -> Columns:
        if FIRST_RATE not in self._options or FIRST_RATE not in now:
            names = CHOSEN
        elif not self._any:  # a schedule of the user's own may set anything
            names = frozenset({FIRST_RATE})
        else:
            names = CHOSEN - {RATE, *(CYCLED if CYCLES in now else ())}
        return {name: column for name, column in self._options.items() if name in names}


def _parts(scheduler: LRScheduler | None) -> list[LRScheduler]:
    """A scheduler, or those that it is made of."""
    if scheduler is None:
        return []
    return list(getattr(scheduler, "_schedulers", [scheduler]))
