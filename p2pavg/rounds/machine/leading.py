"""The leader's side: when the target is reached, who is in the group, begin, commit, abort and try again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from p2pavg.rounds.machine.memory.proposal import Proposal
from p2pavg.rounds.machine.rules.camps import Facts, ends
from p2pavg.rounds.machine.rules.deadlines import STEP_PRIOR, Timer
from p2pavg.rounds.machine.rules.offences import Offences
from p2pavg.rounds.machine.rules.plausible import overtold, plausible
from p2pavg.rounds.protocol.ballot import PeerId, Stage
from p2pavg.rounds.protocol.causes import FORGIVABLE, OFFENCES, Cause
from p2pavg.rounds.protocol.messages import (
    Aborted,
    Begin,
    Prepare,
    Promise,
    Ready,
    Unready,
)
from p2pavg.rounds.protocol.roles import LinkFacts, PlanMember, Role

if TYPE_CHECKING:
    from p2pavg.rounds.machine.machine import Machine

SPARE_ATTEMPTS = 3  # attempts beyond one for each member that may fail


class Leading:
    """The work of this peer as the leader of an epoch's round."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.core = machine.core
        self.offences = Offences()
        self.failures = 0
        self.budget = 0  # attempts that may fail, fixed by the size of the first group
        self._attempts = 0  # that this peer made in this epoch
        self._proposed_at = 0.0  # when it made the last of them

    def new_epoch(self) -> None:
        """All proposals of the last epoch are over."""
        self.core.lead(None)
        self.failures = self._attempts = 0
        self.machine.refusals.new_epoch()
        self.machine.transfer.complaints.new_epoch()
        self.core.disarm(Timer.PROMISE, Timer.PATIENCE, Timer.JUDGE, Timer.DONE, Timer.RETRY)

    def bar(self) -> None:
        """Exclude peers that hindered rounds again and again, for as many epochs as `offences` says."""
        for peer in self.offences.out(self.core.here.epoch):
            if peer in self.core.linked:
                self.core.exclude(peer, Cause.PENANCE)

    # The proposal.

    def asks_again_at(self, members: int) -> float:
        """When this peer may propose to so many members again: their messages are many."""
        return self._proposed_at + self.core.deadlines.regroup(self._attempts, members)

    def propose(self) -> None:
        """Ask all live peers of the lineage to form a group."""
        core = self.core
        voters = [core.me, *(f.peer for f in self.machine.counting.followers())]
        joiners = [f.peer for f in core.linked if self._follows(f) or (len(voters) == 1 and self._asks(f))]
        planned = self.planned(voters, joiners)
        members = tuple(member.peer for member in planned)
        votes = tuple(member.voter for member in planned)
        found = core.config.plan(planned)
        ballot = core.next_ballot()
        if self.failures == 0:
            self.budget = len(voters) + SPARE_ATTEMPTS
        self._attempts, self._proposed_at = self._attempts + 1, core.now
        core.follow(core.me)  # so that peers that link meanwhile are told who leads
        proposal = Proposal(ballot, members, votes, found, core.now)
        proposal.told = {f.peer: f.samples for f in core.linked if f.peer in proposal.voting}
        core.lead(proposal)
        self.machine.transfer.complaints.new_attempt()
        message = Prepare(ballot, members, votes, found)
        for peer in members:
            core.send(peer, message)
        self._arm_promise()

    def planned(self, voters: Sequence[PeerId], joiners: Sequence[PeerId] = ()) -> list[PlanMember]:
        """The members of a group in rank order, with what a plan follows from."""
        members = tuple(sorted(voters) + sorted(joiners))
        landlocked = self._landlocked(voters, members)
        return [
            PlanMember(
                peer, rank < len(voters), *self._rates(peer), peer not in landlocked, *self._place(peer)
            )
            for rank, peer in enumerate(members)
        ]

    def _landlocked(self, voters: Sequence[PeerId], members: Sequence[PeerId]) -> set[PeerId]:
        """Members that own no part. They are known to have no link to each other, or refused for want of one;
        or nobody can dial them, so that two of them have no link unless both say that they have met; or one
        of them and another made different results of a part. Where all members are such, they own parts all
        the same: their links, relays included, then carry the gradients.
        """
        met = {peer: self._met(peer) for peer in members if self._is_client_only(peer)}
        hidden = {
            peer
            for peer, known in met.items()
            if any(other != peer and not (other in known and peer in met[other]) for other in met)
        }
        apart = ends([*self.core.gaps(), *self.machine.refusals.parted()], members) | hidden
        disputed = self.machine.transfer.disputes.open(self.core.here.epoch)
        for out in (apart | disputed, apart):
            if not out.issuperset(voters):
                return out
        return set()

    def _met(self, peer: PeerId) -> Collection[PeerId]:
        if peer == self.core.me:
            return self.core.met()
        facts = self.core.linked.get(peer)
        return facts.met if facts is not None else ()

    def _is_client_only(self, peer: PeerId) -> bool:
        if peer == self.core.me:
            return self.core.config.client_only
        facts = self.core.linked.get(peer)
        return facts is not None and facts.client_only

    def _follows(self, facts: Facts) -> bool:
        """Whether the member gets the results without a vote, because it is late to apply the last
        average.
        """
        core = self.core
        if (
            facts.silent
            or facts.joining
            or facts.role is Role.WATCHER
            or facts.peer in core.epoch_state.excluded
        ):
            return False
        return facts.pending and core.stands_here(facts)

    def _asks(self, facts: Facts) -> bool:
        """Whether a leader that knows of no other voter asks this peer all the same: it may have gone on, and
        where it stands was told to its leader alone, which this peer may not reach.
        """
        core = self.core
        return (
            facts.role is Role.TRAINER
            and core.epoch_state.excluded.get(facts.peer) in (None, Cause.LOST, *FORGIVABLE)
            and facts.peer not in core.linked.doubted
            and not (facts.silent or facts.joining)
        )

    def _rates(self, peer: PeerId) -> tuple[float, float]:
        if peer == self.core.me:
            return self.core.own.upload_bps, self.core.own.download_bps
        facts = self.core.linked.get(peer)
        return (facts.upload_bps, facts.download_bps) if facts is not None else (0.0, 0.0)

    def _place(self, peer: PeerId) -> tuple[Mapping[PeerId, LinkFacts], str]:
        """The measured links and the region of a member."""
        if peer == self.core.me:
            return self.core.own.links, self.core.config.region
        facts = self.core.linked.get(peer)
        return (facts.links, facts.region) if facts is not None else ({}, "")

    def _arm_promise(self) -> None:
        proposal = self.core.proposal
        assert proposal is not None
        missing = [peer for peer in proposal.voting if peer not in proposal.promised]
        if missing:
            self.core.arm(Timer.PROMISE, proposal.asked_at + min(map(self.core.deadlines.answer, missing)))

    def on_promise_timer(self) -> None:
        """A member did not answer the proposal in time."""
        proposal, core = self.core.proposal, self.core
        if proposal is None or proposal.begun:
            return
        late = [
            peer
            for peer in proposal.voting
            if peer not in proposal.promised and core.now >= proposal.asked_at + core.deadlines.answer(peer)
        ]
        if late:
            self.abort(Cause.UNANSWERED, late)
        else:
            self._arm_promise()

    def on_promise(self, peer: PeerId, message: Promise) -> None:
        proposal, core = self.core.led(message.ballot), self.core
        if proposal is None or proposal.begun:
            return
        core.deadlines.measured_answer(peer, core.now - proposal.asked_at)
        held = message.held
        if held is not None and held.ballot.standing == proposal.ballot.standing:
            core.epoch_state.begin(held.begun)
            if held.stage in (Stage.DONE, Stage.COMMITTED):
                if self.machine.refusals.is_too_often(peer):
                    self.abort(Cause.UNDECIDED, [peer])
                    return
                self.abort(Cause.UNDECIDED, (), counts=False)
                if core.promises.opened(held.ballot):
                    void = Aborted(held.ballot, held.ballot, Cause.GIVEN_UP, Cause.GIVEN_UP.words, (), False)
                    core.send(peer, void)  # the link to the member broke before it could hear of the end
                else:
                    self.machine.succession.resolve(held)
                return
        proposal.promised.add(peer)
        if proposal.promised.issuperset(proposal.voting):
            core.disarm(Timer.PROMISE)  # else it finds out whom it is armed for when it fires
        if not self.machine.refusals.judge_links(proposal):
            self.try_to_begin()

    def on_ready(self, peer: PeerId, message: Ready) -> None:
        proposal = self.core.led(message.ballot)
        if proposal is None or proposal.begun or peer not in proposal.voting:
            return
        weighted = self.core.config.weighted
        most = self.core.plausible_target
        if not message.wait or not plausible(message.samples, message.weight, most, weighted):
            self.abort(Cause.IMPLAUSIBLE_READY, [peer])
            return
        proposal.ready[peer] = message
        self.try_to_begin()

    def on_unready(self, peer: PeerId, message: Unready) -> None:
        """A declaration does not hold any more: abort a round that counts on it already."""
        proposal = self.core.led(message.ballot)
        if proposal is None or peer not in proposal.voting or message.wait != proposal.wait(peer):
            return
        if not proposal.begun:
            del proposal.ready[peer]
            self.try_to_begin()
        elif peer not in proposal.done:
            self.abort(Cause.WITHDRAWN, [peer])

    def try_to_begin(self) -> None:
        """Begin the round, if nobody is to be waited for any more."""
        proposal, core = self.core.proposal, self.core
        if proposal is None or proposal.begun or not proposal.promised.issuperset(proposal.voting):
            return
        if proposal.alone and self.machine.counting.followers():
            self.abort(Cause.GIVEN_UP, (), counts=False)  # one that was asked can vote
            return
        due = self._stragglers_due(proposal)
        if due is not None:
            if core.now < due:
                core.arm(Timer.PATIENCE, due)
                return
            if not any(ready.weight > 0 for ready in proposal.ready.values()):
                last = due + 4 * core.deadlines.usual_epoch(core.now - core.here.began_at)
                if core.now < last:
                    core.arm(Timer.PATIENCE, last)
                    return
        if core.now < (due := self._joiners_due()):
            core.arm(Timer.PATIENCE, due)
            return
        core.disarm(Timer.PATIENCE, Timer.PROMISE)
        room = {peer for rank, peer in enumerate(proposal.members) if proposal.plan.takes(rank)}
        notes = {peer: ready.note for peer, ready in proposal.ready.items() if peer in room}
        note, refused = core.config.combine(notes, proposal.members, core.me) if notes else (b"", frozenset())
        nothing = Ready(proposal.ballot, 0, 0, 0.0, b"", 0.0, 0)
        counted = [
            proposal.ready.get(peer, nothing) if peer in room - refused else nothing
            for peer in proposal.members
        ]
        if not any(each.weight > 0 for each in counted):
            core.epoch_state.end_begun()
            self.abort(Cause.NOTHING_TO_AVERAGE, ())
            return
        declared = {peer: ready.samples for peer, ready in proposal.ready.items()}
        if liars := overtold(proposal.told, declared, core.target):
            core.epoch_state.end_begun()
            self.abort(Cause.OVERTOLD, liars)
            return
        proposal.begun, proposal.begun_at = True, core.now
        proposal.heard = dict.fromkeys(proposal.voting, core.now)
        self.machine.transfer.watch()
        proposal.samples = tuple(each.samples for each in counted)
        proposal.weights = tuple(each.weight for each in counted)
        waits = tuple(each.wait for each in counted)
        message = Begin(proposal.ballot, proposal.weights, proposal.samples, waits, note)
        for peer in proposal.members:
            core.send(peer, message)

    def _stragglers_due(self, proposal: Proposal) -> float | None:
        """Until when the leader waits for those that are not ready; None: all are. The slowest of many is
        looked for again when it is ready, or its time is over.
        """
        slowest = proposal.slowest
        if slowest is not None and slowest not in proposal.ready:
            due = proposal.asked_at + self._patience(slowest)
            if self.core.now < due:
                return due
        unready = [peer for peer in proposal.voting if peer not in proposal.ready]
        if not unready:
            return None
        proposal.slowest = max(unready, key=self._patience)
        return proposal.asked_at + self._patience(proposal.slowest)

    def _joiners_due(self) -> float:
        """Until when members without a vote get time to open their side of the transfer: earlier chunks are
        lost to them.
        """
        proposal, core = self.core.proposal, self.core
        assert proposal is not None
        expected = proposal.promised.union(proposal.voting)
        late = [p for p in proposal.members if p not in expected and core.linked.alive(p)]
        if not proposal.alone:
            return proposal.asked_at + max(map(core.deadlines.retry, late), default=0.0)
        applies = [f.peer for f in core.linked.trainers() if f.peer in proposal.promised and self._applies(f)]
        waits = [*map(core.deadlines.answer, late), *map(core.deadlines.apply, applies)]
        return proposal.asked_at + max(waits, default=0.0)

    def _applies(self, facts: Facts) -> bool:
        """Whether a peer that was asked can vote soon, and says so to the leader that it follows now."""
        return facts.pending and not facts.late and self.core.stands_here(facts)

    def heard(self, peer: PeerId) -> None:
        """A peer told where it stands: one that was asked may vote now."""
        proposal = self.core.proposal
        if proposal is not None and proposal.alone and peer in proposal.members:
            self.try_to_begin()

    def _patience(self, peer: PeerId) -> float:
        """How long after the proposal the leader waits for this straggler."""
        core = self.core
        if core.config.patience_s is not None:
            return core.config.patience_s
        if core.config.lockstep:
            return core.deadlines.scale * core.deadlines.lockstep(peer)
        proposal = core.proposal
        assert proposal is not None
        # In the first epoch, what it took until the proposal: by now it would be longer the longer it waits.
        until_asked = max(STEP_PRIOR, proposal.asked_at - core.here.began_at)
        cap = core.deadlines.usual_epoch(until_asked)
        return core.deadlines.scale * min(cap, core.deadlines.step(peer)) + 2 * core.deadlines.rtt(peer)

    def on_patience_timer(self) -> None:
        self.try_to_begin()

    def lost(self, peer: PeerId, why: str) -> None:
        """A peer died, left, or fell silent."""
        if self.core.proposal is not None and peer in self.core.proposal.voting:
            self.abort(Cause.LOST, [peer], why)

    # The end.

    def abort(
        self,
        cause: Cause,
        blamed: Sequence[PeerId],
        words: str = "",
        *,
        counts: bool = True,
        offence: bool = True,
    ) -> None:
        """This attempt is over. The next attempt follows from `consider`, without the members to blame.

        counts: the attempt is one of the few that an epoch has. offence: the members to blame could have done
        better.
        """
        proposal, core = self.core.proposal, self.core
        if proposal is None:
            return
        self.core.lead(None)
        core.disarm(Timer.PROMISE, Timer.PATIENCE, Timer.JUDGE, Timer.DONE)
        core.promises.raise_floor(proposal.ballot.attempt)
        self.failures += counts
        fair = len(blamed) == 1 or not self.machine.waiting.blames_most(blamed, len(proposal.members))
        for peer in blamed if offence and fair and cause in OFFENCES else ():
            self.offences.add(peer, core.here.epoch, free=2 if cause in FORGIVABLE else 1)
        if counts and not blamed:
            core.deadlines.relax()
        final = counts and self.failures >= self.budget
        message = Aborted(proposal.ballot, proposal.ballot, cause, words or cause.words, tuple(blamed), final)
        told = {core.me, *proposal.members}
        if final:
            told.update(f.peer for f in core.linked if core.stands_here(f))
        for peer in sorted(told):
            core.send(peer, message)

    def aborted(self, message: Aborted) -> None:
        """An abort was decided, by this peer or by the leader of a higher ballot."""
        if self.core.proposal is not None and self.core.proposal.ballot <= message.by:
            self.core.lead(None)
            self.core.disarm(Timer.PROMISE, Timer.PATIENCE, Timer.JUDGE, Timer.DONE)
        if message.final:
            self.failures = 0
