"""The leader's side: when the target is reached, who is in the group, begin, commit, abort and try again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from p2pavg.rounds.machine.camps import Facts, ends
from p2pavg.rounds.machine.deadlines import Timer
from p2pavg.rounds.machine.stalls import judge
from p2pavg.rounds.protocol.agreement import dissenters
from p2pavg.rounds.protocol.ballot import Ballot, PeerId, Stage
from p2pavg.rounds.protocol.causes import Cause, Objection
from p2pavg.rounds.protocol.complaints import Complaints
from p2pavg.rounds.protocol.messages import (
    Aborted,
    Begin,
    Committed,
    Complain,
    Done,
    Prepare,
    Promise,
    Ready,
    Refuse,
    Stalled,
    Unready,
)
from p2pavg.rounds.protocol.plausible import plausible
from p2pavg.rounds.protocol.roles import PlanMember, Role

if TYPE_CHECKING:
    from p2pavg.rounds.machine.machine import Machine

SPARE_ATTEMPTS = 3  # beyond one for each member that may fail
MOST_SCALE = 16.0


@dataclass(slots=True)
class Proposal:
    """One attempt that this peer leads."""

    ballot: Ballot
    members: tuple[PeerId, ...]  # rank order
    voters: tuple[bool, ...]
    parts: tuple[tuple[int, int, int], ...]
    asked_at: float
    promised: set[PeerId] = field(default_factory=set)
    ready: dict[PeerId, Ready] = field(default_factory=dict)  # whose wait stands
    begun: bool = False
    weights: tuple[float, ...] = ()  # once begun
    samples: tuple[int, ...] = ()
    done: dict[PeerId, tuple[bytes, ...]] = field(default_factory=dict)
    heard: dict[PeerId, float] = field(default_factory=dict)  # when a voter last said that it is at it
    stalls: dict[int, tuple[Sequence[int], Sequence[int]]] = field(default_factory=dict)
    links: dict[int, tuple[Sequence[int], Sequence[int]]] = field(default_factory=dict)
    excused: dict[int, float] = field(default_factory=dict)  # ranks that cannot give all results: until when

    def wait(self, peer: PeerId) -> int:
        """For which it said READY, and did not take it back; 0: none. Once begun: the one that is counted."""
        return self.ready[peer].wait if peer in self.ready else 0

    @property
    def voting(self) -> list[PeerId]:
        return [peer for peer, voter in zip(self.members, self.voters, strict=True) if voter]


class Leading:
    """Whatever this peer does as the leader of an epoch's round."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.core = machine.core
        self.proposal: Proposal | None = None
        self.failures = 0
        self.budget = 0  # attempts that may fail, fixed by the size of the first group
        self.floor = -1  # attempts up to here are taken, as others told
        self._busy_with: Ballot | None = None
        self._complaints = Complaints(self.core.me)

    def new_epoch(self) -> None:
        """Whatever was proposed is over."""
        self.proposal = None
        self.failures = 0
        self.floor = -1
        self._complaints.new_epoch()
        self.core.disarm(Timer.PROMISE, Timer.PATIENCE, Timer.JUDGE, Timer.DONE, Timer.RETRY)

    # The proposal.

    def propose(self) -> None:
        """Ask all live peers of the lineage to form a group."""
        core = self.core
        voters = [core.me, *(f.peer for f in self.machine.counting.followers())]
        joiners = [f.peer for f in core.view if self._follows(f)]
        members = tuple(sorted(voters) + sorted(joiners))
        votes = tuple(rank < len(voters) for rank in range(len(members)))
        landlocked = self._landlocked(voters, members)
        plan = [
            PlanMember(p, v, *self._rates(p), owns=p not in landlocked, link_bps=self._link_rates(p))
            for p, v in zip(members, votes, strict=True)
        ]
        parts = tuple((part.owner, part.start, part.count) for part in core.config.plan(plan))
        ballot = core.next_ballot(self.floor)
        if self.failures == 0:
            self.budget = len(voters) + SPARE_ATTEMPTS
        core.sticky = core.me  # whoever comes meanwhile is told so
        self.proposal = Proposal(ballot, members, votes, parts, core.now)
        self._complaints.new_attempt()
        message = Prepare(ballot, members, votes, parts)
        for peer in members:
            core.send(peer, message)
        self._arm_promise()

    def _landlocked(self, voters: Sequence[PeerId], members: Sequence[PeerId]) -> set[PeerId]:
        """Members that own no part: they are known to have no link to each other, or nobody can dial them, so
        that two of them have none.
        """
        hidden = {peer for peer in members if self._is_client_only(peer)}
        apart = ends(self.core.gaps(), members) | (hidden if len(hidden) > 1 else set())
        return apart if not apart.issuperset(voters) else set()

    def _is_client_only(self, peer: PeerId) -> bool:
        if peer == self.core.me:
            return self.core.config.client_only
        facts = self.core.view.get(peer)
        return facts is not None and facts.client_only

    def _follows(self, facts: Facts) -> bool:
        """Whether this peer gets the results without a vote: it is late to apply."""
        core = self.core
        if facts.silent or facts.joining or facts.role is Role.WATCHER or facts.peer in core.excluded:
            return False
        return facts.pending and core.stands_here(facts)

    def _rates(self, peer: PeerId) -> tuple[float, float]:
        if peer == self.core.me:
            return self.core.upload_bps, self.core.download_bps
        facts = self.core.view.get(peer)
        return (facts.upload_bps, facts.download_bps) if facts is not None else (0.0, 0.0)

    def _link_rates(self, peer: PeerId) -> Mapping[PeerId, float]:
        if peer == self.core.me:
            return self.core.link_bps
        facts = self.core.view.get(peer)
        return facts.link_bps if facts is not None else {}

    def _ours(self, ballot: Ballot) -> Proposal | None:
        proposal = self.proposal
        return proposal if proposal is not None and proposal.ballot == ballot else None

    def _arm_promise(self) -> None:
        proposal = self.proposal
        assert proposal is not None
        missing = [peer for peer in proposal.voting if peer not in proposal.promised]
        if missing:
            self.core.arm(Timer.PROMISE, proposal.asked_at + min(map(self.core.deadlines.answer, missing)))
        else:
            self.core.disarm(Timer.PROMISE)

    def on_promise_timer(self) -> None:
        """Somebody did not answer the proposal in time."""
        proposal, core = self.proposal, self.core
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
        proposal, core = self._ours(message.ballot), self.core
        if proposal is None or proposal.begun:
            return
        core.deadlines.measured_answer(peer, core.now - proposal.asked_at)
        held = message.held
        if held is not None and held.ballot.standing == proposal.ballot.standing:
            core.must_go = core.must_go or held.begun
            if held.stage in (Stage.DONE, Stage.COMMITTED):
                self.abort(Cause.UNDECIDED, (), counts=False)
                if held.ballot.leader == core.me and held.ballot.serial > core.config.life:
                    void = Aborted(held.ballot, held.ballot, Cause.GIVEN_UP, Cause.GIVEN_UP.words, (), False)
                    core.send(peer, void)  # the link to it broke before it could hear so
                else:
                    self.machine.succession.resolve(held)
                return
        proposal.promised.add(peer)
        self._arm_promise()
        self._try_to_begin()

    def on_ready(self, peer: PeerId, message: Ready) -> None:
        proposal = self._ours(message.ballot)
        if proposal is None or proposal.begun or peer not in proposal.voting:
            return
        weighted = self.core.config.weighted
        if not message.wait or not plausible(message.samples, message.weight, self.core.target, weighted):
            self.abort(Cause.IMPLAUSIBLE_READY, [peer])
            return
        proposal.ready[peer] = message
        self._try_to_begin()

    def on_unready(self, peer: PeerId, message: Unready) -> None:
        """What it declared does not hold any more: if it is counted already, the round cannot be."""
        proposal = self._ours(message.ballot)
        if proposal is None or peer not in proposal.voting or message.wait != proposal.wait(peer):
            return
        if not proposal.begun:
            del proposal.ready[peer]
            self._try_to_begin()
        elif peer not in proposal.done:
            self.abort(Cause.WITHDRAWN, [peer])

    def on_refuse(self, peer: PeerId, message: Refuse) -> None:
        proposal, core = self._ours(message.ballot), self.core
        if proposal is None or proposal.begun or peer not in proposal.voting:
            return
        facts = core.view.get(peer)
        if message.objection in (Objection.BUSY, Objection.PROMISED) and message.promised is not None:
            other = message.promised
            rivals = other.standing == proposal.ballot.standing
            if rivals:
                self.floor = max(self.floor, other.attempt)
            # Of two rivals the lower gives way; so does whoever comes upon a round that keeps running.
            yields = rivals and (other > proposal.ballot or other == self._busy_with)
            self._busy_with = other
            if yields and other.leader != core.me and core.view.alive(other.leader):
                self.abort(Cause.ANOTHER_LEADS, (), counts=False)
                core.sticky = other.leader
                core.suspects.discard(other.leader)
            else:
                self.abort(Cause.ANOTHER_BALLOT, ())
            core.arm(Timer.RETRY, core.now + core.deadlines.retry(peer))
        elif message.objection is Objection.ELSEWHERE and facts is not None:
            joining = facts.joining or (message.epoch, message.lineage) == (core.epoch, core.lineage)
            core.view.stands(facts, message.epoch, message.lineage, joining=joining)
            self.abort(Cause.ELSEWHERE, ())
        elif message.objection is Objection.PENDING and facts is not None:
            facts.pending, facts.committed_at = True, core.now
            self.abort(Cause.PENDING, ())
        elif message.missing:
            absent = [p for p in message.missing if p in proposal.members]
            ranks = [proposal.members.index(p) for p in absent]
            proposal.links[proposal.members.index(peer)] = (ranks, ())
            verdict = judge(proposal.links, proposal.members.index(core.me))
            if verdict is not None:
                self.abort(Cause.UNLINKED, [proposal.members[verdict]])
        else:
            self.abort(Cause.REFUSED, [peer], f"a member refused ({message.objection})")

    def _try_to_begin(self) -> None:
        proposal, core = self.proposal, self.core
        if proposal is None or proposal.begun or not proposal.promised.issuperset(proposal.voting):
            return
        unready = [peer for peer in proposal.voting if peer not in proposal.ready]
        contributes = any(ready.weight > 0 for ready in proposal.ready.values())
        if unready:
            due = proposal.asked_at + max(self._patience(peer) for peer in unready)
            if core.now < due:
                core.arm(Timer.PATIENCE, due)
                return
            if not contributes:
                last = due + 4 * core.deadlines.patience(core.now - core.epoch_began_at)
                if core.now < last:
                    core.arm(Timer.PATIENCE, last)
                    return
        if core.now < (due := self._joiners_due()):
            core.arm(Timer.PATIENCE, due)
            return
        core.disarm(Timer.PATIENCE, Timer.PROMISE)
        if not contributes:
            core.must_go = False
            self.abort(Cause.NOTHING_TO_AVERAGE, ())
            return
        proposal.begun = True
        proposal.heard = dict.fromkeys(proposal.voting, core.now)
        self._arm_done()
        nothing = Ready(proposal.ballot, 0, 0, 0.0, b"")
        counted = [proposal.ready.get(peer, nothing) for peer in proposal.members]
        proposal.samples = tuple(ready.samples for ready in counted)
        proposal.weights = tuple(ready.weight for ready in counted)
        waits = tuple(ready.wait for ready in counted)
        note = proposal.ready[core.me if core.me in proposal.ready else min(proposal.ready)].note
        message = Begin(proposal.ballot, proposal.weights, proposal.samples, waits, note)
        for peer in proposal.members:
            core.send(peer, message)

    def _joiners_due(self) -> float:
        """Until when members without a vote get time to open their side: what comes before that is lost to
        them.
        """
        proposal, core = self.proposal, self.core
        assert proposal is not None
        expected = proposal.promised.union(proposal.voting)
        late = [p for p in proposal.members if p not in expected and core.view.alive(p)]
        return proposal.asked_at + max(map(core.deadlines.retry, late), default=0.0)

    def _patience(self, peer: PeerId) -> float:
        """How long after the proposal this straggler is waited for."""
        core = self.core
        if core.config.patience_s is not None:
            return core.config.patience_s
        cap = core.deadlines.patience(core.now - core.epoch_began_at)
        return core.deadlines.scale * min(cap, core.deadlines.step(peer)) + 2 * core.deadlines.rtt(peer)

    def on_patience_timer(self) -> None:
        self._try_to_begin()

    # The transfer.

    def on_done(self, peer: PeerId, message: Done) -> None:
        proposal, core = self._ours(message.ballot), self.core
        if proposal is None or not proposal.begun or peer not in proposal.voting:
            return
        if len(message.digests) != len(proposal.parts):
            self.abort(Cause.WRONG_PARTS, [peer])
            return
        proposal.done[peer] = message.digests
        facts = core.view.get(peer)
        if facts is not None:
            facts.link_bps = dict(message.link_bps)
        elif peer == core.me:
            core.link_bps = dict(message.link_bps)
        if len(proposal.done) < len(proposal.voting):
            self._arm_done()
            return
        wrong = dissenters(proposal.done, [proposal.members[owner] for owner, _, _ in proposal.parts])
        if wrong:
            self.abort(Cause.WRONG_RESULT, wrong)
            return
        self.proposal = None
        core.disarm(Timer.JUDGE, Timer.DONE)
        outcome = Committed(proposal.ballot, proposal.weights, proposal.samples, message.digests)
        for member in proposal.members:
            core.send(member, outcome)

    def _arm_done(self) -> None:
        proposal = self.proposal
        assert proposal is not None
        waiting = [peer for peer in proposal.voting if peer not in proposal.done]
        self.core.arm(Timer.DONE, min(proposal.heard[p] + self.core.deadlines.word(p) for p in waiting))

    def on_done_timer(self) -> None:
        """Somebody neither finishes nor says that it is at it."""
        proposal, core = self.proposal, self.core
        if proposal is None or not proposal.begun:
            return
        mute = [
            peer
            for peer in proposal.voting
            if peer not in proposal.done and core.now >= proposal.heard[peer] + core.deadlines.word(peer)
        ]
        if mute and core.me not in mute:
            self.abort(Cause.MUTE, mute)
        elif mute:
            self.abort(Cause.LEADER_STANDS, ())
        else:
            self._arm_done()

    def on_stalled(self, peer: PeerId, message: Stalled) -> None:
        proposal, core = self._ours(message.ballot), self.core
        if proposal is None or not proposal.begun or peer not in proposal.voting:
            return
        if any(rank >= len(proposal.members) for rank in (*message.contributions, *message.results)):
            return
        proposal.heard[peer] = core.now
        self._arm_done()
        rank = proposal.members.index(peer)
        proposal.stalls[rank] = (message.contributions, message.results)
        if not message.contributions and not message.results:
            del proposal.stalls[rank]
        if message.incomplete:
            proposal.excused[rank] = math.inf
        elif proposal.excused.get(rank) == math.inf:
            proposal.excused[rank] = core.now + core.deadlines.stall(peer)
        if proposal.stalls and Timer.JUDGE not in core.timers:
            core.arm(Timer.JUDGE, core.now + core.deadlines.judge())

    def on_judge_timer(self) -> None:
        """The reports are in: leave out whom they point at."""
        proposal, core = self.proposal, self.core
        if proposal is not None and self._complaints.open:
            self.abort(Cause.COMPLAINT, self._complaints.judge())
            return
        if proposal is None or not proposal.begun or not proposal.stalls:
            return
        excused = [rank for rank, until in proposal.excused.items() if until > core.now]
        verdict = judge(proposal.stalls, proposal.members.index(core.me), excused)
        if verdict is None and excused:
            core.arm(Timer.JUDGE, core.now + core.deadlines.judge())
        elif verdict is None:
            self.abort(Cause.STALLED, ())
        else:
            self.abort(Cause.NO_DATA, [proposal.members[verdict]])

    def on_complain(self, peer: PeerId, message: Complain) -> None:
        proposal = self._ours(message.ballot)
        if proposal is None or peer not in proposal.voting:
            return
        if message.peer is None:
            self.abort(Cause.COMPLAINT, [peer] if self._complaints.vague(peer) else (), message.why)
        elif message.peer in proposal.members:
            if self._complaints.add(peer, message.peer):
                self.abort(Cause.COMPLAINT, self._complaints.judge(), message.why)
            elif Timer.JUDGE not in self.core.timers:
                self.core.arm(Timer.JUDGE, self.core.now + self.core.deadlines.judge())

    def lost(self, peer: PeerId, why: str) -> None:
        """A peer died, left, or fell silent."""
        if self.proposal is not None and peer in self.proposal.voting:
            self.abort(Cause.LOST, [peer], why)

    # The end.

    def abort(self, cause: Cause, blamed: Sequence[PeerId], words: str = "", *, counts: bool = True) -> None:
        """This attempt is over. The next one follows from `consider`, without those to blame."""
        proposal, core = self.proposal, self.core
        if proposal is None:
            return
        self.proposal = None
        core.disarm(Timer.PROMISE, Timer.PATIENCE, Timer.JUDGE, Timer.DONE)
        self.floor = max(self.floor, proposal.ballot.attempt)
        self.failures += counts
        if counts and not blamed:
            core.deadlines.scale = min(MOST_SCALE, 2 * core.deadlines.scale)
        final = counts and self.failures >= self.budget
        message = Aborted(proposal.ballot, proposal.ballot, cause, words or cause.words, tuple(blamed), final)
        told = {core.me, *proposal.members}
        if final:
            told.update(f.peer for f in core.view if core.stands_here(f))
        for peer in sorted(told):
            core.send(peer, message)

    def aborted(self, message: Aborted) -> None:
        """An abort was decided, by us or by somebody above us."""
        if self.proposal is not None and self.proposal.ballot <= message.by:
            self.proposal = None
            self.core.disarm(Timer.PROMISE, Timer.PATIENCE, Timer.JUDGE, Timer.DONE)
        if message.final:
            self.failures = 0
