"""A learning rate that something outside changes at every step(), while the swarm steps once per epoch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

log = logging.getLogger("p2pavg.optim")

IN_A_ROW = 2  # changes: one may be a schedule's that is stepped once per epoch, or per pass over the data


class Outside:
    """Looks at the learning rates at each step().

    scheduled: the swarm steps a schedule of its own, and tells by itself of another hand at it. lockstep:
    each step() ends an epoch: then there is nothing to look at. behind: epochs end
    on another thread, where the swarm's own changes of the rate may come between two steps.
    """

    def __init__(self, scheduled: bool, lockstep: bool, behind: bool) -> None:
        self._off = scheduled or lockstep
        self._limit = IN_A_ROW + behind
        self._seen: tuple[object, object] | None = None
        self._changes = 0
        self._told = False

    def begins(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """A step() begins: tell once of a schedule that runs ahead of the epochs."""
        if self._off or self._told or self._seen is None or _rates(groups) == self._seen:
            return
        self._changes += 1
        if self._changes < self._limit:
            return
        self._told = True
        log.warning(
            "the learning rate was changed more than once in an epoch, at each step(), and an epoch ends "
            "when the swarm has target_batch_size samples: pass the schedule as scheduler=, built on the "
            "inner optimizer, and delete scheduler.step() from the loop; or set the rate by opt.epoch"
        )

    def ended(self, groups: Sequence[Mapping[str, Any]], stepped: bool) -> None:
        """A step() ended. stepped: it ended an epoch."""
        if self._off:
            return
        self._seen = _rates(groups)
        if stepped:
            self._changes = 0


def _rates(groups: Sequence[Mapping[str, Any]]) -> tuple[object, object]:
    """Of the first and the last group; of a tensor, which may be on a device, its version."""
    first, last = groups[0].get("lr"), groups[-1].get("lr")
    if isinstance(first, torch.Tensor):
        first = first._version
    if isinstance(last, torch.Tensor):
        last = last._version
    return first, last
