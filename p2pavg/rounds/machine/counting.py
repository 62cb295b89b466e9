"""Between rounds, peers tell the leader how many samples they have, and the leader tells each the others'
total.

When the target is reached, the leader starts the round. A peer that waits for a silent leader looks for
another.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

from p2pavg.rounds.machine.actions import TraceKind
from p2pavg.rounds.machine.rules.camps import Facts
from p2pavg.rounds.machine.rules.deadlines import Timer
from p2pavg.rounds.machine.rules.pace import STOP_EARLY, Pace
from p2pavg.rounds.protocol.ballot import PeerId
from p2pavg.rounds.protocol.causes import FORGIVABLE, Cause
from p2pavg.rounds.protocol.messages import Aborted, Follow, Progress, Totals
from p2pavg.rounds.protocol.roles import Role

if TYPE_CHECKING:
    from p2pavg.rounds.machine.machine import Machine

KEEPALIVE_S = 0.5
# Seconds between two words to a peer that waits for the others' steps, on whether these are still expected.
RECHECK_S = 0.1
SHORT = 0.5  # of a word's way there and back: of shorter steps many are over before others hear of them
TURN_S = 0.02  # seconds that both event loops add to the round trip of a word
MOST_FORGIVEN = 2  # offences with which a peer may still come back within the epoch in which it failed
STUCK_EPOCH_S = 5.0  # seconds, beside four usual epochs, after which excluded peers are asked again
MOST_PACED = 64  # peers: among more of them, what one adds in a step is little

_samples: Callable[[Facts], int] = attrgetter("samples")


class Counting:
    """Counts samples towards the target, as the leader and as a follower."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.core = machine.core
        self._reached = False

    def new_epoch(self) -> None:
        self._reached = False
        self.core.disarm(Timer.GRACE, Timer.KEEPALIVE, Timer.WORD, Timer.LAPSE)
        self.core.disarm(Timer.HELD, Timer.STRETCH, Timer.TOTALS)

    # The leader's side.

    def followers(self) -> list[Facts]:
        """Live trainers that accumulate for this peer's epoch, without this peer."""
        core = self.core
        here = core.linked.standing(core.here.epoch, core.here.lineage)
        out = core.epoch_state.excluded
        if not out:
            return [facts for facts in here if not facts.pending]
        return [facts for facts in here if not facts.pending and facts.peer not in out]

    def on_progress(self, peer: PeerId, message: Progress, *, first: bool) -> None:
        """A peer of this camp told where it stands, which `linked` has already. first: for the first time
        over this
        link."""
        core = self.core
        if first and peer == core.leader():
            self.machine.reporting.report_again()  # over a new link: the leader may have missed words
        leader = core.leader()
        if message.leader == peer and leader not in (None, peer) and not message.joining:
            self.machine.leaders.tell(peer, leader)
        if message.leader != core.me or message.joining:
            return
        if leader != core.me:
            if leader == peer:
                self.machine.leaders.settle_with(peer)
            elif leader is not None:
                core.send(peer, Follow(core.here.epoch, core.here.lineage, leader))
            return
        self._answer(peer, waits=message.boundary)

    def on_ready(self, peer: PeerId) -> None:
        """A peer of this camp waits at a boundary, as `linked` has it already."""
        if self.core.leader() == self.core.me:
            self._answer(peer, waits=True)

    def _answer(self, peer: PeerId, *, waits: bool) -> None:
        """A follower told how far it is. waits: at a boundary, for the others or for a round."""
        core = self.core
        if peer in core.epoch_state.excluded:
            last = core.promises.highest((core.here.epoch, core.here.lineage))
            core.send(
                peer,
                Aborted(
                    last,
                    last,
                    core.epoch_state.excluded[peer],
                    core.epoch_state.excluded[peer].words,
                    (peer,),
                    False,
                ),
            )
            return
        lockstep = core.config.lockstep and core.config.spacing is None
        reached = lockstep and self._is_reached(sum(map(_samples, self.followers())))
        if waits and not reached and core.proposal is None:
            facts = core.linked.get(peer)
            if facts is not None and self._is_short(facts.pace, [peer]):
                self._answer_at(core.now + facts.pace.seconds + core.deadlines.rtt(peer))
            # The peer waits for the target: while the target is far, the peer has to go on.
            elif facts is not None:
                followers = self.followers()
                self._tell(facts, followers, self._total(followers))
        # In lockstep each peer stops at its next boundary, whatever the others have, and a round follows.
        if Timer.TOTALS not in core.timers and (waits or not lockstep):
            core.arm(Timer.TOTALS, core.now + (RECHECK_S if reached else core.deadlines.report_interval()))

    def _tell(self, facts: Facts, followers: list[Facts], total: int, *, again: bool = True) -> None:
        """again: tell the peer even what it was told a moment ago."""
        core = self.core
        at = core.now if facts.boundary else facts.pace.boundary(core.now)
        until = at + STOP_EARLY * facts.pace.seconds
        more = self._more(facts.peer, followers, until)
        others = total + more - (facts.samples if self._follows(facts) else 0)
        others = self.machine.stretching.others(others, total, followers, until)
        if again or others != facts.told or core.now >= facts.told_at + KEEPALIVE_S:
            facts.told, facts.told_at = others, core.now
            core.send(facts.peer, Totals(core.here.epoch, core.here.lineage, others))

    def _follows(self, facts: Facts) -> bool:
        """Whether the peer is one of `followers`."""
        core = self.core
        return (
            facts.trains_at(core.here.epoch, core.here.lineage)
            and not facts.pending
            and facts.peer not in core.epoch_state.excluded
        )

    def _total(self, followers: list[Facts]) -> int:
        """Samples that all peers have counted, this one included."""
        return (0 if self.core.here.pending else self.core.own.samples) + sum(map(_samples, followers))

    def _more(self, peer: PeerId, followers: list[Facts], at: float) -> int:
        """Samples that all peers but `peer` will have counted at `at`, beyond those that they told."""
        core = self.core
        if len(followers) > MOST_PACED:
            return 0
        more = sum(f.pace.more(at, core.now) for f in followers if f.peer != peer and not f.boundary)
        if peer != core.me and not core.here.pending and not core.own.boundary:
            more += core.own.pace.more(at, core.now)
        return more

    def _own_others(self, followers: list[Facts]) -> int:
        """Samples that the others will have when this peer's step under way ends, or a little later."""
        core = self.core
        at = core.now if core.own.boundary else core.own.pace.boundary(core.now)
        until = at + STOP_EARLY * core.own.pace.seconds
        others = sum(map(_samples, followers)) + self._more(core.me, followers, until)
        return self.machine.stretching.others(others, self._total(followers), followers, until)

    def expected(self, others: int) -> int:
        """How many samples the others have, or will have when this peer's samples are there.

        Where steps are shorter than the way of a word, what is known of the others is old: then this peer
        stops at its share by the last average, and asks the leader. `EpochState.expected` is 0 once it has
        asked.
        """
        core, leader = self.core, self.core.leader()
        if core.own.boundary or leader is None or not core.epoch_state.expected:
            return others
        far = [f.peer for f in self.followers()] if leader == core.me else [leader]
        return max(others, core.epoch_state.expected) if self._is_short(core.own.pace, far) else others

    def _is_short(self, pace: Pace, far: list[PeerId]) -> bool:
        """Whether many steps of this pace are over before one of these peers hears of the first."""
        delay = TURN_S + max(map(self.core.deadlines.rtt, far), default=0.0)
        return not self.core.config.weighted and 0 < pace.seconds < SHORT * delay

    def _answer_at(self, at: float) -> None:
        """The others may be as far, with their words on the way: the training thread hears a step later
        whether they
        are."""
        self.core.arm(Timer.LAPSE, min(at, self.core.timers.get(Timer.LAPSE, at)))

    def on_totals_timer(self) -> None:
        """Tell everybody how far the others will be at its next boundary."""
        core = self.core
        if core.leader() != core.me:
            return
        followers = self.followers()
        total = self._total(followers)
        for facts in followers:
            asks = facts.boundary and self._is_short(facts.pace, [facts.peer])
            self._tell(facts, followers, total, again=asks)
        if not core.here.pending:
            core.wait_at(self.expected(self._own_others(followers)))
        if core.own.boundary or any(facts.boundary for facts in followers):
            core.arm(Timer.LAPSE, core.now + RECHECK_S)

    def on_keepalive_timer(self) -> None:
        """Peers that wait for this one have to hear that it is at work."""
        core = self.core
        if self.machine.core.proposal is None and not self._reached and self.machine.core.inquest is None:
            return
        self.on_totals_timer()
        core.arm(Timer.KEEPALIVE, core.now + KEEPALIVE_S)

    def consider(self) -> None:
        """Called after every event: is it time to propose?"""
        core, machine = self.core, self.machine
        if core.out:
            machine.waiting.let_go()
        if core.proposal is not None or core.inquest is not None:
            if Timer.KEEPALIVE not in core.timers:
                core.arm(Timer.KEEPALIVE, core.now + KEEPALIVE_S)
            return
        if core.here.role is not Role.TRAINER or core.here.joining is not None or core.leader() != core.me:
            self._reached = False
            return
        if machine.core.holding is not None or Timer.RETRY in core.timers:
            return
        if not self._cannot_go_on():
            machine.leading.bar()
        if Timer.UNHEARD in core.timers and any(map(core.linked.alive, core.unheard)):
            return  # these peers may be ahead of the state that was loaded here
        followers = self.followers()
        others = sum(map(_samples, followers))
        if self._readmit(others):
            return
        reached, stretching = self._is_reached(others), machine.stretching
        if reached and (until := stretching.until()) > core.now:
            stretching.hold()
            core.arm(Timer.STRETCH, until)
            if core.own.boundary and stretching.soon():
                return
            reached = False
            others = stretching.others(others, self._total(followers), followers, core.now)
        if not reached:
            self._reached = False
            core.disarm(Timer.GRACE)
            if core.own.boundary and not self._will_be_reached():
                far = [facts.peer for facts in followers]
                until = (
                    core.own.boundary_at
                    + core.own.pace.seconds
                    + max(map(core.deadlines.rtt, far), default=0.0)
                )
                if far and core.now < until and self._is_short(core.own.pace, far):
                    self._answer_at(until)
                    return
                core.wait_at(others)
                core.resume()
            return
        if machine.peers.adrift:
            return
        if not self._reached:
            self._reached = True
            core.trace(TraceKind.REACHED, samples=others + core.own.samples)
            core.arm(Timer.KEEPALIVE, core.now + KEEPALIVE_S)
        late = {facts: self._grace(facts) for facts in core.linked.trainers()}
        grace = max(late.values(), default=0.0)
        if core.here.pending:
            grace = max(grace, core.here.began_at + core.deadlines.apply(core.me), machine.leaders.until)
        if grace > core.now:
            if Timer.GRACE not in core.timers:
                self.machine.leaders.ask([f for f, until in late.items() if until > core.now])
            core.arm(Timer.GRACE, grace)
            return
        core.disarm(Timer.GRACE)
        if (until := machine.newcomers.held_until()) > core.now:
            core.arm(Timer.HELD, until)
            return
        if core.here.pending:
            self._abdicate()
        elif (until := machine.leading.asks_again_at(1 + len(followers))) > core.now:
            core.arm(Timer.RETRY, until)
        else:
            stretching.let_go()
            machine.leading.propose()

    def _readmit(self, others: int) -> bool:
        """Peers that failed an attempt which never began come back when the target needs them.

        Each further attempt that they fail counts towards the attempts that an epoch may have. Each attempt
        waits longer than the last, so that the links of a group that has just met come up before all attempts
        are used up.
        """
        core = self.core
        if not core.epoch_state.excluded or self._is_reached(others):
            return False
        back = [f for f in core.linked.trainers() if core.stands_here(f) and self._is_forgiven(f.peer)]
        own = 0 if core.here.pending else core.own.samples
        if own + others + sum(f.samples for f in back if not f.pending) < core.target:
            return False
        for facts in back:
            core.readmit(facts.peer)
            core.trust(facts.peer)
            core.trace(TraceKind.READMITTED, peer=facts.peer)
        followers = self.followers()
        for facts in back:
            self._tell(facts, followers, self._total(followers))
        core.arm(Timer.RETRY, core.now + core.deadlines.readmission(self.machine.leading.failures))
        return True

    def _is_forgiven(self, peer: PeerId) -> bool:
        """Whether an excluded peer may come back in this epoch: even after many failures, where it is
        needed.
        """
        cause = self.core.epoch_state.excluded.get(peer)
        if self._cannot_go_on():
            return cause is Cause.PENANCE or cause in FORGIVABLE
        return cause in FORGIVABLE and self.machine.leading.offences.strikes(peer) <= MOST_FORGIVEN

    def _cannot_go_on(self) -> bool:
        """Whether the epoch lasts much longer than others did: where nobody computes on, it needs the
        excluded.
        """
        core = self.core
        return core.now > core.here.began_at + STUCK_EPOCH_S + 4 * core.deadlines.usual_epoch(0.0)

    def _will_be_reached(self) -> bool:
        """Whether the others are expected to reach the target before another own step would be half done."""
        core = self.core
        if core.own.samples + self._own_others(self.followers()) < core.target:
            return False
        if Timer.LAPSE not in core.timers:
            core.arm(Timer.LAPSE, core.now + RECHECK_S)
        return True

    def _is_reached(self, others: int) -> bool:
        core = self.core
        if core.epoch_state.begun_before:
            return True
        return others + (0 if core.here.pending else core.own.samples) >= core.target

    def _grace(self, facts: Facts) -> float:
        """Until when the leader waits for a peer that has yet to apply the last average."""
        core = self.core
        if (
            not core.stands_here(facts)
            or not facts.pending
            or facts.late
            or facts.peer in core.epoch_state.excluded
        ):
            return 0.0
        return facts.committed_at + core.deadlines.apply(facts.peer)

    def _abdicate(self) -> None:
        """This peer is late with its own step: another peer has to lead."""
        core = self.core
        core.suspect(core.me)
        self._reached = False
        if core.leader() is None:
            core.trust(core.me)  # no other peer can lead: the round waits for this one
            core.arm(Timer.GRACE, core.now + core.deadlines.apply(core.me))
            return
        core.trace(TraceKind.ABDICATED, leader=core.leader())
        core.broadcast_progress()

    # The follower's side.

    def on_totals(self, peer: PeerId, message: Totals) -> None:
        core = self.core
        if (message.epoch, message.lineage) != (core.here.epoch, core.here.lineage) or peer != core.leader():
            return
        if core.here.joining is not None or core.here.pending or self.machine.core.holding is not None:
            return
        if core.out:  # a leader says nothing to peers that it leaves out: this peer is in again
            core.readmit(core.me)
        others = self.machine.stretching.believed(message.others)
        core.wait_at(self.expected(others))
        if core.own.boundary and core.target > core.own.samples + others:
            core.resume()
