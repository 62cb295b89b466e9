"""Which position each sample is of, and that each is in one average of a lineage, whatever the ledgers
say.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from p2pavg.data import notes
from p2pavg.data.ledger import PositionLedger
from p2pavg.data.runs import Runs, difference, intersection, size, union
from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.protocol.ballot import Lineage

if TYPE_CHECKING:
    from tests.simulation.checks import Checks
    from tests.simulation.data.loader import Loader
    from tests.simulation.trainer import Node, Sample


class Positions:
    """Kept by the identity of samples, beside the books of their counts."""

    def __init__(self, checks: Checks, lineage: Lineage, length: int, block: int) -> None:
        """length: positions of a pass. block: how many are claimed at a time."""
        self.checks = checks
        self.length = length
        self.block = block
        self.of: dict[Sample, int] = {}
        self.averaged: dict[Lineage, Runs] = {lineage: ()}
        self._ledgers: dict[Lineage, dict[str, Any]] = {lineage: PositionLedger().state_dict()}

    def ledger(self, lineage: Lineage) -> dict[str, Any]:
        """That of everybody who stands there."""
        return self._ledgers[lineage]

    def committed(self, node: Node, commit: act.Commit, samples: set[Sample]) -> None:
        """An average is made: of which positions it is, by the identity of what went into it."""
        mine = union((self.of[sample], self.of[sample] + 1) for sample in samples)
        past = self.averaged[commit.before]
        if size(mine) != len(samples) or intersection(past, mine):
            self.checks.broken("Once", f"{node.name} averages a position twice in one lineage")
        if notes.understand(commit.note)[1].consumed != mine:
            self.checks.broken("Once", f"{node.name} commits other positions than are in the average")
        self.averaged[commit.lineage] = union(past, mine)

    def applied(self, node: Node, lineage: Lineage, ledger: PositionLedger) -> None:
        """The average is consumed, on all peers alike; no position is two peers' to draw."""
        self._consumed(node, lineage, ledger)
        state = ledger.state_dict()
        known = self._ledgers.setdefault(lineage, state)
        if known != state:
            self.checks.broken("Once", f"{node.name} has another ledger than others of its lineage")
        leased = sorted(run for runs in (*ledger.leases.values(), ledger.consumed) for run in runs)
        if any(before[1] > after[0] for before, after in pairwise(leased)):
            self.checks.broken("Once", f"{node.name} knows a position that is leased twice, or consumed")

    def waits(self, node: Node, loader: Loader) -> None:
        """Nothing is consumed that is in no average; what is accumulated is what was drawn for it."""
        self._consumed(node, node.parameters.lineage, loader.draws.ledger)
        drawn = sorted(position for run in loader.draws._trained for position in range(*run))
        if drawn != sorted(self.of[sample] for sample in node.samples):
            self.checks.broken("Once", f"{node.name} names other positions than it accumulated")

    def _consumed(self, node: Node, lineage: Lineage, ledger: PositionLedger) -> None:
        if ledger.consumed != self.averaged[lineage]:
            self.checks.broken("Once", f"{node.name} takes other positions for consumed than are averaged")

    @property
    def drawn(self) -> int:
        """All positions that anybody ever trained on are below this."""
        return max(self.of.values(), default=-1) + 1

    def missing(self, lineage: Lineage, least: int) -> Runs:
        """Of the first `least` positions, those that are in no average of the lineage, and that no living
        process has among the samples that it is about to hand in.
        """
        living = (node for node in self.checks.swarm.nodes.values() if node.alive)
        waiting = union((self.of[each], self.of[each] + 1) for node in living for each in node.samples)
        return difference(((0, least),), union(self.averaged[lineage], waiting)) if least else ()

    def at_the_end(self, least: int) -> None:
        """Whatever died, left or was discarded: what it drew is drawn again."""
        checks = self.checks
        for node in checks.swarm.nodes.values():
            if not node.alive or checks.orphaned(node):
                continue
            if missing := self.missing(node.parameters.lineage, least):
                checks.broken("Once", f"{size(missing)} positions {missing[:3]} are never drawn again")
