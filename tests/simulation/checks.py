"""What is promised, checked after every event of a simulated schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.protocol.ballot import Ballot, Lineage, PeerId
from p2pavg.rounds.protocol.roles import Role
from tests.simulation.books import Books
from tests.simulation.data.positions import Positions
from tests.simulation.said import Said

if TYPE_CHECKING:
    from tests.simulation.jobs import Job
    from tests.simulation.process import Process
    from tests.simulation.swarm import Swarm
    from tests.simulation.trainer import Node

UNDISTURBED_S = 6.0  # a process and its links without a fault for so long has no excuse
LONGEST_WAIT_S = 60.0  # virtual seconds in one step(), whatever happens


class BrokenPromiseError(AssertionError):
    """A schedule found a bug."""


class Checks:
    """Knows more than any peer: all commits, all messages, all samples."""

    def __init__(self, swarm: Swarm, data: tuple[int, int] | None) -> None:
        self.swarm = swarm
        self.average: dict[Lineage, tuple[Any, ...]] = {}
        self.books = Books(self, swarm.lineage)
        self.positions = None if data is None else Positions(self, swarm.lineage, *data)
        self.said = Said(self)
        self.forks_allowed = False  # something was cut off or stopped: both sides may have gone on
        self.after: dict[Lineage, tuple[Lineage, Ballot]] = {}  # what first came of each lineage
        self.commits = 0
        self.late = 0
        self.failed = 0
        self.heals = 0
        self.aborts = 0
        self.readmitted = 0
        self.successions = 0

    def broken(self, promise: str, what: str) -> None:
        raise BrokenPromiseError(f"{promise}: {what} (at {self.swarm.world.now:.4f} s)")

    def sends(self, node: Node, peer: PeerId, message: Any) -> None:
        self.said.sends(node, peer, message)

    def handled(self, node: Process, event: ev.Event) -> None:
        self.said.handled(node, event)

    def acted(self, node: Any, action: Any) -> None:
        """Each action is looked at once, before it is carried out."""
        kind = type(action)
        if kind is act.Send or kind is act.WaitAt:
            return
        if kind is act.Commit:
            self._committed(node, action)
        elif kind is act.RoundFailed:
            self.failed += 1
        elif kind is act.StartHeal:
            self.heals += 1
        elif kind is act.BeginJob:
            self._begun(node, action)
        elif kind is act.CancelJob:
            self.said.cancels(node, action)
        elif kind is act.Trace:
            self.aborts += action.kind == "aborted"
            self.readmitted += action.kind == "readmitted"
            if action.kind in ("inquest commits", "inquest aborts"):
                self.successions += action.kind == "inquest commits"
                self.said.concludes(node)

    def _begun(self, node: Node, begun: act.BeginJob) -> None:
        """Healing: whoever contributes has applied all of the lineage that it contributes to."""
        if begun.weights[node.jobs[begun.transfer].rank] > 0:
            if not node.waiting:
                self.broken("Counted", f"{node.name} contributes while it computes")
            if (node.parameters.epoch, node.parameters.lineage) != (node.machine.epoch, node.machine.lineage):
                self.broken("Healing", f"{node.name} contributes to a lineage that it has not healed to")
        self.said.begins(node, begun)

    def _committed(self, node: Node, commit: act.Commit) -> None:
        swarm, name = self.swarm, node.name
        job = node.jobs.get(commit.transfer)
        if job is None or not job.done:
            self.broken("Whole", f"{name} commits a result that it does not have")
            return
        self.commits += 1
        self.late += commit.late
        before = commit.before
        average = (before, commit.members, commit.weights, tuple(sorted(job.results.items())))
        if self.average.get(commit.lineage) == average:
            return  # the same has been looked at already
        contributors = {job.members[rank] for rank, weight in enumerate(commit.weights) if weight > 0}
        samples: set[Any] = set()
        count = 0
        for part, value in enumerate(self._values(node, job)):
            if "corrupt" in value and any(
                self._hears(node, swarm.nodes[seat.peer]) for seat in commit.members
            ):
                self.broken("Equal", f"{name} commits a corrupted part")
            value = tuple(item for item in value if item != "corrupt")
            if {peer for (peer, *_), _ in value} != contributors:
                self.broken("Whole", f"{name} commits a part summed over others than announced")
            if len(value) != len(contributors):
                self.broken("Counted", f"{name} commits a part that has a contribution twice")
            for (peer, epoch, lineage, ids), weight in value:
                rank = job.members.index(peer)
                if (epoch, lineage) != (commit.ballot.epoch, before):
                    self.broken("Healing", f"two lineages meet in {name}'s average of epoch {epoch}")
                if len(ids) != commit.samples[rank] or weight != commit.weights[rank]:
                    self.broken("Counted", f"{swarm.name(peer)} contributed other samples than it said")
                samples.update(ids)
                count += len(ids) if part == 0 else 0
        if len(samples) != count:
            self.broken("Counted", f"a sample is in {name}'s average twice")
        known = self.average.setdefault(commit.lineage, average)
        if known != average:
            self.broken("Equal", f"{name} applies another average than others of its lineage")
        counted = self.books.counted
        if before not in counted:
            self.broken("Equal", f"{name} commits to a lineage that nobody made")
        if commit.lineage not in counted:
            past = counted[before]
            if past & samples:
                self.broken("Counted", f"{name} averages a sample twice in one lineage")
            counted[commit.lineage] = past | samples
            if self.positions is not None:
                self.positions.committed(node, commit, samples)
            self._all_done(node, commit)
            self._no_fork(node, commit, before)

    def _values(self, node: Node, job: Job) -> list[Any]:
        """What each part is the sum of; of an all-gather, whose parts are contributions, what all are."""
        values = [job.results[part] for part in range(job.parts)]
        if not job.plan.gathers:
            return values
        for value, part in zip(values, job.plan.parts, strict=True):
            if any(item != "corrupt" and item[0][0] != job.members[part.owner] for item in value):
                self.broken("Whole", f"{node.name} has a contribution in another member's part")
        return [tuple(item for value in values for item in value)]

    def _hears(self, node: Node, other: Node) -> bool:
        """Whether nothing keeps the peer from comparing its result with the other's: no cut that ended
        just now, since when it has not heard the other.
        """
        return self.swarm.reaches(node, other) and other.running and node.machine.core.linked.alive(other.me)

    def _no_fork(self, node: Node, commit: act.Commit, before: Lineage) -> None:
        """A leader commits nothing that a voter denied; who was DONE in a committed one goes no other way."""
        if node.me == commit.ballot.leader and self.said.denied.get(commit.ballot):
            self.broken("Equal", f"{node.name} commits what a voter denied to a successor")
        other, ballot = self.after.setdefault(before, (commit.lineage, commit.ballot))
        if other != commit.lineage and not self.forks_allowed and node in self.said.done.get(ballot, ()):
            self.broken("Equal", f"{node.name} was DONE in what was committed, and makes another history")

    def _all_done(self, node: Node, commit: act.Commit) -> None:
        """A first commit: every voter that nothing has befallen holds the result, too."""
        swarm = self.swarm
        for seat in commit.members:
            other = swarm.nodes[seat.peer]
            if other is node or not seat.voter or not other.alive or commit.transfer not in other.opened:
                continue
            if swarm.world.now - max(other.disturbed_at, node.disturbed_at) < UNDISTURBED_S:
                continue
            job = other.jobs.get(commit.transfer)
            if job is None or not job.done:
                swarm_name = swarm.name(seat.peer)
                self.broken("Whole", f"{node.name} commits while {swarm_name} is not DONE")

    def applied(self, node: Node, commit: act.Commit, job: Job) -> None:
        before = self.average[commit.lineage][0]
        if (node.parameters.epoch, node.parameters.lineage) != (commit.ballot.epoch, before):
            self.broken("Equal", f"{node.name} applies an average to another state than it belongs to")
        self.books.applied(node, commit, job)

    def rests(self, node: Any) -> None:
        """Live: no wait without a deadline. Healing: nobody trains on a state of its own beside the run's."""
        if node in self.said.open:
            self.said.rests(node)
        if node.bare and node.machine.core.here.role is Role.TRAINER:
            self.broken("Healing", f"{node.name} begins a run of its own, though members answered it")
        unlinked = node.machine.core.here.role is Role.JOINER and not node.met
        if unlinked or self.orphaned(node):
            return
        if node.waiting and not node.applying and not node.outcomes and not node.healing:
            if node.machine.next_deadline is None and not self._job_runs(node):
                self.broken("Live", f"{node.name} waits without a deadline")
            if self.swarm.world.now - max(node.waiting_since, node.disturbed_at) > LONGEST_WAIT_S:
                self.broken("Live", f"{node.name} sits in step() for {LONGEST_WAIT_S} s")

    def orphaned(self, node: Node) -> bool:
        """A newcomer that has no state, and nobody is left that has one."""
        nodes = self.swarm.nodes.values()
        return node.machine.core.here.role is Role.JOINER and not any(
            other.alive and other.machine.core.here.role is Role.TRAINER for other in nodes
        )

    def _job_runs(self, node: Node) -> bool:
        """A job has its deadlines inside: they are looked at with every JobProgressed."""
        return any(job.begun and not job.done for job in node.jobs.values())

    def chain(self, nodes: list[Node]) -> set[Lineage]:
        """The lineage of the one that is furthest, and all that led to it."""
        lineage = max(nodes, key=lambda node: node.machine.epoch).machine.lineage
        chain = {lineage}
        while lineage in self.average:
            lineage = self.average[lineage][0]
            chain.add(lineage)
        return chain

    def strays(self, nodes: list[Node]) -> list[Node]:
        """Who is not in the lineage of the one that is furthest."""
        chain = self.chain(nodes)
        return [node for node in nodes if node.machine.lineage not in chain]

    def at_the_end(self, goal: int) -> None:
        """Everybody that lives has finished, in one lineage, and each sample is accounted for."""
        nodes = [node for node in self.swarm.nodes.values() if node.alive and not self.orphaned(node)]
        if not nodes:
            return
        for node in nodes:
            if node.parameters.epoch < goal:
                self.broken("Live", f"{node.name} stands at epoch {node.parameters.epoch} and not at {goal}")
        strays = self.strays(nodes)
        if strays:
            self.broken("Healing", f"{strays[0].name} ends in another lineage than the others")
        best = max(nodes, key=lambda node: node.machine.epoch)
        final, chain = self.books.counted[best.machine.lineage], self.chain(nodes)
        for node in self.swarm.lives:
            if node.alive or node.left:
                self.books.balance(node, final, chain)
