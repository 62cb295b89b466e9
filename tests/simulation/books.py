"""Where each sample is: with a living process, in a lineage's averages, handed over, or named as lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.protocol.ballot import Lineage
from p2pavg.rounds.protocol.roles import Role

if TYPE_CHECKING:
    from tests.simulation.checks import Checks
    from tests.simulation.jobs import Job
    from tests.simulation.trainer import Node, Sample


class Books:
    """Kept by the identity of samples, over all processes, those that left included."""

    def __init__(self, checks: Checks, lineage: Lineage) -> None:
        self.checks = checks
        self.counted: dict[Lineage, frozenset[Any]] = {lineage: frozenset()}  # in all averages of a lineage
        self.receivers: dict[Sample, Node] = {}  # who inherited it last
        self.given: dict[Node, set[Sample]] = {}  # what a process handed over
        self.offered: dict[Node, set[Sample]] = {}  # what a process had in transfers that began
        self.doubtful: dict[Node, set[Sample]] = {}  # left without knowing what became of these

    def waits(self, node: Node) -> None:
        """A training thread comes to a boundary."""
        again = self.counted[node.parameters.lineage].intersection(node.contribution)
        if again:
            self.checks.broken("Counted", f"{node.name} waits with {len(again)} samples that it has averaged")

    def begins(self, node: Node, job: Job) -> None:
        """A transfer flows with these samples of this process."""
        if job.contribution:
            self.offered.setdefault(node, set()).update(job.contribution)

    def applied(self, node: Node, commit: act.Commit, job: Job) -> None:
        """What leaves the count is what is in the average."""
        if commit.following:
            return  # another's copy of the result, on top of a state that holds nothing of ours
        leaves = () if commit.late else tuple(node.samples[: len(node.contribution)])
        if leaves != job.contribution:
            self.checks.broken(
                "Counted",
                f"{node.name} subtracts {len(leaves)} samples, and {len(job.contribution)} of its samples "
                f"are in the average",
            )

    def handed(self, giver: Node, receiver: Node, samples: list[Sample]) -> None:
        """Nobody else may have them, and they may not be where the receiver stands."""
        for sample in samples:
            other = self.receivers.get(sample)
            held = other is not None and other.alive and other is not giver
            if held and (sample in other.samples or sample in other.inherited):
                self.checks.broken("Counted", f"{other.name} and {receiver.name} inherit the same sample")
            self.receivers[sample] = receiver
        self.given.setdefault(giver, set()).update(samples)
        again = self.counted[receiver.machine.lineage].intersection(samples)
        if again:
            self.checks.broken(
                "Counted",
                f"{receiver.name} inherits {len(again)} samples that are in its lineage from {giver.name}",
            )

    def left(self, node: Node) -> None:
        """It has named what is lost; of some samples it cannot know."""
        held, offered = {*node.samples, *node.inherited}, self.offered.get(node, set())
        doubtful = held & offered
        if node.machine.role is Role.JOINER:  # results that it has yet to follow may hold what it named
            doubtful |= offered - self.counted[node.parameters.lineage]
        if node.handover is not None and node.handover.ended:
            doubtful |= set(node.handover.samples)
        self.doubtful[node] = doubtful

    def _where_it_left(self, node: Node) -> set[Lineage]:
        """The lineages that it believed its samples to be in."""
        told = None if node.handover is None else node.handover.counted_at
        return {node.parameters.lineage} if told is None else {node.parameters.lineage, told}

    def balance(self, node: Node, final: frozenset[Any], chain: set[Lineage]) -> None:
        """Each sample that a process made or inherited is averaged, waits, was handed over, or is named."""
        made = {(node.me, number) for number in node.numbers} | node.receiver_of
        made -= self.given.get(node, set())
        lost = made - final
        if not node.left:
            lost.difference_update(node.samples, node.inherited)
            unknown = 0
        elif not self._where_it_left(node) <= chain:
            return  # what it averaged was undone when it was gone
        else:
            unknown = len(self.doubtful[node] - lost)
        if not len(lost) <= node.discarded <= len(lost) + unknown:
            self.checks.broken(
                "Counted",
                f"{node.name} made or inherited {len(made)} samples: {len(made & final)} are averaged, "
                f"{len(lost)} are lost, and it named {node.discarded} as discarded",
            )
