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

    def whole(self, lineage: Lineage, least: int) -> bool:
        """Whether each of the first `least` positions is in an average of the lineage."""
        return least == 0 or intersection(self.averaged[lineage], ((0, least),)) == ((0, least),)

    def at_the_end(self, least: int) -> None:
        """Whatever died, left or was discarded: what it drew is drawn again, and averaged."""
        checks = self.checks
        for node in checks.swarm.nodes.values():
            if node.alive and not checks.orphaned(node) and not self.whole(node.parameters.lineage, least):
                missing = difference(((0, least),), self.averaged[node.parameters.lineage])
                checks.broken("Once", f"{size(missing)} positions {missing[:3]} are never drawn again")
