"""The leader's side of refusals: those that name a peer that is in the way, and those that are in the way."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2pavg.rounds.machine.memory.promises import Rivalry
from p2pavg.rounds.machine.memory.proposal import Proposal
from p2pavg.rounds.machine.rules.camps import BELIEVED_S, Facts, Gap
from p2pavg.rounds.machine.rules.deadlines import Timer
from p2pavg.rounds.machine.rules.stalls import judge
from p2pavg.rounds.protocol.ballot import Ballot, PeerId
from p2pavg.rounds.protocol.causes import Cause, Objection
from p2pavg.rounds.protocol.messages import Refuse

if TYPE_CHECKING:
    from p2pavg.rounds.machine.machine import Machine

MEETING_S = 1.0  # and four round trips: so long after a member came its links to others may be coming up
ASK_MEETING_S = 0.15  # until a group that still meets is asked again
SPARED_S = 60.0  # in which a member may once lack links while it meets others
MOST_BOUND_S = 60.0  # for which a member may be bound to a leader that this peer does not hear
MOST_REFUSALS = 3  # of one member in an epoch that name nobody who can be left out


class Refusals:
    """The answers of members, in one epoch, that refused this peer's proposals."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.core = machine.core
        # Member -> its refusals for which nobody could be left out.
        self._nameless: Counter[PeerId] = Counter()
        self._claimed: dict[Ballot, set[PeerId]] = {}  # ballot -> the members that refused because of it
        self._rivalry = Rivalry(self.core.promises)
        self._parted: dict[Gap, float] = {}  # two members that named each other -> when they did
        self._spared: dict[PeerId, float] = {}  # a member that lacked links -> when it first did
        self._bound_since: dict[PeerId, float] = {}  # member -> when it first named a leader not heard here
        # Attempts of this epoch that such pairs made fail; the first one counts for nothing.
        self._partings = 0

    def new_epoch(self) -> None:
        """The refusals of the last epoch are over."""
        self._nameless.clear()
        self._bound_since.clear()
        self._partings = 0
        self._claimed.clear()
        self._spared = {peer: at for peer, at in self._spared.items() if self.core.now - at <= SPARED_S}

    def parted(self) -> list[Gap]:
        """Pairs of members that both refused lately because they have no link to each other."""
        now = self.core.now
        self._parted = {gap: at for gap, at in self._parted.items() if now - at < BELIEVED_S}
        return list(self._parted)

    def on_refuse(self, peer: PeerId, message: Refuse) -> None:
        proposal, core, leading = self.core.led(message.ballot), self.core, self.machine.leading
        if proposal is None or proposal.begun or peer not in proposal.members:
            return
        facts = core.linked.get(peer)
        if peer not in proposal.voting:
            if proposal.alone and facts is not None:
                self._declined(facts, message, proposal)
            return
        if message.objection in (Objection.BUSY, Objection.PROMISED) and message.promised is not None:
            self._refused_for(peer, message.promised, proposal)
        elif message.objection is Objection.ELSEWHERE and facts is not None:
            joining = facts.joining or (message.epoch, message.lineage) == (
                core.here.epoch,
                core.here.lineage,
            )
            core.linked.stands(facts, message.epoch, message.lineage, joining=joining)
            leading.abort(Cause.ELSEWHERE, [peer] if self.is_too_often(peer) else ())
        elif message.objection is Objection.PENDING and facts is not None:
            contradicts_itself = facts.heard and not facts.pending
            facts.pending, facts.committed_at = True, core.now
            leading.abort(Cause.PENDING, [peer] if contradicts_itself else ())
        elif message.missing:
            absent = tuple(p for p in message.missing if p in proposal.members and p != peer)
            if absent:
                proposal.unlinked[peer] = absent
                self.judge_links(proposal)
            else:
                leading.abort(Cause.REFUSED, [peer], "a member refused for want of a link to nobody")
        else:
            leading.abort(Cause.REFUSED, [peer], f"a member refused ({message.objection})")

    def _declined(self, facts: Facts, message: Refuse, proposal: Proposal) -> None:
        """A peer that this leader asked because it knows of no other voter is ahead, or in another round."""
        core, other = self.core, message.promised
        if message.objection is Objection.ELSEWHERE:
            proposal.promised.add(facts.peer)  # it has answered
            if message.epoch > core.here.epoch:
                core.linked.stands(facts, message.epoch, message.lineage, joining=facts.joining)
                self.machine.leading.abort(Cause.ELSEWHERE, (), counts=False)
            else:
                self.machine.leading.try_to_begin()
        elif (
            message.objection in (Objection.BUSY, Objection.PROMISED)
            and other is not None
            and other.leader != core.me
            and other.standing == proposal.ballot.standing
        ):
            self._refused_for(facts.peer, other, proposal)

    def _refused_for(self, peer: PeerId, other: Ballot, proposal: Proposal) -> None:
        """A member says that it is bound to another ballot, and that ballot's leader or a second member
        knows of it.
        """
        core, leading = self.core, self.machine.leading
        self.machine.peers.names(peer, other.leader)
        seconds = self._claimed.setdefault(other, set())
        seconds.add(peer)
        refuted = other.leader in proposal.promised and other.leader not in (core.me, peer)
        seconded = len(seconds) > 1 or peer == other.leader
        deposed = peer == other.leader and core.idle_leaders.is_out(peer, core.here.epoch)
        heard = core.linked.alive(other.leader) or other.leader in (core.me, peer)
        last = {core.me, peer}.issuperset(proposal.voting)  # this peer would go on alone
        often = self._is_bound_too_long(peer) if last and not heard else self.is_too_often(peer)
        blamed = [peer] if refuted or deposed or (often and not seconded) else []
        yields = self._rivalry.yields(proposal.ballot, other)
        if blamed:
            misled = peer != other.leader and core.idle_leaders.is_out(other.leader, core.here.epoch)
            leading.abort(Cause.ANOTHER_BALLOT, blamed, offence=not misled)
        elif yields and other.leader != core.me and core.linked.alive(other.leader):
            leading.abort(Cause.ANOTHER_LEADS, (), counts=False)
            core.follow(other.leader)
            core.trust(other.leader)
        else:
            leading.abort(Cause.ANOTHER_BALLOT, (), counts=heard or not last)
        wait = core.deadlines.answer if last and not heard else core.deadlines.retry
        core.arm(Timer.RETRY, core.now + wait(peer))

    def _is_bound_too_long(self, peer: PeerId) -> bool:
        """Whether a member names a leader whom this peer does not hear for longer than a round may take. It
        says so itself when that round is over.
        """
        since = self._bound_since.setdefault(peer, self.core.now)
        return self.core.now - since > MOST_BOUND_S / 2.0 ** self.machine.leading.offences.strikes(peer)

    def _meeting_s(self) -> float:
        return MEETING_S + 4 * self.core.deadlines.longest_rtt()

    def _is_meeting(self, peer: PeerId) -> bool:
        """Whether the peer has come so lately that its links to others may still be coming up."""
        facts = self.core.linked.get(peer)
        return facts is not None and self.core.now < facts.linked_at + self._meeting_s()

    def _is_spared(self, peer: PeerId, others: Sequence[PeerId] = ()) -> bool:
        """Whether a member may lack links because it has just come, or these others have: one end of a link
        that comes up knows of it before the other. Once, and then not again for a while, however often it
        comes.
        """
        first, now = self._spared.get(peer, -math.inf), self.core.now
        if now - first > SPARED_S and any(self._is_meeting(one) for one in (peer, *others)):
            first = self._spared[peer] = now
        return now - first < self._meeting_s()

    def _ask_again(self) -> None:
        """The group still meets: its next attempt comes soon, and this one counts for nothing."""
        self.machine.leading.abort(Cause.MEETING, (), counts=False)
        self.core.arm(Timer.RETRY, self.core.now + ASK_MEETING_S)

    def is_too_often(self, peer: PeerId) -> bool:
        """The peer's answer makes this attempt fail, and names nobody whom the leader could leave out.

        Any peer may answer so for a moment. A peer that answers so again and again is itself to blame.
        """
        self._nameless[peer] += 1
        return self._nameless[peer] > max(0, MOST_REFUSALS - self.machine.leading.offences.strikes(peer))

    def judge_links(self, proposal: Proposal) -> bool:
        """Judge members that have no link to each other. Returns whether that ended the attempt.

        A member that lacks a link is judged when the other end has answered. An end that promised has its
        links. Two members that name each other own no part in the next attempts, which need no link between
        them.
        """
        leading = self.machine.leading
        if not proposal.unlinked:
            return False
        answered = proposal.promised | proposal.unlinked.keys() | {self.core.me}
        for peer, absent in proposal.unlinked.items():
            voting = [other for other in absent if other in proposal.voting]
            if not answered.issuperset(voting):
                continue
            if all(other in proposal.promised or other == self.core.me for other in voting):
                if self._is_spared(peer, voting):
                    self._ask_again()
                else:
                    leading.abort(Cause.UNLINKED, [peer])
                return True
            mutual: set[Gap] = {
                (min(one, other), max(one, other))
                for one, others in proposal.unlinked.items()
                for other in others
                if one in proposal.unlinked.get(other, ())
            }
            new = mutual.difference(self._parted)
            if any(self._is_spared(peer) for gap in new for peer in gap):
                self._ask_again()
                return True
            if new:
                self._parted |= dict.fromkeys(mutual, self.core.now)
                leading.abort(Cause.UNLINKED, (), counts=self._partings > 0)
                self._partings += 1
                return True
            reports = {
                proposal.members.index(one): ([proposal.members.index(other) for other in others], ())
                for one, others in proposal.unlinked.items()
            }
            verdict = judge(reports, proposal.members.index(self.core.me))
            if verdict is not None:
                leading.abort(Cause.UNLINKED, [proposal.members[verdict]], offence=False)
                return True
        return False
