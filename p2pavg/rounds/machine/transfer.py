"""The leader's side of a round that has begun: who is DONE, whose data does not move, who is to blame."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from p2pavg.rounds.machine.rules.agreement import dissenters
from p2pavg.rounds.machine.rules.complaints import Complaints
from p2pavg.rounds.machine.rules.deadlines import Timer
from p2pavg.rounds.machine.rules.stalls import judge
from p2pavg.rounds.protocol.ballot import PeerId
from p2pavg.rounds.protocol.causes import Cause
from p2pavg.rounds.protocol.messages import Committed, Complain, Done, Stalled

if TYPE_CHECKING:
    from p2pavg.rounds.machine.machine import Machine


class Transfer:
    """What the leader makes of what voters say between BEGIN and the outcome."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.core = machine.core
        self.complaints = Complaints(self.core.me)

    def on_done(self, peer: PeerId, message: Done) -> None:
        proposal, core = self.core.led(message.ballot), self.core
        if proposal is None or not proposal.begun or peer not in proposal.voting:
            return
        if len(message.digests) != len(proposal.plan.parts):
            self.machine.leading.abort(Cause.WRONG_PARTS, [peer])
            return
        proposal.done[peer] = message.digests
        if len(proposal.done) < len(proposal.voting):
            self.watch()
            return
        wrong = dissenters(proposal.done, proposal.members, proposal.plan)
        if wrong:
            self.machine.leading.abort(Cause.WRONG_RESULT, wrong)
            return
        core.lead(None)
        core.disarm(Timer.JUDGE, Timer.DONE)
        outcome = Committed(proposal.ballot, proposal.weights, proposal.samples, message.digests)
        for member in proposal.members:
            core.send(member, outcome)

    def watch(self) -> None:
        proposal = self.core.proposal
        assert proposal is not None
        waiting = [peer for peer in proposal.voting if peer not in proposal.done]
        self.core.arm(Timer.DONE, min(proposal.heard[p] + self.core.deadlines.word(p) for p in waiting))

    def on_done_timer(self) -> None:
        """Somebody neither finishes nor says that it is at it."""
        proposal, core = self.core.proposal, self.core
        if proposal is None or not proposal.begun:
            return
        mute = [
            peer
            for peer in proposal.voting
            if peer not in proposal.done and core.now >= proposal.heard[peer] + core.deadlines.word(peer)
        ]
        if mute and core.me not in mute:
            self.machine.leading.abort(Cause.MUTE, mute)
        elif mute:
            self.machine.leading.abort(Cause.LEADER_STANDS, ())
        else:
            self.watch()

    def on_stalled(self, peer: PeerId, message: Stalled) -> None:
        proposal, core = self.core.led(message.ballot), self.core
        if proposal is None or not proposal.begun or peer not in proposal.voting:
            return
        if any(rank >= len(proposal.members) for rank in (*message.contributions, *message.results)):
            return
        proposal.heard[peer] = core.now
        self.watch()
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
        proposal, core = self.core.proposal, self.core
        if proposal is not None and self.complaints.open:
            self.machine.leading.abort(Cause.COMPLAINT, self.complaints.judge())
            return
        if proposal is None or not proposal.begun or not proposal.stalls:
            return
        excused = [rank for rank, until in proposal.excused.items() if until > core.now]
        verdict = judge(proposal.stalls, proposal.members.index(core.me), excused, proposal.plan)
        if verdict is None and excused:
            core.arm(Timer.JUDGE, core.now + core.deadlines.judge())
        elif verdict is None:
            self.machine.leading.abort(Cause.STALLED, ())
        else:
            self.machine.leading.abort(Cause.NO_DATA, [proposal.members[verdict]])

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
