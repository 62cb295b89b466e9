"""What peers said binds them: ballots, READY, denials, DONE, outcomes. And how much they say."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.protocol.ballot import Ballot, PeerId, Stage
from p2pavg.rounds.protocol.messages import (
    Aborted,
    Begin,
    Committed,
    Done,
    Prepare,
    Promise,
    Query,
    Ready,
)

if TYPE_CHECKING:
    from tests.simulation.checks import Checks
    from tests.simulation.process import Process
    from tests.simulation.trainer import Node

MOST_MESSAGES = 240  # of one peer in one virtual second, and so many more for each link
MOST_TO_EACH = 40
Declared = tuple[int, float]  # samples and weight


class Said:
    """All messages of all processes, as far as they bind."""

    def __init__(self, checks: Checks) -> None:
        self.checks = checks
        self.meanings: dict[Any, Any] = {}  # of ballots, of what began under them, and of transfers
        self.declared: dict[tuple[Ballot, PeerId], set[Declared]] = {}  # all that a member ever said to it
        self.standing: dict[Node, tuple[Ballot, int, Declared]] = {}  # the last READY, and of which wait
        self.denied: dict[Ballot, set[Node]] = {}  # voters that told a successor that they are not DONE
        self.done: dict[Ballot, set[Node]] = {}  # who said so
        self.promised: dict[tuple[Node, Any], Ballot] = {}  # the highest, by where the process stood
        self.looked_at: Begin | None = None
        self.bound: dict[
            Node, tuple[Ballot, Ballot]
        ] = {}  # DONE in the first, as the second's leader was told
        self.questions: dict[Node, Ballot] = {}  # the last that it asked others with
        self.asked: dict[Ballot, set[PeerId]] = {}  # by a successor
        self.open: dict[Node, Ballot] = {}  # of those, not decided yet
        self.told: dict[Ballot, set[PeerId]] = {}  # of the end of a question
        self.asked_at: dict[Ballot, float] = {}
        self.named: dict[Ballot, set[PeerId]] = {}  # voters that answers to a successor name
        self.liars: set[Node] = set()  # whose BEGINs a test forges
        self.busiest = 0.0  # messages of one peer in one second, as a share of what it may send

    def _means(self, what: Any, meaning: Any) -> None:
        if self.meanings.setdefault(what, meaning) != meaning:
            kind = what[0]
            self.checks.broken("Equal", f"a {kind} has two meanings")

    def sends(self, node: Node, peer: PeerId, message: Any) -> None:
        """Looked at before it is on its way."""
        self._counts(node)
        look = LOOKED_AT.get(type(message))
        if look is not None:
            look(self, node, peer, message)

    def tells_itself(self, node: Any, message: Any) -> None:
        """A leader is a member, too."""
        look = LOOKED_AT.get(type(message))
        if look is not None:
            look(self, node, node.me, message)

    def _counts(self, node: Node) -> None:
        second = int(self.checks.swarm.world.now)
        if node.sent[0] != second:
            node.sent[:] = second, 0, 0
        node.sent[1] += 1
        # Links that broke within the second count, too: what went over them was said while they were up.
        node.sent[2] = max(node.sent[2], len(node.links))
        most = MOST_MESSAGES + MOST_TO_EACH * node.sent[2]
        self.busiest = max(self.busiest, node.sent[1] / most)
        if node.sent[1] > most:
            self.checks.broken("Live", f"{node.name} sends more than {most} messages in a second")

    def _prepare(self, node: Node, _: PeerId, message: Prepare) -> None:
        self._means(("ballot", message.ballot), (message.members, message.voters, message.plan))
        self._means(("transfer", message.ballot.transfer), message.ballot)

    def _query(self, node: Node, peer: PeerId, message: Query) -> None:
        self._means(("ballot", message.ballot), "a question")
        self.asked.setdefault(message.ballot, set()).add(peer)
        self.questions[node] = self.open[node] = message.ballot
        self.asked_at.setdefault(message.ballot, self.checks.swarm.world.now)

    def _promise(self, node: Node, peer: PeerId, message: Promise) -> None:
        if peer == node.me:
            return  # looked at before what it told others first; its own ballots are above all others
        held = message.held
        holding = node.machine.core.holding
        if holding is not None and holding.ballot == message.ballot and not holding.voter:
            return  # nobody asks it
        where = (node, message.ballot.standing)
        last = self.promised.get(where)
        if last is not None and message.ballot <= last:
            self.checks.broken("Equal", f"{node.name} promises a ballot that is not above its last one")
        self.promised[where] = message.ballot
        if held is None or node.me not in held.voters:
            return
        if held.stage is Stage.OPEN:
            self.denied.setdefault(held.ballot, set()).add(node)
        elif held.stage is Stage.DONE:
            self.bound[node] = held.ballot, message.ballot

    def _ready(self, node: Node, _: PeerId, message: Ready) -> None:
        if not node.waiting:
            self.checks.broken("Counted", f"{node.name} says READY while it computes")
        declared = (message.samples, message.weight)
        self.declared.setdefault((message.ballot, node.me), set()).add(declared)
        self.standing[node] = message.ballot, node.waits, declared

    def _begin(self, node: Node, _: PeerId, message: Begin) -> None:
        if node in self.liars or message is self.looked_at:  # one object goes to all members
            return
        self.looked_at = message
        self._means(("BEGIN", message.ballot), (message.weights, message.samples, message.waits))
        members = self.meanings["ballot", message.ballot][0]
        for peer, *told in zip(members, message.samples, message.weights, message.waits, strict=True):
            declared = self.declared.get((message.ballot, peer), set())
            if tuple(told[:2]) not in (declared if told[2] else {(0, 0.0)}):
                self.checks.broken(
                    "Counted", f"{node.name} begins with samples that a member did not declare"
                )

    def _done(self, node: Node, _: PeerId, message: Done) -> None:
        if node in self.denied.get(message.ballot, ()):
            self.checks.broken("Equal", f"{node.name} tells DONE after it denied it to a successor")
        self.done.setdefault(message.ballot, set()).add(node)

    def _committed(self, node: Node, peer: PeerId, message: Committed) -> None:
        began = self.meanings.get(("BEGIN", message.ballot))
        if began is None or began[:2] != (message.weights, message.samples):
            self.checks.broken("Whole", f"{node.name} tells COMMITTED with other weights than it began with")
        self._ends(node, peer)

    def _aborted(self, node: Node, peer: PeerId, message: Aborted) -> None:
        if message.by == self.open.get(node):
            self._ends(node, peer)

    def _ends(self, node: Node, peer: PeerId) -> None:
        if node in self.open:
            self.told.setdefault(self.open[node], set()).add(peer)

    def concludes(self, node: Node) -> None:
        """A successor asks everybody that an answer names before it decides."""
        ballot = self.questions.get(node)
        if ballot is None:
            return  # there was nobody to ask
        forgotten = self.named.get(ballot, set()) - self.asked[ballot] - {node.me}
        if forgotten:
            self.checks.broken("Equal", f"{node.name} decides without asking whom the answers name")

    def handled(self, node: Process, event: Any) -> None:
        """What others said was heard."""
        kind = type(event)
        if kind is ev.PeerUp:
            node.met[event.peer] = self.checks.swarm.world.now
        elif kind is ev.PeerDown:
            node.met.pop(event.peer, None)
        if kind is not ev.Received:
            return
        message = event.message
        if type(message) is Aborted and self.bound.get(node, (None, None))[1] == message.ballot:
            del self.bound[node]  # the question was given up
        if type(message) is Promise and message.held is not None and message.ballot in self.asked:
            view, since = node.machine.core.linked, self.asked_at[message.ballot]
            linked = {p for p in message.held.voters if p in view and node.met.get(p, inf) < since}
            self.named.setdefault(message.ballot, set()).update(linked)

    def begins(self, node: Node, begun: act.BeginJob) -> None:
        """A member contributes what it declared in the wait that lasts."""
        held = node.machine.core.holding
        job = node.jobs[begun.transfer]
        weight = begun.weights[job.rank]
        if held is None or held.transfer != begun.transfer:
            return  # it was given up with the same event
        if not held.ready:
            if weight > 0:
                self.checks.broken("Counted", f"{node.name} contributes without having said so")
            return
        ballot, wait, declared = self.standing.get(node, (None, 0, (0, 0.0)))
        if not node.waiting or ballot != held.ballot or wait != node.waits:
            self.checks.broken(
                "Counted", f"{node.name} is counted with a contribution that it has taken back"
            )
        samples = len(node.contribution)
        said = samples if node.weight is None else node.weight
        if (samples, said) != declared or weight != said or samples != held.samples[job.rank]:
            self.checks.broken("Counted", f"{node.name} contributes other samples than it said")

    def cancels(self, node: Node, cancelled: act.CancelJob) -> None:
        """A result that a successor was told of is dropped by its word, or by that of somebody above it."""
        job, event = node.jobs.get(cancelled.transfer), node.handles
        if job is None or type(event) is not ev.Received or type(event.message) is not Aborted:
            return
        done, promised = self.bound.get(node, (None, event.message.by))
        if done == job.ballot and event.message.by < promised:
            self.checks.broken(
                "Equal", f"{node.name} drops what it told a successor of by somebody else's word"
            )

    def rests(self, node: Node) -> None:
        """Whoever gives up its questions tells those that it asked: they wait for its word."""
        ballot, inquest = self.open[node], node.machine.core.inquest
        if inquest is not None and inquest.ballot == ballot:
            return
        del self.open[node]
        view, since = node.machine.core.linked, self.asked_at[ballot]
        waiting = self.asked[ballot] - self.told.pop(ballot, set())
        waiting = {p for p in waiting if p in view and p in node.links and node.met.get(p, inf) < since}
        if waiting and not node.machine.departure.announced:
            self.checks.broken("Live", f"{node.name} gives up its questions and does not say so")


LOOKED_AT: dict[type[Any], Any] = {
    Prepare: Said._prepare,
    Query: Said._query,
    Promise: Said._promise,
    Ready: Said._ready,
    Begin: Said._begin,
    Done: Said._done,
    Committed: Said._committed,
    Aborted: Said._aborted,
}
