"""A member's side of a ballot: promise, contribute, tell DONE, and apply committed results alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from p2pavg.rounds.machine.actions import BeginJob, CancelJob, OpenJob, TraceKind
from p2pavg.rounds.machine.events import JobDone, JobFailed, JobProgressed, JobRefused
from p2pavg.rounds.machine.memory.holding import Holding
from p2pavg.rounds.machine.memory.promises import MOST_AHEAD
from p2pavg.rounds.machine.rules.deadlines import MOST_BEHIND
from p2pavg.rounds.machine.rules.plausible import all_plausible, undeclared
from p2pavg.rounds.machine.rules.stalls import TransferWatch
from p2pavg.rounds.protocol.ballot import Ballot, Held, PeerId, Stage
from p2pavg.rounds.protocol.causes import FORGIVABLE, Cause, Objection
from p2pavg.rounds.protocol.messages import (
    Begin,
    Begun,
    Committed,
    Complain,
    Done,
    Inquire,
    Prepare,
    Promise,
    Query,
    Ready,
    Refuse,
    Stalled,
    Unready,
)
from p2pavg.rounds.protocol.roles import Role, seated
from p2pavg.rounds.protocol.wire import digest_of

if TYPE_CHECKING:
    from p2pavg.rounds.machine.machine import Machine

STATUS_S = 0.5  # seconds between two words of a member that is at work


class Member:
    """Holds a ballot for this peer, and answers its leader and successors."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.core = machine.core
        self.dropped: Held | None = None  # the last ballot that this peer let go of

    # Proposals and questions.

    def on_prepare(self, peer: PeerId, message: Prepare) -> None:
        core, ballot = self.core, message.ballot
        if peer != ballot.leader or core.me not in message.members:
            return
        if peer != core.me and ballot.standing == (core.here.epoch, core.here.lineage):
            self.machine.peers.votes(peer, *itertools.compress(message.members, message.voters))
        rank = message.members.index(core.me)
        votes = message.voters[rank]
        deposed = core.idle_leaders.is_out(peer, core.here.epoch) and peer != core.me
        why = Objection.DEPOSED if deposed else self._cannot(ballot, votes)
        needed = message.plan.neighbours(rank, len(message.members))
        missing = tuple(
            other
            for other in (message.members[place] for place in sorted(needed))
            if not (core.linked.alive(other) or other == peer)
        )
        if why is not None or missing:
            self._refuse(peer, ballot, why or Objection.NO_LINK, missing)
            return
        held = self.core.holding
        if held is not None and held.stage is Stage.DONE:
            # A ballot that is DONE here may be committed, also by an earlier life of this leader: it has to
            # be decided before another ballot is prepared.
            self._promise(ballot)
            self._answer(ballot, held.described())
            return
        before = held.described() if held is not None else None
        if held is not None:
            self.drop("a newer proposal")
        self._promise(ballot)
        seats = seated(message.members, message.voters)
        core.hold(Holding(ballot, seats, rank, message.plan, core.now))
        # The leader has readmitted these members, so that its successor counts them, too.
        excluded = core.epoch_state.excluded
        for other in message.members if excluded else ():
            if excluded.get(other) in FORGIVABLE:
                core.readmit(other)
        core.act(OpenJob(ballot.transfer, ballot, seats, message.plan))
        core.trace(TraceKind.PROPOSED, attempt=ballot.attempt, leader=ballot.leader, members=len(seats))
        if not (votes or core.here.pending):
            core.send(peer, core.progress())  # the leader does not know that this peer can vote
        self._answer(ballot, before)
        if not votes:
            return
        self.at_boundary()
        if not core.own.boundary:
            core.stop()

    def on_query(self, peer: PeerId, message: Query) -> None:
        core, ballot = self.core, message.ballot
        if peer != ballot.leader:
            return
        if ballot.epoch < core.here.epoch:
            for outcome in core.outcomes.values():
                if isinstance(outcome, Committed) and outcome.ballot.standing == ballot.standing:
                    core.send(peer, outcome)
        why = self._cannot(ballot, votes=True)
        if why is None and core.holding is None and self._is_led_by_another(peer):
            why = Objection.BUSY
            self.machine.reporting.report_again()  # its leader may have promised to the successor itself
        if why is not None:
            self._refuse(peer, ballot, why, ())
            return
        held = self.freeze()
        self._promise(ballot)
        self._answer(ballot, held)

    def _is_led_by_another(self, peer: PeerId) -> bool:
        """Whether a successor has nothing to decide here: this peer follows a leader that it hears well."""
        core, leader = self.core, self.core.leader()
        if leader is None or leader in (core.me, peer, *core.epoch_state.gave_way):
            return False
        return peer != self.machine.succession.expected and self.machine.peers.hears_well(leader)

    def _answer(self, ballot: Ballot, held: Held | None) -> None:
        """Tell a leader what this peer holds. No leader of a lower ballot undoes a DONE that was told."""
        core = self.core
        if held is not None and held.stage is Stage.DONE:
            core.promises.bind(ballot)
        core.send(ballot.leader, Promise(ballot, held, core.promises.first(ballot.standing)))

    def inquire(self, peers: Iterable[PeerId]) -> None:
        """Ask these peers what became of the ballot that is held here."""
        held = self.core.holding
        assert held is not None
        for peer in peers:
            held.asked.add(peer)
            self.core.send(peer, Inquire(held.ballot))

    def freeze(self) -> Held | None:
        """Freeze the ballot that this peer holds: from now on, a ballot that is not DONE never becomes
        DONE.
        """
        held = self.core.holding
        if held is None:
            return None
        if held.stage is Stage.OPEN and not held.frozen:
            held.frozen = True
            self.core.act(CancelJob(held.transfer, "a successor decides"))
            if held.voter and held.ballot.leader != self.core.me:
                why = "a member thought the leader lost"
                self.core.send(held.ballot.leader, Complain(held.ballot, None, why))
        return held.described()

    def _cannot(self, ballot: Ballot, votes: bool) -> Objection | None:
        """The objection to a ballot; None: this peer can accept the ballot."""
        core = self.core
        if core.here.role is Role.WATCHER:
            return Objection.WATCHER
        if core.here.joining is not None or (core.here.epoch, core.here.lineage) != ballot.standing:
            return Objection.ELSEWHERE
        if votes and core.here.pending:
            return Objection.PENDING
        if core.here.pending and core.here.epoch - core.here.applied_epoch >= MOST_BEHIND:
            return Objection.BEHIND
        if core.here.departing and self.core.holding is None:
            return Objection.DEPARTING
        promised = core.promises.last
        if ballot.attempt > (promised.attempt if promised is not None else 0) + MOST_AHEAD:
            return Objection.FAR_AHEAD
        if promised is not None and ballot <= promised and promised.standing == ballot.standing:
            return Objection.PROMISED
        leads = self.authority()
        if ballot.leader == self.machine.succession.expected:
            return None  # this peer waits for that one's word, whether the lost leader is heard again or not
        if leads == core.me:
            busy = self.machine.core.proposal is not None and ballot.leader != core.me
        else:
            busy = leads not in (None, ballot.leader) and core.can_lead(leads)
        return Objection.BUSY if busy else None

    def authority(self) -> PeerId | None:
        """The peer that decides the ballot that is held here: the leader of the highest ballot that was
        promised.

        None: nobody any more, though a peer of that name may be linked again.
        """
        core = self.core
        if self.core.holding is None:
            return None
        held, promised = self.core.holding, core.promises.last
        if promised is None or promised == held.ballot or core.promises.released:
            return held.ballot.leader if not held.orphaned else None
        return promised.leader if promised.leader not in core.promises.gone else None

    def _promise(self, ballot: Ballot) -> None:
        self.core.promises.add(ballot)
        if ballot.leader != self.core.me:
            self.machine.succession.yield_to(ballot)
            self.core.follow(ballot.leader)
            self.core.trust(ballot.leader)

    def _refuse(self, peer: PeerId, ballot: Ballot, why: Objection, missing: tuple[PeerId, ...]) -> None:
        core = self.core
        core.trace(TraceKind.REFUSED, leader=ballot.leader, attempt=ballot.attempt, why=why)
        core.send(peer, Refuse(ballot, core.here.epoch, core.here.lineage, why, core.promises.last, missing))

    # The round.

    def at_boundary(self) -> None:
        """The training thread waits: tell the leader of the ballot."""
        held, core = self.core.holding, self.core
        if held is None or not core.own.boundary or held.wait == core.own.wait:
            return
        if held.begun or held.frozen or not held.voter:
            return
        self.consider()
        held.wait = core.own.wait
        weight = float(core.own.samples) if core.own.weight is None else core.own.weight
        held.declared[held.wait] = core.own.samples, weight
        own, leader = core.own, held.ballot.leader
        core.send(
            leader,
            Ready(held.ballot, own.wait, own.samples, weight, own.note, own.pace.seconds, own.pace.samples),
        )
        self.machine.reporting.told_ready(leader)

    def consider(self) -> None:
        """Called after every event: when a wait is over, take back what was declared for it."""
        held, core = self.core.holding, self.core
        if held is not None and not held.begun and held.wait not in (0, core.own.wait):
            core.send(held.ballot.leader, Unready(held.ballot, held.wait))
            held.wait = 0

    @property
    def declared(self) -> bool:
        """Whether the wait of the training thread may be counted in the round that is forming."""
        held = self.core.holding
        return held is not None and not held.begun and 0 < held.wait == self.core.own.wait

    def on_begin(self, peer: PeerId, message: Begin) -> None:
        held, core = self.core.holding, self.core
        if held is None or held.ballot != message.ballot or peer != message.ballot.leader:
            return
        if held.begun or held.frozen or len(message.weights) != len(held.members):
            return
        if held.voter and core.promises.last != held.ballot:
            return
        wait = message.waits[held.rank]
        said, most = (message.samples, message.weights), core.plausible_target
        forged = wait > 0 and (said[0][held.rank], said[1][held.rank]) != held.declared.get(wait)
        if forged or undeclared(*said, message.waits) or not all_plausible(*said, most, core.config.weighted):
            self._distrust(held)
            return
        if wait not in (0, core.own.wait):
            return  # the wait is over, and the leader was told
        ready = wait > 0
        held.begun, held.begun_at, held.ready = True, core.now, ready
        held.weights, held.samples, held.note = message.weights, message.samples, message.note
        held.watch = TransferWatch(
            core.now,
            [seat.peer for seat in held.members],
            core.me,
            core.deadlines,
            held.plan.partial_givers(held.rank),
            held.plan.above(held.rank),
        )
        if held.voter:
            core.epoch_state.begin()
        if ready:
            core.own.offer(held.transfer, message.samples[held.rank])
            core.history.offer(held.ballot.epoch, held.transfer, message.samples[held.rank])
        else:
            core.resume()
            core.wait_at(None)
        core.trace(
            TraceKind.BEGUN,
            attempt=held.ballot.attempt,
            contributors=len(message.weights) - message.weights.count(0),
        )
        core.act(BeginJob(held.transfer, message.weights))
        if len(held.members) > 2 or core.dawdling.is_slow(held.ballot.leader):
            held.told = digest_of(message)  # another member gets it
        self._tell_others(held)
        self._compare(held)

    def _tell_others(self, held: Holding) -> None:
        """Tell the other members of which round the leader told this one, and whether the leader keeps rounds
        waiting. Of the latter the leader hears, too.
        """
        core, leader = self.core, held.ballot.leader
        if not held.voter or core.me == leader:
            return
        slow = core.dawdling.is_slow(leader)
        if slow:
            held.kept_waiting.add(core.me)
        told = {peer for peer in held.told_ones if peer != leader} | ({leader} if slow else set())
        for peer in sorted(told):
            core.send(peer, Begun(held.ballot, held.told, slow))

    def on_begun(self, peer: PeerId, message: Begun) -> None:
        """Another member says which round it was told to begin."""
        held = self.core.holding
        if held is None or held.ballot != message.ballot:
            return
        if message.kept_waiting:
            held.kept_waiting.add(peer)
        if peer in held.voting and peer not in held.told_others:
            held.all_begun_at = self.core.now
        if held.stage is Stage.OPEN:
            held.told_others[peer] = message.digest
            self._compare(held)

    def _compare(self, held: Holding) -> None:
        if held.is_told_otherwise(self.core.me):
            self._distrust(held)
            self.machine.waiting.depose(held.ballot.leader)

    def _distrust(self, held: Holding) -> None:
        """The ballot's leader lies about what members declared: this epoch's round is made without that
        leader. A leader that does not lie need not find out by itself that this member is gone.
        """
        leader, why = held.ballot.leader, Cause.IMPLAUSIBLE_BEGIN
        self.core.exclude(leader, why)
        self.drop(why.words)
        self.core.send(leader, Complain(held.ballot, leader, why.words))

    def _job(self, transfer: int) -> Holding | None:
        held = self.core.holding
        if held is None or held.transfer != transfer or held.stage is not Stage.OPEN or held.frozen:
            return None
        return held

    def on_job_done(self, event: JobDone) -> None:
        held = self._job(event.transfer)
        if held is None or not held.begun:
            return
        held.stage, held.digests, held.done_at = Stage.DONE, event.digests, self.core.now
        if held.watch is not None:
            held.watch.update(self.core.now, event.ranks)
            held.watch.finished(self.core.now)
        self.core.trace(TraceKind.DONE, attempt=held.ballot.attempt)
        if held.fact is not None:
            self.machine.decisions.on_committed(*held.fact)
        elif held.voter:
            self.core.send(held.ballot.leader, Done(held.ballot, event.digests))
            self.machine.decisions.await_decision(held)

    def on_job_refused(self, event: JobRefused) -> None:
        held = self._job(event.transfer)
        if held is not None and held.voter and 0 <= event.rank < len(held.members):
            peer = held.members[event.rank].peer
            self.core.send(held.ballot.leader, Complain(held.ballot, peer, event.why[:200]))

    def on_job_failed(self, event: JobFailed) -> None:
        held = self._job(event.transfer)
        if held is None:
            return
        blamed = self.core.me
        if event.rank is not None and 0 <= event.rank < len(held.members):
            blamed = held.members[event.rank].peer
        self.core.send(held.ballot.leader, Complain(held.ballot, blamed, event.why[:200]))

    def on_progressed(self, event: JobProgressed) -> None:
        held = self._job(event.transfer)
        if held is None or held.watch is None:
            return
        held.watch.update(self.core.now, event.ranks)
        if not held.voter:
            return
        told = (*held.watch.lagging(self.core.now), held.watch.lacks)
        if told != held.stalled_told or self.core.now >= held.told_at + STATUS_S:
            held.stalled_told, held.told_at = told, self.core.now
            self.core.send(held.ballot.leader, Stalled(held.ballot, *told))

    def lost(self, peer: PeerId, why: str) -> None:
        """The link to a member is gone, though the leader may still have a link to that member."""
        held, core = self.core.holding, self.core
        if held is None or not held.voter or held.stage is not Stage.OPEN or peer == held.ballot.leader:
            return
        if core.me != held.ballot.leader and peer in held.voting:
            core.send(held.ballot.leader, Complain(held.ballot, peer, why[:200]))

    # The end.

    def abandon(self, why: str) -> None:
        """The swarm moved on without the ballot that is held here."""
        held = self.core.holding
        if held is None:
            return
        if held.wait:
            self.core.send(held.ballot.leader, Unready(held.ballot, held.wait))
        self.drop(why)

    def drop(self, why: str) -> None:
        """Forget the ballot and its result."""
        held = self.core.holding
        assert held is not None
        self.core.let_go()
        self.dropped = held.described()
        self.core.own.forget_stop()
        if not held.frozen:
            self.core.act(CancelJob(held.transfer, why))
