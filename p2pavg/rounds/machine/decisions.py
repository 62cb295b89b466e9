"""Decided ballots: apply what was committed, forget what was aborted, and answer peers that ask."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from p2pavg.rounds.machine.actions import Commit, RoundFailed, TraceKind
from p2pavg.rounds.machine.memory.holding import Holding
from p2pavg.rounds.machine.rules.dawdling import allowed
from p2pavg.rounds.machine.rules.deadlines import Timer
from p2pavg.rounds.machine.rules.pace import own_share
from p2pavg.rounds.protocol.ballot import Ballot, PeerId, Stage
from p2pavg.rounds.protocol.causes import NO_FAILURE, Cause
from p2pavg.rounds.protocol.lineage import next_lineage
from p2pavg.rounds.protocol.messages import Aborted, Committed, Inquire, Unknown
from p2pavg.rounds.protocol.roles import Generation

if TYPE_CHECKING:
    from p2pavg.rounds.machine.machine import Machine

# Members that a member tells of a commit, when another than the leader told it: if all told all, a group of N
# would send N * N messages.
NEIGHBOURS = 6
ASK_OTHERS_S = 0.5  # seconds that a leader may take to decide a whole result, before the others are asked


class Decisions:
    """Ends the ballot that this peer holds, and keeps facts about earlier ballots."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.core = machine.core

    def on_committed(self, peer: PeerId, message: Committed) -> None:
        """The ballot is committed: apply the result if this peer holds all of it; else heal."""
        core, held = self.core, self.machine.core.holding
        entitled = self._may_decide(peer, message.ballot)
        if held is None or held.ballot != message.ballot:
            if entitled:
                self.machine.succession.settled(message)
            known = peer == core.me or self._asked(peer)
            if held is not None and held.ballot.standing == message.ballot.standing and known:
                self.machine.abandon_round("another round made this epoch's average")
            if message.ballot.epoch >= core.here.epoch and peer != core.me:
                core.send(peer, core.progress())  # that peer is ahead, and its answer tells where it stands
            return
        if len(message.weights) != len(held.members) or len(message.digests) != len(held.plan.parts):
            return
        other = held.stage is Stage.DONE and held.digests != message.digests
        result = (held.weights, held.samples, held.digests)
        if held.stage is Stage.DONE and (message.weights, message.samples, message.digests) == result:
            first = not held.applied
            held.applied.add(peer)
            entitled = entitled or held.is_applied(core.me)
            if first and not entitled:
                self._ask(held, [second for second in held.seconds(core.me) if second != peer])
        if not entitled or (other and peer not in self._deciding(held)):
            self._inquire(held)  # the copy here is wrong, or `peer` is
            return
        began = (held.weights, held.samples)
        if held.stage is Stage.DONE and not other and (message.weights, message.samples) != began:
            if peer == held.ballot.leader:
                # The leader commits another round than the one that it began.
                self.machine.waiting.depose(peer)
            return
        self.machine.succession.settled(message)
        if held.ballot.standing != core.here.standing:
            self.machine.member.drop("it builds on a state that we do not have")
            return
        if held.stage is not Stage.DONE:
            if not held.voter and held.begun and not held.frozen:
                held.fact = peer, message
                return
            core.remember(message)
            self.machine.member.drop("committed by the others, and our copy is not whole")
            self.machine.healing.behind(peer, held.ballot.epoch + 1)
            return
        if other:
            self.machine.member.drop("our copy of the result differs from the committed one")
            self.machine.healing.behind(peer, held.ballot.epoch + 1)
            return
        self._commit(peer, held, message)
        if peer == core.me and held.ballot.leader != core.me:
            core.broadcast_progress()  # this peer alone decided, in the leader's place
        elif peer != held.ballot.leader:
            # Members learn of the commit one by one. Whoever told this peer may be cut off before it tells
            # the next.
            for member in itertools.islice(filter(core.linked.alive, held.next_members), NEIGHBOURS):
                core.send(member, core.progress())

    def _commit(self, peer: PeerId, held: Holding, message: Committed) -> None:
        """The result is the epoch's average, on the word of `peer`."""
        core, ballot = self.core, held.ballot
        peers = [seat.peer for seat in held.members]
        lineage = next_lineage(
            ballot.lineage, ballot.epoch, peers, message.weights, message.digests, held.note
        )
        total = core.history.total + sum(message.samples)
        made = Generation(ballot.epoch, lineage, held.transfer, sum(message.samples), total, ballot.leader)
        late = not held.ready
        arrived = core.own.boundary_at if held.ready else held.proposed_at
        core.act(
            Commit(
                transfer=held.transfer,
                ballot=ballot,
                members=held.members,
                weights=message.weights,
                samples=message.samples,
                digests=message.digests,
                before=ballot.lineage,
                lineage=lineage,
                late=late,
                following=False,
                attempts=core.epoch_state.attempts,
                failed=tuple(core.epoch_state.excluded.items()),
                note=held.note,
                seconds={
                    "waiting": max(0.0, held.proposed_at - arrived),
                    "matchmaking": held.begun_at - max(held.proposed_at, arrived),
                    "transfer": held.done_at - held.begun_at,
                    "commit": core.now - held.done_at,
                },
            )
        )
        core.trace(TraceKind.COMMITTED, attempt=ballot.attempt, late=late, lineage=lineage)
        core.remember(message)
        if held.ready:
            core.own.take_off(held.samples[held.rank])
        core.own.serve()
        core.let_go()
        seats = zip(held.members, message.weights, strict=True)
        core.linked.committed(seats, ballot.standing, (ballot.epoch + 1, lineage), total, core.now)
        core.here.commit()
        # A suspected leader said nothing, and a successor decided.
        suspected = ballot.leader in core.epoch_state.suspects
        core.deadlines.measured_epoch(core.epoch_state.proposed_at - core.here.began_at)
        core.history.append(made)
        self._judge_lead(peer, held)
        self.machine.stretching.committed()
        core.new_epoch(ballot.epoch + 1, lineage, peer if suspected else ballot.leader)
        if held.ready:
            share = own_share(message.samples, held.rank, core.target, core.own.pace.samples)
            core.epoch_state.expect(core.target - share)
        self.machine.new_epoch()
        if peer == ballot.leader and held.voter:
            self.machine.reporting.told_by(peer)
        self._tell_outsiders(held, leads=core.me in (ballot.leader, core.leader()))

    def _tell_outsiders(self, held: Holding, *, leads: bool) -> None:
        """Tell where this peer stands now to living trainers that were no members, which the round's leader
        may not reach, and, as the leader, to all that do not stand here.
        """
        core = self.core
        members = {seat.peer for seat in held.members}
        told = {facts.peer for facts in core.linked.trainers() if facts.peer not in members}
        if leads:
            told.update(facts.peer for facts in core.linked if not core.stands_here(facts))
        for facts in core.linked if told else ():
            if facts.peer in told:
                core.send(facts.peer, core.progress())

    def _judge_lead(self, peer: PeerId, held: Holding) -> None:
        """Judge how long the ballot's leader let the members wait, as this peer and the others see it."""
        core, leader = self.core, held.ballot.leader
        if (
            held.ready
            and held.voter
            and leader not in (core.me, *core.epoch_state.suspects)
            and peer == leader
        ):
            own, first = core.own, core.epoch_state.attempts == 1
            transfer = max(0.0, held.done_at - max(held.begun_at, held.all_begun_at))
            began = own.boundary_at if first else max(own.boundary_at, held.proposed_at)
            explained = allowed(core.deadlines.longest_rtt(), own.pace.seconds, transfer)
            core.dawdling.add(
                leader, core.now - began - transfer, explained + self.machine.newcomers.allowance()
            )
        if held.relieves and not core.idle_leaders.is_out(leader, core.here.epoch):
            core.trace(TraceKind.SUSPECTED, peer=leader, why="keeps rounds waiting")
            core.relieve(leader)

    def on_aborted(self, peer: PeerId, message: Aborted) -> None:
        """The ballot is void: forget it, unless the leader of a higher ballot decides."""
        core, held = self.core, self.machine.core.holding
        ballot, by = message.ballot, message.by
        self.machine.succession.told_void(peer, message)
        if (
            ballot.standing != core.here.standing
            or core.epoch_state.excluded.get(by.leader) == Cause.IMPLAUSIBLE_BEGIN
        ):
            return
        if held is None:
            told = ballot == core.promises.last and self._may_decide(peer, ballot, by)
            if told or (peer == core.leader() and (message.final or core.me in message.blamed)):
                self._aborted(message, 0)
            return
        if not self._may_decide(peer, ballot, by):
            return
        if held.ballot != ballot:
            core.promises.release(ballot)
            return
        own = held.stage is Stage.OPEN and by.leader == ballot.leader
        above = core.promises.bound if core.promises.released else core.promises.last
        if above is not None and by < above and not own:
            return  # another peer decides, whether the result here is whole or not
        self.machine.member.drop(message.words)
        self.machine.member.dropped = replace(held.described(), stage=Stage.ABORTED)
        if core.here.joining is None:
            self._aborted(message, len(held.members))

    def _may_decide(self, peer: PeerId, ballot: Ballot, by: Ballot | None = None) -> bool:
        """Whether the word of `peer` about the ballot counts: it led the ballot, was promised the decision,
        or asked.

        by: the ballot that decided, as `peer` says.
        """
        core, held = self.core, self.machine.core.holding
        if peer == core.me or (peer == ballot.leader and by in (None, ballot)):
            return True
        promised, inquest = core.promises.last, self.machine.core.inquest
        if promised is not None and peer == promised.leader and by in (None, promised):
            return promised.standing == ballot.standing
        if inquest is not None and peer in inquest.asked:
            return True
        return held is not None and held.ballot == ballot and peer in held.asked

    def _asked(self, peer: PeerId) -> bool:
        """Whether this peer asked `peer` what became of the ballot that is held here."""
        held, inquest = self.machine.core.holding, self.machine.core.inquest
        return (inquest is not None and peer in inquest.asked) or (held is not None and peer in held.asked)

    def _aborted(self, message: Aborted, members: int) -> None:
        core = self.core
        core.remember(message)
        core.trace(TraceKind.ABORTED, attempt=message.ballot.attempt, why=message.cause, final=message.final)
        self.machine.leading.aborted(message)
        leader = message.by.leader
        blamed = message.blamed
        if message.cause is Cause.ANOTHER_LEADS:
            core.epoch_state.gave_way.add(leader)
        if leader != core.me and len(blamed) > 1 and self.machine.waiting.blames_most(blamed, members):
            self.machine.waiting.depose(leader)
        for peer in message.blamed if not core.idle_leaders.is_out(leader, core.here.epoch) else ():
            core.exclude(peer, message.cause, message.words, message.by.leader)
        if message.by == message.ballot and message.cause not in NO_FAILURE:
            self.machine.waiting.failed(message.ballot)
        if message.final:
            self.fail(message.words)
        elif core.out:
            core.resume()
            core.wait_at(None)

    def fail(self, why: str) -> None:
        """There is no average for now: the training thread keeps its gradients and goes on."""
        core = self.core
        if self.machine.core.holding is not None:
            self.machine.member.drop(why)
        core.act(RoundFailed(core.here.epoch, why, tuple(core.epoch_state.excluded)))
        core.restart_epoch()
        core.own.serve()
        core.wait_at(0)

    def _inquire(self, held: Holding) -> None:
        """Ask the peers that decide the ballot what became of it."""
        self.machine.member.inquire(sorted(self._deciding(held) - {self.core.me}))

    def _deciding(self, held: Holding) -> set[PeerId]:
        """This peer for its own part, the ballot's leader, and the leader of the ballot promised last."""
        return {self.core.me, held.ballot.leader, self.machine.member.authority() or held.ballot.leader}

    def await_decision(self, held: Holding) -> None:
        """The result is whole here, and the leader was told. Where it takes long to decide, ask others."""
        if len(held.seconds(self.core.me)) > 1:
            self._ask_others_in(ASK_OTHERS_S)

    def _ask_others_in(self, seconds: float) -> None:
        core = self.core
        core.arm(Timer.OTHERS, core.now + seconds + 2 * core.deadlines.longest_rtt())

    def on_others_timer(self) -> None:
        """The leader has not decided yet, or told the others alone: what most of them committed counts. One
        is asked each time, and all when that one knows of a decision: a slow round costs few messages.
        """
        core, held = self.core, self.core.holding
        if held is None or held.stage is not Stage.DONE or held.ballot.leader == core.me:
            return
        others = held.seconds(core.me)
        if not others:  # the ballot for which the timer was armed is gone
            return
        self._ask(held, others if held.applied else [others[held.others_asked % len(others)]])
        held.others_asked += 1
        self._ask_others_in(2 * (core.now - held.done_at))

    def _ask(self, held: Holding, peers: Iterable[PeerId]) -> None:
        for peer in peers:
            self.core.send(peer, Inquire(held.ballot))

    def on_inquire(self, peer: PeerId, message: Inquire) -> None:
        """Answer a peer that asks what became of a ballot."""
        core = self.core
        outcome = core.outcomes.get(message.ballot)
        core.send(peer, outcome or Unknown(message.ballot, core.here.epoch, core.here.lineage))
