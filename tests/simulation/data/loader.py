"""What a simulated training loop draws: the real leases and claims, with a loader that fetches ahead."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Any

from p2pavg.data.draws import Draws
from p2pavg.optim.sampling import SPOILED
from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine.rules.notes import of_leader
from p2pavg.rounds.protocol.ballot import Lineage, Note, PeerId

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.simulation.trainer import Node, Sample

    Left = tuple[list[Sample], Note]

AHEAD = 6  # most positions that a loader has fetched beside those that its loop trains next
ANEW = 0.02  # how often a loader begins anew, for each batch


class Undrawn:
    """A swarm whose peers draw their own samples: nothing is leased, notes are names."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def drew(self, samples: Sequence[Sample]) -> str:
        """A step counted these. Returns why they are to be dropped with all that were accumulated, if so."""
        return ""

    def met(self, peer: PeerId) -> None:
        """A link came up."""

    def heard(self, peer: PeerId, claims: Any) -> None:
        """Another process told its claims."""

    def boundary(self, inherited: Sequence[Left]) -> list[Sample]:
        """What was accumulated is about to be handed in. Returns what others left and is taken."""
        return [sample for samples, _ in inherited for sample in samples]

    def note(self, samples: int) -> Note:
        """Of a contribution."""
        return self.node.me

    def combine(
        self, said: Mapping[PeerId, Note], members: Sequence[PeerId], leader: PeerId
    ) -> tuple[Note, frozenset[PeerId]]:
        """As the leader."""
        return of_leader(said, members, leader)

    def committed(self, commit: act.Commit, counted: bool) -> None:
        """The average is applied."""

    def waits(self) -> None:
        """The training thread waits at a boundary."""

    def loaded(self, lineage: Lineage) -> None:
        """Another's state took the place of this process's."""

    def dropped(self) -> None:
        """What was accumulated is discarded."""


class Loader(Undrawn):
    """Draws as an optimizer with a sampler does: `p2pavg.optim.sampling` is its model."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.positions = node.swarm.checks.positions
        self.draws = Draws(self.positions.length, self.positions.block)
        self._ahead: deque[int] = deque()  # fetched, not trained
        self._dice = random.Random(f"loader {node.swarm.seed} {node.name}")
        self.draws.load_state_dict(self.positions.ledger(node.parameters.lineage))
        self.draws.attach(node.me, lambda: node.links, self._tell)

    def waits(self) -> None:
        self.positions.waits(self.node, self)

    def combine(
        self, said: Mapping[PeerId, Note], members: Sequence[PeerId], leader: PeerId
    ) -> tuple[Note, frozenset[PeerId]]:
        return self.draws.combine(said, members, leader)

    def _tell(self) -> None:
        claims = self.draws.claims()
        for peer in self.node.links:
            self._claims_to(peer, claims)

    def met(self, peer: PeerId) -> None:
        self._claims_to(peer, self.draws.claims())

    def _claims_to(self, peer: PeerId, claims: list[int]) -> None:
        me, other = self.node.me, self.node.links.get(peer)
        if claims and other is not None:
            self.node.swarm.post(self.node, other, lambda: other.data.heard(me, claims))

    def heard(self, peer: PeerId, claims: Any) -> None:
        self.draws.heard(peer, claims)

    def drew(self, samples: Sequence[Sample]) -> str:
        if self._dice.random() < ANEW:
            self.draws.begin()
            self._ahead.clear()
        fetched = len(samples) + self._dice.randint(0, AHEAD)
        while len(self._ahead) < fetched:
            run = self.draws.next_run(None, self._fitting)
            assert run is not None
            self._ahead.extend(range(*run))
        self.draws.trained(len(samples))
        for sample in samples:
            self.positions.of[sample] = self._ahead.popleft()
        return SPOILED if self.draws.yielded else ""

    def _fitting(self, first: int) -> int:
        return min(2, self.draws.length - first % self.draws.length)

    def boundary(self, inherited: Sequence[Left]) -> list[Sample]:
        node = self.node
        if self.draws.spoiled:
            node.drop(SPOILED)
        taken: list[Sample] = []
        for samples, note in inherited:
            if self.draws.inherited(note):
                taken += samples
            else:
                node.discarded += len(samples)
        if self.draws.spoiled:
            node.discarded += len(taken)
            taken.clear()
            node.drop(SPOILED)
        return taken

    def note(self, samples: int) -> Note:
        return self.draws.say(self.node.me, samples)

    def committed(self, commit: act.Commit, counted: bool) -> None:
        self.draws.committed(commit.note, commit.ballot.epoch, counted)
        self.positions.applied(self.node, commit.lineage, self.draws.ledger)

    def loaded(self, lineage: Lineage) -> None:
        self.draws.load_state_dict(self.positions.ledger(lineage))
        self.draws.dropped()

    def dropped(self) -> None:
        self.draws.dropped()
