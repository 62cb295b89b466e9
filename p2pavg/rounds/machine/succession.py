"""Succession: when a leader dies in the middle of a round, its successor asks all members what they hold, and
decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pavg.rounds.machine.actions import TraceKind
from p2pavg.rounds.machine.memory.inquest import Inquest, decide
from p2pavg.rounds.machine.memory.promises import Rivalry
from p2pavg.rounds.machine.rules.deadlines import Timer
from p2pavg.rounds.machine.rules.election import rendezvous
from p2pavg.rounds.protocol.ballot import Ballot, Held, PeerId, Stage
from p2pavg.rounds.protocol.causes import Cause, Objection
from p2pavg.rounds.protocol.messages import Aborted, Committed, Promise, Query, Refuse

if TYPE_CHECKING:
    from p2pavg.rounds.machine.machine import Machine

# Voters that a member asks first what became of its ballot when nobody decides, then twice as many each time.
# If all asked all at once, a group of N would send N * N messages.
FIRST_ASKED = 3


class Succession:
    """Decides a round that another peer began."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.core = machine.core
        # The other peer that should ask as the successor; None: no other peer.
        self.expected: PeerId | None = None
        self._failures = 0
        self._rivalry = Rivalry(self.core.promises)

    def new_epoch(self) -> None:
        self.core.ask(None)
        self.expected = None
        self._failures = 0
        self.core.disarm(Timer.QUERY, Timer.INQUIRE)

    def yield_to(self, ballot: Ballot) -> None:
        """This peer promised another leader's ballot."""
        self.expected = None
        if self.core.inquest is not None and self.core.inquest.ballot < ballot:
            self._give_up(self.core.inquest)

    def abandon(self) -> None:
        """This peer has no more part in the round."""
        if self.core.inquest is not None:
            self._give_up(self.core.inquest)
        self.new_epoch()

    def _give_up(self, inquest: Inquest) -> None:
        """Tell the peers that were asked that they are free to answer others."""
        self.core.ask(None)
        self.core.disarm(Timer.QUERY)
        given_up = Aborted(
            inquest.ballot, inquest.ballot, Cause.QUESTION_GIVEN_UP, Cause.QUESTION_GIVEN_UP.words, (), False
        )
        for asked in inquest.asked:
            self.core.send(asked, given_up)

    def start(self) -> None:
        """The peer that was to decide the ballot is lost: find out which peer comes next. Idempotent."""
        core, held = self.core, self.machine.core.holding
        if held is None or self.core.inquest is not None or self.machine.core.proposal is not None:
            return
        if self.machine.peers.adrift:
            return
        awaited = self.expected or self.machine.member.authority()
        if awaited != core.me and awaited is not None and self.usable(awaited):
            return
        if not held.voter or core.out:
            self.machine.member.abandon("its leader is lost")
            return
        candidates = tuple(peer for peer in held.voters if peer == core.me or self.usable(peer))
        successor = rendezvous(core.run, core.here.epoch, candidates)
        if successor == core.me:
            self._open(held.voters)
        elif held.stage is Stage.OPEN and not held.begun:
            # Without this peer's DONE nobody commits the ballot, and a successor may not hold the ballot at
            # all.
            self.machine.member.freeze()
            self.machine.member.drop("its leader was lost before it began")
        elif successor is not None:
            self.expected = successor
            core.disarm(Timer.WORD)
            core.trace(TraceKind.SUCCESSOR, peer=successor)
            # It may know the end already, and ask nobody: its words are then of other things.
            self.machine.member.inquire([successor])
            core.arm(Timer.INQUIRE, core.now + core.deadlines.word(successor) / 2)

    def usable(self, peer: PeerId) -> bool:
        """Whether this peer waits for the word of another one about the ballot that it holds."""
        core = self.core
        held = self.machine.core.holding
        orphaned = held is not None and held.orphaned and held.ballot.leader == peer
        barred = (
            orphaned
            or peer in core.epoch_state.suspects
            or peer in core.epoch_state.excluded
            or peer in core.promises.gone
            or core.idle_leaders.is_out(peer, core.here.epoch)
        )
        return core.linked.alive(peer) and not barred

    def resolve(self, held: Held) -> None:
        """This peer's proposal found a round that another peer began and that may be committed."""
        if self.core.inquest is None and self.machine.core.proposal is None:
            self._open((*held.voters, self.core.me))

    def _open(self, voters: tuple[PeerId, ...]) -> None:
        core = self.core
        ballot = core.next_ballot()
        self.expected = None
        core.promises.add(ballot)
        inquest = Inquest(ballot)
        core.ask(inquest)
        core.trace(TraceKind.INQUEST, attempt=ballot.attempt)
        held = self.machine.member.freeze()
        inquest.answers[core.me] = held
        inquest.since[core.me] = core.promises.first(ballot.standing)
        self._ask(voters)
        self._conclude()

    def _ask(self, voters: tuple[PeerId, ...]) -> None:
        inquest, core = self.core.inquest, self.core
        assert inquest is not None
        message = Query(inquest.ballot)
        for peer in voters:
            if peer in core.last_words:
                self._heard_last(inquest, peer)
            elif peer != core.me and peer not in inquest.asked:
                inquest.asked[peer] = core.now
                facts = core.linked.get(peer)
                if facts is None or not facts.heard:
                    inquest.unheard.add(peer)
                core.send(peer, message)

    def heard_first(self, peer: PeerId) -> None:
        """A peer says its first word over a link: it is asked again what may have been lost before."""
        inquest, core = self.core.inquest, self.core
        if inquest is not None and peer in inquest.unheard:
            inquest.unheard.discard(peer)
            inquest.asked[peer] = core.now
            core.send(peer, Query(inquest.ballot))

    def _heard_last(self, inquest: Inquest, peer: PeerId) -> None:
        """The peer has left: its last words are its answer. Of a peer without last words nothing is known."""
        words = [h for h in self.core.last_words[peer] if h.ballot.standing == inquest.ballot.standing]
        if words:
            inquest.answers[peer] = words[-1]

    def on_promise(self, peer: PeerId, message: Promise) -> None:
        inquest, core = self.core.inquest, self.core
        if inquest is None or inquest.ballot != message.ballot or peer not in inquest.asked:
            return
        core.deadlines.measured_answer(peer, core.now - inquest.asked[peer])
        held = message.held
        if held is not None and held.ballot.standing != inquest.ballot.standing:
            held = None  # a ballot of another standing decides nothing here
        inquest.answers[peer] = held
        inquest.since[peer] = message.since
        inquest.dismissed.discard(peer)
        if held is not None:
            self._ask(held.voters)
        self._conclude()

    def on_refuse(self, peer: PeerId, message: Refuse) -> None:
        inquest, core = self.core.inquest, self.core
        if inquest is None or inquest.ballot != message.ballot or peer not in inquest.asked:
            return
        if message.promised == inquest.ballot:
            return  # the peer was asked twice, and has answered
        if message.objection in (Objection.BUSY, Objection.PROMISED) and message.promised is not None:
            # Another peer decides, or the leader that seemed lost still leads the others.
            other = message.promised
            core.promises.release()
            self._give_up(inquest)
            yields = self._rivalry.yields(inquest.ballot, other)
            held = self.machine.core.holding
            orphaned = held is not None and held.orphaned and held.ballot.leader == other.leader
            gone = other < inquest.ballot and (orphaned or other.leader in core.promises.gone)
            if (
                yields
                and not gone
                and other.leader not in inquest.answers
                and core.linked.alive(other.leader)
            ):
                self.expected = other.leader
                core.promises.regain(other.leader)
                core.trust(other.leader)
                core.disarm(Timer.WORD)
            self._failures += 1
            wait = core.deadlines.retry(peer) * 2.0 ** min(self._failures, 5)
            core.arm(Timer.INQUIRE, core.now + wait)
            # Another proposal of this peer would only find the same ballot.
            core.arm(Timer.RETRY, core.now + wait)
            return
        inquest.dismissed.add(peer)
        self._conclude()

    def told_void(self, peer: PeerId, message: Aborted) -> None:
        """A voter that was asked let go of the ballot by its leader's word: the voter is reached, and
        not DONE.
        """
        inquest, held = self.core.inquest, self.machine.core.holding
        if inquest is None or held is None or held.ballot != message.ballot or message.by != message.ballot:
            return
        if peer in inquest.asked and peer in held.voting:
            inquest.answers[peer] = Held(message.ballot, Stage.ABORTED, begun=True)

    def settled(self, outcome: Committed) -> None:
        """A peer knew the outcome before all had answered: the peers that were asked wait for this
        peer's word.
        """
        inquest = self.core.inquest
        if inquest is None:
            return
        if outcome.ballot not in {held.ballot for held in inquest.answers.values() if held is not None}:
            return
        self.core.ask(None)
        self.core.disarm(Timer.QUERY)
        for peer in sorted(inquest.asked):
            self.core.send(peer, outcome)

    def on_query_timer(self) -> None:
        self._conclude()

    def on_inquire_timer(self) -> None:
        """The inquest was refused: ask what became of the ballot, and begin again when nobody knows."""
        core, held = self.core, self.machine.core.holding
        if held is None or self.core.inquest is not None:
            return
        asked = FIRST_ASKED << min(held.inquiries, 6)
        held.inquiries += 1
        others = [peer for peer in held.next_members if peer in held.voting]
        decides = self.expected or self.machine.member.authority() or held.ballot.leader
        self.machine.member.inquire(dict.fromkeys([decides, *others[:asked]]))
        self.start()
        if self.core.inquest is None:
            core.arm(Timer.INQUIRE, core.now + core.deadlines.word(held.ballot.leader) / 2)

    def lost(self, peer: PeerId) -> None:
        """A peer died or fell silent."""
        inquest = self.core.inquest
        if inquest is not None:
            if peer in self.core.last_words and (peer in inquest.asked or peer in inquest.answers):
                self._heard_last(inquest, peer)
            self._conclude()
        elif (self.expected or self.machine.member.authority()) in (peer, None):
            self.start()

    def _conclude(self) -> None:
        """Decide as soon as all reachable peers have answered."""
        inquest, core = self.core.inquest, self.core
        if inquest is None or self.machine.peers.adrift:
            return
        due = 0.0
        for peer, asked_at in inquest.asked.items():
            if peer in inquest.answers or peer in inquest.dismissed or not core.linked.alive(peer):
                continue
            due = max(due, asked_at + core.deadlines.answer(peer))
        if due > core.now:
            core.arm(Timer.QUERY, due)
            return
        core.disarm(Timer.QUERY)
        self.core.ask(None)
        verdict = decide(inquest.witnesses())
        told = {core.me, *inquest.asked}
        core.follow(core.me)
        core.trust(core.me)
        if verdict is not None:
            core.trace(TraceKind.INQUEST_COMMITS, attempt=verdict.ballot.attempt)
            outcome = Committed(verdict.ballot, verdict.weights, verdict.samples, verdict.digests)
            for peer in sorted(told):
                core.send(peer, outcome)
            return
        unreachable = [peer for peer in inquest.asked if peer not in inquest.answers]
        for held in inquest.answers.values():
            core.epoch_state.begin(held is not None and held.begun)
        core.trace(TraceKind.INQUEST_ABORTS, attempt=inquest.ballot.attempt)
        ballots = {held.ballot for held in inquest.answers.values() if held is not None}
        for ballot in sorted(ballots):
            message = Aborted(
                ballot, inquest.ballot, Cause.LEADER_LOST, Cause.LEADER_LOST.words, tuple(unreachable), False
            )
            for peer in sorted(told):
                core.send(peer, message)
        for peer in unreachable:
            core.exclude(peer, Cause.SILENT_TO_SUCCESSOR)
