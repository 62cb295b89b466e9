"""The leader's side of a round that has begun: members that are DONE, data that does not move, and blame."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2pavg.rounds.machine.memory.arrivals import Arrivals
from p2pavg.rounds.machine.memory.proposal import Proposal
from p2pavg.rounds.machine.rules.agreement import agree
from p2pavg.rounds.machine.rules.complaints import Complaints
from p2pavg.rounds.machine.rules.deadlines import Timer
from p2pavg.rounds.machine.rules.disputes import Disputes
from p2pavg.rounds.machine.rules.stalls import NOTHING, judge
from p2pavg.rounds.protocol.ballot import PeerId
from p2pavg.rounds.protocol.causes import Cause
from p2pavg.rounds.protocol.messages import Committed, Complain, Done, Stalled

if TYPE_CHECKING:
    from p2pavg.rounds.machine.machine import Machine


SLACK_S = 0.5  # seconds, beyond LATE_FACTOR, by which a voter that is later than most is not yet slow
MOST_SLOW = 3  # rounds in which a voter may be slow before it stays out of some rounds
AROUND_HALF = 2  # voters: so near to half of them it becomes known how long the others may need
LATE_FACTOR = 3.0  # times what most voters needed: so long a voter that says that it is at work may need


class TransferRules:
    """Judges what voters say to the leader between BEGIN and the outcome."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.core = machine.core
        self.complaints = Complaints(self.core.me)
        self.disputes = Disputes()

    def on_done(self, peer: PeerId, message: Done) -> None:
        proposal, core = self.core.led(message.ballot), self.core
        if proposal is None or not proposal.begun or peer not in proposal.voting:
            return
        if len(message.digests) != len(proposal.plan.parts):
            self.machine.leading.abort(Cause.WRONG_PARTS, [peer])
            return
        proposal.done[peer] = message.digests
        proposal.done_at.note(peer, core.now)
        self._note(proposal, peer, (), (), NOTHING)
        if len(proposal.done) < len(proposal.voting):
            if abs(len(proposal.done) - len(proposal.voting) / 2) <= AROUND_HALF:
                self.watch()
            return
        equal, wrong = agree(proposal.done, proposal.members, proposal.plan, self.disputes, core.here.epoch)
        if not equal:
            # Two are in dispute once: so attempts without anybody to blame are few.
            self.machine.leading.abort(Cause.WRONG_RESULT, wrong, counts=bool(wrong))
            return
        core.lead(None)
        core.disarm(Timer.JUDGE, Timer.DONE)
        self._rate(proposal)
        outcome = Committed(proposal.ballot, proposal.weights, proposal.samples, message.digests)
        for member in proposal.members:
            core.send(member, outcome)

    def _rate(self, proposal: Proposal) -> None:
        """All voters are DONE: note those that were much slower than most, so that they stay out when
        that repeats.
        """
        offences = self.machine.leading.offences
        for peer in proposal.voting:
            slack = SLACK_S + 2 * self.core.deadlines.rtt(peer)
            if proposal.done_at[peer] > self._due(proposal, peer, proposal.done_at, slack):
                offences.add(peer, self.core.here.epoch, free=MOST_SLOW)
            else:
                offences.completed(peer)

    def watch(self) -> None:
        proposal = self.core.proposal
        assert proposal is not None
        waiting = [peer for peer in proposal.voting if peer not in proposal.done]
        word = self.core.deadlines.word
        self.core.arm(
            Timer.DONE,
            min(
                min(proposal.heard[peer] + word(peer), self._due(proposal, peer, proposal.done_at))
                for peer in waiting
            ),
        )

    def _due(
        self, proposal: Proposal, peer: PeerId, reached_at: Arrivals, slack: float | None = None
    ) -> float:
        """Until when a voter may need for the stage of `reached_at`: some times as long as most others
        needed.

        The voter's own word that it is at work counts as long as most others are not there either.
        """
        at = reached_at.most(but=peer)
        if at is None:
            return math.inf
        slack = self.core.deadlines.word(peer) if slack is None else slack
        return at + LATE_FACTOR * (at - proposal.begun_at) + slack

    def on_done_timer(self) -> None:
        """A voter neither finishes nor says that it is at work."""
        proposal, core = self.core.proposal, self.core
        if proposal is None or not proposal.begun:
            return
        mute = [
            peer
            for peer in proposal.voting
            if peer not in proposal.done and core.now >= proposal.heard[peer] + core.deadlines.word(peer)
        ]
        late = [
            peer
            for peer in proposal.voting
            if peer not in proposal.done and core.now >= self._due(proposal, peer, proposal.done_at)
        ]
        if core.me in mute or core.me in late:
            self.machine.leading.abort(Cause.LEADER_STANDS, ())
        elif mute:
            self.machine.leading.abort(Cause.MUTE, mute)
        elif late:
            self.machine.leading.abort(Cause.LATE, late)
        else:
            self.watch()

    def on_stalled(self, peer: PeerId, message: Stalled) -> None:
        proposal, core = self.core.led(message.ballot), self.core
        if proposal is None or not proposal.begun or peer not in proposal.voting:
            return
        if any(rank >= len(proposal.members) for rank in (*message.contributions, *message.results)):
            return
        proposal.heard[peer] = core.now  # the timer finds that out when it fires
        self._note(proposal, peer, message.contributions, message.results, message.lacks)
        if proposal.stalls and Timer.JUDGE not in core.timers:
            core.arm(Timer.JUDGE, core.now + core.deadlines.judge())

    def _note(
        self,
        proposal: Proposal,
        peer: PeerId,
        contributions: Sequence[int],
        results: Sequence[int],
        lacks: int,
    ) -> None:
        """Keep whom the voter waits for, and what it has of that which others wait for."""
        core, rank = self.core, proposal.members.index(peer)
        if contributions or results:
            proposal.stalls[rank] = contributions, results
        else:
            proposal.stalls.pop(rank, None)
        for gathered_at in proposal.gathered_at[:lacks]:
            gathered_at.note(peer, core.now)

    def _is_excused(self, proposal: Proposal, rank: int, stage: int) -> bool:
        """Whether a rank cannot have sent yet what others wait for in a stage after the first, as it says."""
        core, peer, gathered_at = self.core, proposal.members[rank], proposal.gathered_at[stage - 1]
        until = self._due(proposal, peer, gathered_at)
        if peer in gathered_at:
            until = min(until, gathered_at[peer] + core.deadlines.stall(peer))
        elif proposal.heard[peer] <= proposal.begun_at:
            return False
        return core.now < until

    def on_judge_timer(self) -> None:
        """The reports are in: leave out the member at which they point."""
        proposal, core = self.core.proposal, self.core
        if proposal is not None:
            self.complaints.settle(proposal.done.keys())
        if proposal is not None and self.complaints.open:
            self.machine.leading.abort(Cause.COMPLAINT, self.complaints.judge())
            return
        if proposal is None or not proposal.begun or not proposal.stalls:
            return
        excuses = 0

        def excused(rank: int, stage: int) -> bool:
            nonlocal excuses
            found = self._is_excused(proposal, rank, stage)
            excuses += found
            return found

        verdict = judge(proposal.stalls, proposal.members.index(core.me), excused, proposal.plan)
        if verdict is None and excuses:
            core.arm(Timer.JUDGE, core.now + core.deadlines.judge())
        elif verdict is None:
            self.machine.leading.abort(Cause.STALLED, ())
        else:
            self.machine.leading.abort(Cause.NO_DATA, self._at_fault(proposal, verdict))

    def _at_fault(self, proposal: Proposal, rank: int) -> Sequence[PeerId]:
        """The members to leave out when reports point at this rank: one word against one is a complaint."""
        at_fault = proposal.members[rank]
        accusers = [
            proposal.members[reporter]
            for reporter, (contributions, results) in proposal.stalls.items()
            if rank in contributions or rank in results
        ]
        if rank in proposal.stalls or len(accusers) != 1 or self.core.me in accusers:
            return [at_fault]
        self.complaints.add(accusers[0], at_fault)
        return self.complaints.judge()

    def on_complain(self, peer: PeerId, message: Complain) -> None:
        proposal = self.core.led(message.ballot)
        if proposal is None or peer not in proposal.voting:
            return
        if message.peer is None:
            self.machine.leading.abort(
                Cause.COMPLAINT, [peer] if self.complaints.vague(peer) else (), message.why
            )
        elif message.peer in proposal.members:
            if self.complaints.add(peer, message.peer):
                self.machine.leading.abort(Cause.COMPLAINT, self.complaints.judge(), message.why)
            elif Timer.JUDGE not in self.core.timers:
                self.core.arm(Timer.JUDGE, self.core.now + self.core.deadlines.judge())
