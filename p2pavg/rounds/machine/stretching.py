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
        # Whoever comes to a run that goes on does not know when its last round was.
        fresh = machine.core.config.epoch == 0
        self._spent = Spent(-math.inf if fresh else machine.core.now)
        self._spacing: tuple[object, Spacing | None] = None, None  # of which group
        self._reached_at: float | None = None  # when the target was reached in this epoch
        self._told = False

    def committed(self) -> None:
        """A round of the epoch under way is committed."""
        state = self.core.epoch_state
        self._spent = Spent(state.proposed_at, state.attempts)

    def moved(self) -> None:
        """This peer stands at another epoch."""
        if self._reached_at is None:
            self._told = False  # the last epoch was not stretched
        self._reached_at = None

    def until(self, followers: list[Facts]) -> float:
        """When the next round of this peer and these may begin, at the earliest."""
        spacing = self._of(followers)
        if spacing is None or self.core.epoch_state.begun_before:
            return -math.inf
        return self._spent.next_round(spacing)

    def _of(self, followers: list[Facts]) -> Spacing | None:
        core = self.core
        if core.config.spacing is None:
            return None
        group = core.here.epoch, frozenset(facts.peer for facts in followers)
        if self._spacing[0] != group:
            members = self.machine.leading.planned([core.me, *(facts.peer for facts in followers)])
            self._spacing = group, core.config.spacing(members)
        return self._spacing[1]

    def hold(self, followers: list[Facts]) -> None:
        """The target is reached, and the next round may not begin yet."""
        spacing = self._of(followers)
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
        until = self.until(followers)
        if at >= until:
            return others
        core = self.core
        ways = [(f.pace, f.boundary) for f in followers]
        if not core.here.pending:
            ways.append((core.own.pace, core.own.boundary))
        counted = total + sum(p.coming(until, core.now if waits else p.since) for p, waits in ways)
        return others - max(0, counted + 1 - core.target)

    def soon(self, followers: list[Facts]) -> bool:
        """Whether the next round may begin before another own step would be half done."""
        return self.until(followers) <= self.core.now + STOP_EARLY * self.core.own.pace.seconds

    def believed(self, others: int) -> int:
        """What to make of a leader's word of the others' samples. Fewer than none are those of an epoch that
        counts more, which goes on for no longer than some times as long as this peer would have it go on.
        """
        if others >= 0:
            return others
        spacing = self._of(self.machine.counting.followers())
        if spacing is None or self.core.now >= self._spent.believed_until(spacing):
            return 0
        return others
