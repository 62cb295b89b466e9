"""What this peer tells the leader: how far it is, no more often than needed, and what its links carry."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from p2pavg.rounds.machine.actions import TraceKind
from p2pavg.rounds.machine.events import LinksMeasured
from p2pavg.rounds.machine.rules.camps import Facts, ends
from p2pavg.rounds.machine.rules.deadlines import Timer
from p2pavg.rounds.machine.rules.election import rendezvous
from p2pavg.rounds.protocol.ballot import PeerId
from p2pavg.rounds.protocol.messages import Follow, Links
from p2pavg.rounds.protocol.roles import LinkFacts, Role

if TYPE_CHECKING:
    from p2pavg.rounds.machine.machine import Machine

CROSSING_S = 0.1  # seconds in which what two peers say of their leaders may cross
TELL_S = 0.5  # seconds between two words to a peer that leads on whom this one follows


class Reporting:
    """Reports to the leader, whoever leads."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.core = machine.core
        self._told: tuple[object, ...] = ()  # the last report to the leader
        self._told_at = -1.0
        self._leader: PeerId | None = None

    def report(self) -> None:
        """Called after every event: tell the leader what is new, no more often than needed."""
        core = self.core
        leader = core.leader()
        if leader != self._leader:
            core.trace(TraceKind.LEADER, leader=leader)
            before, self._leader = self._leader, leader
            core.disarm(Timer.WORD)
            self._told = ()
            if leader == core.me:
                core.arm(Timer.TOTALS, core.now)  # waiting peers reported here before this peer led
                self._take_over(before)
        if (
            leader is None
            or leader == core.me
            or core.here.role is not Role.TRAINER
            or core.here.joining is not None
        ):
            return
        urgent = self._urgent(leader)
        if self._told == (urgent, core.own.samples):
            return
        if self._told[:1] != (urgent,) or core.now >= self._told_at + core.deadlines.report_interval():
            self._told, self._told_at = (urgent, core.own.samples), core.now
            core.send(leader, core.progress())
            core.disarm(Timer.REPORT)
        elif Timer.REPORT not in core.timers:
            core.arm(Timer.REPORT, self._told_at + core.deadlines.report_interval())

    def _urgent(self, leader: PeerId) -> tuple[object, ...]:
        """What the leader hears of at once when it changes."""
        core = self.core
        return core.here.epoch, core.here.lineage, core.here.pending, core.own.boundary, leader

    def told_by(self, leader: PeerId) -> None:
        """The leader told this peer of a commit, and knows thereby where this voter stands."""
        if leader != self.core.me and leader == self.core.leader() and not self.core.own.samples:
            self._told = self._urgent(leader), 0

    def told_ready(self, leader: PeerId) -> None:
        """READY tells the leader that this peer waits, and with how many samples."""
        own, urgent = self.core.own, self._urgent(leader)
        if self._told[:1] == ((*urgent[:3], False, leader),):
            self._told, self._told_at = (urgent, own.samples), self.core.now

    def report_again(self) -> None:
        """The leader may have missed the last report: send it again."""
        self._told = ()

    def _take_over(self, before: PeerId | None) -> None:
        """This peer leads now. A former leader that cannot reach everybody is told so."""
        core = self.core
        if before is not None and before in ends(core.gaps()):
            for facts in core.linked.standing(core.here.epoch, core.here.lineage):
                core.send(facts.peer, Follow(core.here.epoch, core.here.lineage, core.me))


class Leaders:
    """Which of several peers that lead this one follows, and what it tells them of each other."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.core = machine.core
        self._left_at: dict[PeerId, float] = {}  # peer -> when it told this one whom to follow instead
        self._told_at: dict[PeerId, float] = {}  # who took itself for the leader -> when it was told
        # Until then this peer leads though it is late: another late peer leaves the lead to it.
        self.until = 0.0

    def new_epoch(self) -> None:
        """What was said of leaders was of the last epoch."""
        self._left_at.clear()
        self._told_at.clear()
        self.until = 0.0

    def settle_with(self, peer: PeerId) -> None:
        """Two peers take each other for the leader. The peer that both choose leads, late or not, and answers
        nothing; the other one says whom it follows. If the choice of both is out of this epoch, which the
        other peer may not know, the chosen peer says that the other leads.
        """
        core = self.core
        if rendezvous(core.run, core.here.epoch, (core.me, peer)) != core.me:
            core.send(peer, core.progress())
            return
        core.trust(core.me)
        if core.can_lead(core.me):
            core.follow(core.me)
            self.until = core.now + core.deadlines.apply(core.me)
        elif core.out and core.can_lead(peer):
            core.send(peer, Follow(core.here.epoch, core.here.lineage, peer))

    def tell(self, peer: PeerId, leader: PeerId) -> None:
        """A peer leads where this one follows another peer, which that one may not hear; or where this one
        leads itself: then the one that both choose goes on.
        """
        core = self.core
        if leader == core.me:
            if core.proposal is None and rendezvous(core.run, core.here.epoch, (core.me, peer)) == peer:
                core.follow(peer)
        elif core.now >= self._told_at.get(peer, -math.inf) + TELL_S:
            self._told_at[peer] = core.now
            core.send(peer, Follow(core.here.epoch, core.here.lineage, leader))

    def ask(self, late: list[Facts]) -> None:
        """This peer waits for these, which may lead themselves: then they tell nobody that they are ready."""
        for facts in late:
            if facts.leader != self.core.me:
                self.core.send(facts.peer, self.core.progress())

    def on_follow(self, peer: PeerId, message: Follow) -> None:
        core = self.core
        if (message.epoch, message.lineage) != (core.here.epoch, core.here.lineage):
            return
        if core.now < self._left_at.get(message.leader, -math.inf) + CROSSING_S:
            return  # the peer has just named another leader: what the two know of each other is old
        self.machine.peers.names(peer, message.leader)
        if core.can_lead(message.leader):
            core.follow(message.leader)
            self._left_at[peer] = core.now


class Measurements:
    """Tells each leader of this peer's links, once for each measurement."""

    def __init__(self, machine: Machine) -> None:
        self.core = machine.core
        self._told: tuple[object, Mapping[PeerId, LinkFacts]] | None = None

    def on_measured(self, event: LinksMeasured) -> None:
        """Something new was measured of this peer's links."""
        self.core.own.measured_links(event.links)

    def on_links(self, peer: PeerId, message: Links) -> None:
        """Keep what another peer measured."""
        facts = self.core.linked.get(peer)
        if facts is not None:
            facts.links = {other: LinkFacts(bps, rtt_s) for other, bps, rtt_s in message.links}

    def consider(self) -> None:
        """Called after every event: does the present leader know what this peer measured?"""
        core, links = self.core, self.core.own.links
        if not links or (leader := core.leader()) is None or (facts := core.linked.get(leader)) is None:
            return
        told = self._told
        if told is not None and told[0] is facts and told[1] is links:  # a new link has other facts
            return
        self._told = facts, links
        rows = tuple((peer, link.bps, link.rtt_s) for peer, link in links.items())
        core.send(leader, Links(rows))
