"""Other peers: their links, their heartbeats, and where they say that they stand."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from p2pavg.rounds.machine.actions import LEFT, TraceKind
from p2pavg.rounds.machine.events import Apart, Health, Moved, PeerDown, PeerHealth, PeerUp
from p2pavg.rounds.machine.memory.unlinked import NO_LINK_S, SILENT_S, Unlinked
from p2pavg.rounds.machine.rules.deadlines import ADRIFT_S, LINKS_TOLD, LOOP_LIMIT, SILENCE_FLOOR, Timer
from p2pavg.rounds.protocol.ballot import Lineage, PeerId
from p2pavg.rounds.protocol.messages import Departing, Prepare, Progress, Ready, Totals

if TYPE_CHECKING:
    from p2pavg.rounds.machine.machine import Machine


class Peers:
    """Keeps which peers are there, and which fell silent."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.core = machine.core
        self._health: dict[PeerId, tuple[float, float]] = {}  # peer -> age and time of the last report
        self._adrift_until = -math.inf
        self._links_told_at = -math.inf
        self._told_apart: frozenset[PeerId] = frozenset()  # as the links tell
        self._unlinked = Unlinked()

    def new_epoch(self) -> None:
        """Whom nobody names any more may be dead."""
        if self._unlinked:
            self._unlinked.expire(self.core.now, self.core.here.epoch)
            self.part()

    def on_up(self, event: PeerUp) -> None:
        """A link to a peer is up: tell the peer where this one stands."""
        core = self.core
        core.linked.up(event, core.now)
        core.forget_words(event.peer)
        core.deadlines.measured_rtt(event.peer, event.rtt_s)
        self._health.pop(event.peer, None)
        self._is_linked(event.peer)
        planned_by = event.relayed or (event.client_only and core.config.client_only)
        if not (planned_by and self._tell_of_links()):
            core.send(event.peer, core.progress())

    def _tell_of_links(self) -> bool:
        """The others plan by the links that this peer has and lacks. Many change at once: the first change
        is told at once, all that follow in one word. Returns whether everybody was told now.
        """
        core = self.core
        now = core.now >= self._links_told_at + LINKS_TOLD
        if now:
            self.on_links_timer()
        elif Timer.LINKS not in core.timers:
            core.arm(Timer.LINKS, self._links_told_at + LINKS_TOLD)
        return now

    def on_links_timer(self) -> None:
        """Tell everybody which links this peer has and lacks."""
        self._links_told_at = self.core.now
        self.core.disarm(Timer.LINKS)
        self.core.broadcast_progress()

    def on_down(self, event: PeerDown) -> None:
        """The link to a peer is gone."""
        self.core.linked.departed.discard(event.peer)
        self._down(event.peer, event.reason)

    def on_apart(self, event: Apart) -> None:
        """This peer gets no link to these trainers: the others plan and lead accordingly."""
        self._told_apart = event.peers
        self.part()

    def names(self, by: PeerId, *peers: PeerId) -> None:
        """Another peer names these as leaders or voters of rounds that are made now. Whoever is not heard
        here for a while lives behind a link that is broken, which the links themselves may be slow to find
        out, or never do.
        """
        core = self.core
        for peer in peers:
            if peer not in (core.me, by) and not core.linked.alive(peer):
                wait = (SILENT_S if peer in core.linked else NO_LINK_S) + 4 * core.deadlines.longest_rtt()
                due = self._unlinked.names(by, peer, core.now, core.here.epoch, wait)
                if due <= core.now:
                    self.part()
                elif due < math.inf:
                    core.arm(Timer.APART, min(due, core.timers.get(Timer.APART, due)))

    def on_apart_timer(self) -> None:
        """Ask whom those follow now that named somebody a while ago."""
        core = self.core
        for peer in self._unlinked.doubtful(core.now):
            core.send(peer, core.progress())

    def votes(self, leader: PeerId, *voters: PeerId) -> None:
        """A round is forming with these voters."""
        if self._unlinked:
            self._unlinked.keep(voters)
            self.part()
        self.names(leader, *voters)

    def _is_linked(self, peer: PeerId) -> None:
        if self._unlinked:
            self._unlinked.linked(peer)
            self.part()

    def part(self) -> None:
        """Tell everybody, if it is news, to whom this peer gets no link."""
        core = self.core
        peers = self._told_apart | self._unlinked.apart
        if peers != core.apart:
            core.part_from(peers)
            core.trace(TraceKind.APART, peers=len(peers))
            self._tell_of_links()

    def on_moved(self, _: Moved) -> None:
        """All links are about to break, because this machine has another address: the others still live."""
        core = self.core
        if any(True for _ in core.linked.trainers()):
            self._adrift_until = core.now + ADRIFT_S
            core.arm(Timer.ADRIFT, self._adrift_until)
            core.trace(TraceKind.MOVED)

    @property
    def adrift(self) -> bool:
        """Whether this peer is alone only because its address changed a moment ago: the others, who still
        live, would not know what it decides now.
        """
        return self.core.now < self._adrift_until and not any(True for _ in self.core.linked.trainers())

    def on_departing(self, peer: PeerId, message: Departing) -> None:
        """A peer leaves; its last words tell what it knows."""
        if peer in self.core.linked:
            self.core.keep_words(peer, message.held)
            self._down(peer, LEFT)
            self.core.linked.departed.add(peer)

    def _down(self, peer: PeerId, reason: str) -> None:
        core = self.core
        facts = core.linked.get(peer)
        if facts is None:
            return
        core.linked.down(peer)
        self._health.pop(peer, None)
        core.promises.lose(peer)
        held = self.machine.core.holding
        if held is not None and held.ballot.leader == peer:
            held.orphaned = True
        core.deadlines.forget(peer)
        here = core.here
        told = facts.samples if facts.stands_at(here.epoch, here.lineage) else 0
        core.trace(TraceKind.DOWN, peer=peer, why=reason, epoch=here.epoch, samples=told)
        self._lost(peer, reason)

    def _lost(self, peer: PeerId, why: str) -> None:
        self.machine.leading.lost(peer, why)
        self.machine.member.lost(peer, why)
        self.machine.succession.lost(peer)

    def on_health(self, event: Health) -> None:
        """How long ago each peer was heard."""
        for health in event.peers:
            self._heartbeat(health)

    def _heartbeat(self, health: PeerHealth) -> None:
        core = self.core
        lived = core.now - core.resumed_at
        quiet = min(health.heard_s, lived)
        silent = quiet > SILENCE_FLOOR and quiet > core.deadlines.silence(health.peer)
        facts = core.linked.get(health.peer)
        if facts is None:
            if silent:
                core.linked.departed.discard(health.peer)
            return
        core.deadlines.measured_rtt(health.peer, health.rtt_s)
        before = self._health.get(health.peer)
        self._health[health.peer] = (health.heard_s, core.now)
        lived = core.now - core.resumed_at
        if (
            before is not None
            and health.heard_s < before[0]
            and not facts.silent
            and before[1] >= core.resumed_at
        ):
            core.deadlines.measured_gap(health.peer, before[0] + core.now - before[1] - health.heard_s)
        quiet = min(health.heard_s, lived)
        silent = quiet > SILENCE_FLOOR and quiet > core.deadlines.silence(health.peer)
        deaf = min(health.loop_s, lived) > LOOP_LIMIT + 2 * core.deadlines.rtt(health.peer)
        if (silent or deaf) and not facts.silent:
            why = "the link to it fell silent" if silent else "its event loop does not turn"
            core.linked.hears(facts, silent=True)
            core.trace(TraceKind.SILENT, peer=health.peer, why=why)
            self._lost(health.peer, why)
        elif facts.silent and not silent and not deaf:
            core.linked.hears(facts, silent=False)
            core.trace(TraceKind.HEARD_AGAIN, peer=health.peer)
            self._is_linked(health.peer)
            core.send(health.peer, core.progress())

    def hears_well(self, peer: PeerId) -> bool:
        """Whether the peer is far from being taken for silent."""
        heard_s, at = self._health.get(peer, (0.0, self.core.now))
        return heard_s + self.core.now - at < self.core.deadlines.silence(peer) / 2

    def on_ready(self, peer: PeerId, message: Ready) -> None:
        """A peer waits at a boundary, in a round that this peer leads, or led."""
        core = self.core
        facts = core.linked.get(peer)
        here = core.here.epoch, core.here.lineage
        if facts is None or message.ballot.standing != here or not facts.trains_at(*here):
            return
        if message.samples > facts.samples:
            core.deadlines.measured_step(peer, message.step_s)
        core.linked.ready(facts, message, core.now)
        self.machine.counting.on_ready(peer)

    def on_totals(self, peer: PeerId, message: Totals) -> None:
        """A peer leads, or takes itself for the leader."""
        self._leads(peer, message.epoch, message.lineage)

    def on_prepare(self, peer: PeerId, message: Prepare) -> None:
        """A leader proposes a group."""
        if peer == message.ballot.leader:
            self._leads(peer, *message.ballot.standing)

    def _leads(self, peer: PeerId, epoch: int, lineage: Lineage) -> None:
        """Without this, whoever missed a leader's first word would follow others as long as it leads: a
        leader tells nobody where it stands.
        """
        facts = self.core.linked.get(peer)
        if facts is not None:
            self.core.linked.trains(facts, epoch, lineage)

    def on_progress(self, peer: PeerId, message: Progress) -> None:
        """A peer tells where it stands."""
        core = self.core
        before = core.linked.get(peer)
        if before is None:
            return
        knew, first = (before.epoch, before.lineage, before.joining), not before.heard
        if before.pending and not message.pending and message.epoch == before.epoch == core.here.epoch:
            core.deadlines.measured_apply(peer, core.now - before.committed_at)
        if message.samples > before.samples:
            core.deadlines.measured_step(peer, message.step_s)
        core.linked.told(peer, message, core.now)
        core.heard_from(peer)
        if first:
            self.machine.succession.heard_first(peer)
        if message.leader is not None and message.epoch >= core.here.epoch and not message.joining:
            self.names(peer, message.leader)
        self.machine.leading.heard(peer)
        if (message.epoch, message.lineage) == (
            core.here.epoch,
            core.here.lineage,
        ) and core.here.joining is None:
            if peer == core.sticky and message.leader not in (peer, None):
                core.follow(message.leader)  # the leader abdicates
            self.machine.counting.on_progress(peer, message, first=first)
        elif knew != (message.epoch, message.lineage, message.joining) or message.epoch < core.here.epoch:
            core.send(peer, core.progress())
