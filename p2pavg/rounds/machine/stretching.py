"""Epochs that last longer than the samples need, so that rounds cost no more than allowed.

The leader lets an epoch count more samples: until the next round may begin, it tells each peer so many fewer
of the others' samples that no training thread stops before.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from p2pavg.rounds.machine.actions import Stretch, TraceKind
from p2pavg.rounds.machine.rules.camps import Facts
from p2pavg.rounds.machine.rules.pace import STOP_EARLY
from p2pavg.rounds.machine.rules.spacing import Spacing, Spent

if TYPE_CHECKING:
    from p2pavg.rounds.machine.machine import Machine


class Stretching:
    """Knows when the next round may begin."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.core = machine.core
        self._spent = Spent(-math.inf if machine.core.here.epoch == 0 else machine.core.now)
        self._committed = False  # the round of the epoch under way
        self._known: tuple[object, Spacing | None] = None, None  # of which group
        self._reached_at: float | None = None  # when the target was reached in this epoch
        self._told = False

    def committed(self) -> None:
        """A round of the epoch under way is committed."""
        state = self.core.epoch_state
        self._spent, self._committed = Spent(state.proposed_at, state.attempts), True

    def moved(self) -> None:
        """This peer stands at another epoch."""
        if self._reached_at is None:
            self._told = False  # the last epoch was not stretched
        self._reached_at = None
        if not self._committed:  # whoever comes by a state does not know when the last round was
            self._spent = Spent(self.core.now)
        self._committed = False

    def until(self) -> float:
        """When the next round may begin, at the earliest."""
        spacing = self._spacing()
        if spacing is None or self.core.epoch_state.begun_before:
            return -math.inf
        return self._spent.next_round(spacing)

    def _spacing(self) -> Spacing | None:
        """Of all that stand here, late ones included: they get the result, and the next round counts them."""
        core = self.core
        if core.config.spacing is None:
            return None
        out = core.epoch_state.excluded
        peers = {f.peer for f in core.linked.standing(*core.here.standing) if f.peer not in out}
        group = core.here.epoch, frozenset(peers)
        if self._known[0] != group:
            self._known = group, core.config.spacing(self.machine.leading.planned([core.me, *peers]))
        return self._known[1]

    def hold(self) -> None:
        """The target is reached, and the next round may not begin yet."""
        spacing = self._spacing()
        if self._reached_at is None:
            self._reached_at = self.core.now
        if spacing is not None and not self._told:
            self._told = True
            self.core.act(Stretch(spacing))

    def let_go(self) -> None:
        """The next round begins."""
        if self._reached_at is not None:
            self.core.trace(TraceKind.STRETCHED, seconds=self.core.now - self._reached_at)

    def others(self, others: int, total: int, followers: list[Facts], at: float) -> int:
        """What a peer is told of the others' samples.

        at: when half of its step after the one under way is done. others: samples that the others will have
        then. total: samples that all peers have now.
        """
        until = self.until()
        if at >= until:
            return others
        core = self.core
        ways = [(f.pace, f.boundary) for f in followers]
        if not core.here.pending:
            ways.append((core.own.pace, core.own.boundary))
        counted = total + sum(p.coming(until, core.now if waits else p.since) for p, waits in ways)
        return others - max(0, counted + 1 - core.target)

    def soon(self) -> bool:
        """Whether the next round may begin before another own step would be half done."""
        return self.until() <= self.core.now + STOP_EARLY * self.core.own.pace.seconds

    def believed(self, others: int) -> int:
        """What to make of a leader's word of the others' samples. Fewer than none are those of an epoch that
        counts more, which goes on for no longer than some times as long as this peer would have it go on.
        """
        if others >= 0:
            return others
        spacing = self._spacing()
        if spacing is None or self.core.now >= self._spent.believed_until(spacing):
            return 0
        return others
