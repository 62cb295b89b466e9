"""When a leader dies in the middle of a round: its successor asks all members what they hold, and decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from p2pavg.rounds.machine.deadlines import Timer
from p2pavg.rounds.machine.election import rendezvous
from p2pavg.rounds.protocol.ballot import Ballot, Held, PeerId, Stage
from p2pavg.rounds.protocol.causes import Cause, Objection
from p2pavg.rounds.protocol.messages import Aborted, Committed, Promise, Query, Refuse

if TYPE_CHECKING:
    from p2pavg.rounds.machine.machine import Machine


@dataclass(slots=True)
class Inquest:
    """The questions of one successor."""

    ballot: Ballot
    asked: dict[PeerId, float] = field(default_factory=dict)  # when
    answers: dict[PeerId, Held | None] = field(default_factory=dict)
    dismissed: set[PeerId] = field(default_factory=set)  # unreachable, or elsewhere
    since: dict[PeerId, Ballot] = field(default_factory=dict)  # the first that its process promised here

    def witnesses(self) -> dict[PeerId, Held | None]:
        """The answers that count. A process that began to promise after the round in question knows nothing
        of it: an earlier one of the same peer may have been DONE.
        """
        whole = (Stage.DONE, Stage.COMMITTED)
        done = [held.ballot for held in self.answers.values() if held is not None and held.stage in whole]
        if not done:
            return self.answers
        highest = max(done)
        new = {peer for peer, first in self.since.items() if first > highest}
        return {peer: held for peer, held in self.answers.items() if peer not in new}


def decide(answers: dict[PeerId, Held | None]) -> Held | None:
    """What to commit, from what the reachable voters hold; None: abort. Pure.

    A ballot is committed when one of them has committed it, or when all of its voters that answered are DONE
    with equal digests: then its leader may have committed it. If any is not DONE, nobody can have done so.
    """
    for held in answers.values():
        if held is not None and held.stage is Stage.COMMITTED:
            return held
    done = [held for held in answers.values() if held is not None and held.stage is Stage.DONE]
    if not done:
        return None
    highest = max(done, key=lambda held: held.ballot)
    for peer, held in answers.items():
        if peer in highest.voters and (
            held is None
            or held.ballot != highest.ballot
            or held.stage is not Stage.DONE
            or held.digests != highest.digests
        ):
            return None
    return highest


class Succession:
    """Deciding what somebody else began."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.core = machine.core
        self.inquest: Inquest | None = None
        self.expected: PeerId | None = None  # who should open the inquest, if not we
        self._failures = 0
        self._busy_with: Ballot | None = None

    def new_epoch(self) -> None:
        self.inquest = None
        self.expected = None
        self._failures = 0
        self.core.disarm(Timer.QUERY, Timer.INQUIRE)

    def yield_to(self, ballot: Ballot) -> None:
        """We promised somebody else's ballot."""
        self.expected = None
        if self.inquest is not None and self.inquest.ballot < ballot:
            self._give_up(self.inquest)

    def abandon(self) -> None:
        """We have no more part in the round."""
        if self.inquest is not None:
            self._give_up(self.inquest)
        self.new_epoch()

    def _give_up(self, inquest: Inquest) -> None:
        """Those that we asked are free to answer others."""
        self.inquest = None
        self.core.disarm(Timer.QUERY)
        given_up = Aborted(
            inquest.ballot, inquest.ballot, Cause.QUESTION_GIVEN_UP, Cause.QUESTION_GIVEN_UP.words, (), False
        )
        for asked in inquest.asked:
            self.core.send(asked, given_up)

    def start(self) -> None:
        """Whoever decides our ballot is lost: find out who comes next. Idempotent."""
        core, held = self.core, self.machine.member.holding
        if held is None or self.inquest is not None or self.machine.leading.proposal is not None:
            return
        awaited = self.expected or self.machine.member.authority()
        if awaited != core.me and awaited is not None and self._usable(awaited):
            return
        if not held.voter or core.out:
            self.machine.member.abandon("its leader is lost")
            return
        candidates = tuple(peer for peer in held.voters if peer == core.me or self._usable(peer))
        successor = rendezvous(core.config.run, core.epoch, candidates)
        if successor == core.me:
            self._open(held.voters)
        elif held.stage is Stage.OPEN and not held.begun:
            # Without our DONE nobody commits it, and who knows whether a successor holds it at all?
            self.machine.member.freeze()
            self.machine.member.drop("its leader was lost before it began")
        elif successor is not None:
            self.expected = successor
            core.disarm(Timer.WORD)
            core.trace("successor", peer=successor)

    def _usable(self, peer: PeerId) -> bool:
        core = self.core
        held = self.machine.member.holding
        orphaned = held is not None and held.orphaned and held.ballot.leader == peer
        barred = orphaned or peer in core.suspects or peer in core.excluded or peer in core.gone
        return core.view.alive(peer) and not barred

    def resolve(self, held: Held) -> None:
        """Our proposal found a round that somebody else began and that may be committed."""
        if self.inquest is None and self.machine.leading.proposal is None:
            self._open((*held.voters, self.core.me))

    def _open(self, voters: tuple[PeerId, ...]) -> None:
        core = self.core
        ballot = core.next_ballot(self.machine.leading.floor)
        self.expected = None
        core.promise(ballot)
        self.inquest = Inquest(ballot)
        core.trace("inquest", attempt=ballot.attempt)
        held = self.machine.member.freeze()
        self.inquest.answers[core.me] = held
        self.inquest.since[core.me], _ = core.promises[ballot.standing]
        self._ask(voters)
        self._conclude()

    def _ask(self, voters: tuple[PeerId, ...]) -> None:
        inquest, core = self.inquest, self.core
        assert inquest is not None
        message = Query(inquest.ballot)
        for peer in voters:
            if peer in core.last_words:
                self._heard_last(inquest, peer)
            elif peer != core.me and peer not in inquest.asked:
                inquest.asked[peer] = core.now
                core.send(peer, message)

    def _heard_last(self, inquest: Inquest, peer: PeerId) -> None:
        """The peer has left: what it said then is its answer. Of whoever said nothing nothing is known."""
        words = [h for h in self.core.last_words[peer] if h.ballot.standing == inquest.ballot.standing]
        if words:
            inquest.answers[peer] = words[-1]

    def on_promise(self, peer: PeerId, message: Promise) -> None:
        inquest, core = self.inquest, self.core
        if inquest is None or inquest.ballot != message.ballot or peer not in inquest.asked:
            return
        core.deadlines.measured_answer(peer, core.now - inquest.asked[peer])
        held = message.held
        if held is not None and held.ballot.standing != inquest.ballot.standing:
            held = None  # it decides nothing here
        inquest.answers[peer] = held
        inquest.since[peer] = message.since
        inquest.dismissed.discard(peer)
        if held is not None:
            self._ask(held.voters)
        self._conclude()

    def on_refuse(self, peer: PeerId, message: Refuse) -> None:
        inquest, core = self.inquest, self.core
        if inquest is None or inquest.ballot != message.ballot or peer not in inquest.asked:
            return
        if message.objection in (Objection.BUSY, Objection.PROMISED) and message.promised is not None:
            # Somebody else decides, or the leader that we thought lost still leads the others.
            other = message.promised
            core.promise_void = True
            self._give_up(inquest)
            rivals = other.standing == inquest.ballot.standing
            if rivals:
                self.machine.leading.floor = max(self.machine.leading.floor, other.attempt)
            yields = rivals and (other > inquest.ballot or other == self._busy_with)
            self._busy_with = other
            held = self.machine.member.holding
            orphaned = held is not None and held.orphaned and held.ballot.leader == other.leader
            gone = other < inquest.ballot and (orphaned or other.leader in core.gone)
            if yields and not gone and other.leader not in inquest.answers and core.view.alive(other.leader):
                self.expected = other.leader
                core.gone.discard(other.leader)
                core.suspects.discard(other.leader)
                core.disarm(Timer.WORD)
            self._failures += 1
            wait = core.deadlines.retry(peer) * 2.0 ** min(self._failures, 5)
            core.arm(Timer.INQUIRE, core.now + wait)
            core.arm(Timer.RETRY, core.now + wait)  # a proposal of ours would only find the same
            return
        inquest.dismissed.add(peer)
        self._conclude()

    def told_void(self, peer: PeerId, message: Aborted) -> None:
        """A voter that we asked let go of our ballot by its leader's word: it is reached, and not DONE."""
        inquest, held = self.inquest, self.machine.member.holding
        if inquest is None or held is None or held.ballot != message.ballot or message.by != message.ballot:
            return
        if peer in inquest.asked and peer in held.voters:
            inquest.answers[peer] = Held(message.ballot, Stage.ABORTED, begun=True)

    def settled(self, outcome: Committed) -> None:
        """Somebody knew the outcome before all had answered: those that we asked wait for our word."""
        inquest = self.inquest
        if inquest is None:
            return
        if outcome.ballot not in {held.ballot for held in inquest.answers.values() if held is not None}:
            return
        self.inquest = None
        self.core.disarm(Timer.QUERY)
        for peer in sorted(inquest.asked):
            self.core.send(peer, outcome)

    def on_query_timer(self) -> None:
        self._conclude()

    def on_inquire_timer(self) -> None:
        """Our inquest was refused: ask what became of the ballot, and begin again when nobody knows."""
        core, held = self.core, self.machine.member.holding
        if held is None or self.inquest is not None:
            return
        self.machine.member.inquire(held.voters)
        self.start()
        if self.inquest is None:
            core.arm(Timer.INQUIRE, core.now + core.deadlines.word(held.ballot.leader) / 2)

    def lost(self, peer: PeerId) -> None:
        """A peer died or fell silent."""
        inquest = self.inquest
        if inquest is not None:
            if peer in self.core.last_words and (peer in inquest.asked or peer in inquest.answers):
                self._heard_last(inquest, peer)
            self._conclude()
        elif (self.expected or self.machine.member.authority()) in (peer, None):
            self.start()

    def _conclude(self) -> None:
        """Decide as soon as everybody that is reachable has answered."""
        inquest, core = self.inquest, self.core
        if inquest is None:
            return
        due = 0.0
        for peer, asked_at in inquest.asked.items():
            if peer in inquest.answers or peer in inquest.dismissed or not core.view.alive(peer):
                continue
            due = max(due, asked_at + core.deadlines.answer(peer))
        if due > core.now:
            core.arm(Timer.QUERY, due)
            return
        core.disarm(Timer.QUERY)
        self.inquest = None
        verdict = decide(inquest.witnesses())
        told = {core.me, *inquest.asked}
        core.sticky = core.me
        core.suspects.discard(core.me)
        if verdict is not None:
            core.trace("inquest commits", attempt=verdict.ballot.attempt)
            outcome = Committed(verdict.ballot, verdict.weights, verdict.samples, verdict.digests)
            for peer in sorted(told):
                core.send(peer, outcome)
            return
        unreachable = [peer for peer in inquest.asked if peer not in inquest.answers]
        for held in inquest.answers.values():
            core.must_go = core.must_go or (held is not None and held.begun)
        core.trace("inquest aborts", attempt=inquest.ballot.attempt)
        ballots = {held.ballot for held in inquest.answers.values() if held is not None}
        for ballot in sorted(ballots):
            message = Aborted(
                ballot, inquest.ballot, Cause.LEADER_LOST, Cause.LEADER_LOST.words, tuple(unreachable), False
            )
            for peer in sorted(told):
                core.send(peer, message)
        for peer in unreachable:
            core.exclude(peer, Cause.SILENT_TO_SUCCESSOR)
