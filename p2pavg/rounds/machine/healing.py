"""When this peer is behind, or on a lineage that gives way: download the state of the camp that wins."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from p2pavg.rounds.machine.actions import Discarded, StartHeal
from p2pavg.rounds.machine.camps import Camp
from p2pavg.rounds.machine.events import Healed, HealFailed
from p2pavg.rounds.protocol.ballot import Ballot, Lineage, PeerId
from p2pavg.rounds.protocol.messages import Inquire, Unknown
from p2pavg.rounds.protocol.roles import Role

if TYPE_CHECKING:
    from p2pavg.rounds.machine.holding import Holding
    from p2pavg.rounds.machine.machine import Machine

RETRY_S = 0.5  # after no donor could give the state
ALONE_S = 5.0  # a joiner that sees nobody with a state begins with its own


class Healing:
    """Which camp this peer belongs to."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.core = machine.core
        self._settles_at: float | None = None  # another camp has been winning, over however many epochs

    def new_epoch(self) -> None:
        self.core.disarm("ask")

    def consider(self) -> None:
        """Called after every event: does another camp win?"""
        core = self.core
        if core.role is Role.WATCHER:
            return
        if core.leaving and self.machine.member.holding is None:
            return  # but a ballot that it holds may have been decided without it
        if core.joining is not None:
            self._keep_up()
            return
        if core.role is Role.TRAINER and not core.view.rivals(core.epoch, core.lineage):
            self._unrivalled()
            return
        mine, *others = core.view.camps(core.camp())
        best = mine
        for camp in others:
            if camp.beats(best):
                best = camp
        if best is mine:
            self._unrivalled()
            return
        core.disarm("found")
        if self._settles_at is None:
            self._settles_at = core.now + core.deadlines.settle()
            core.arm("settle", self._settles_at)
        if best.epoch > mine.epoch:
            held = self.machine.member.holding
            if held is None:
                self._start(best, "behind the others")
            else:
                self._ask(best, held)
            return
        if self.machine.member.holding is not None:
            return  # our round of this epoch ends first
        if core.now >= self._settles_at:
            self._start(best, "another lineage of the same epoch wins")

    def _unrivalled(self) -> None:
        core = self.core
        if self._settles_at is not None or "ask" in core.timers:
            self._settles_at = None
            core.disarm("settle", "ask")
        if core.role is Role.JOINER and "found" not in core.timers:
            core.arm("found", core.now + ALONE_S)

    def follow(self, ballot: Ballot, lineage: Lineage) -> None:
        """While we download, the results since are followed; when some were missed, both begin again."""
        core = self.core
        if core.joining is not None and ballot.epoch > core.joining[0]:
            self.machine.member.abandon("a result was missed")
            self._start(Camp(ballot.epoch, lineage, 0, 0), "a result was missed", ballot.leader)

    def _keep_up(self) -> None:
        """While we download: a ballot that we hold may have been decided without us."""
        core, held = self.core, self.machine.member.holding
        if held is None or not core.view.rivals(*core.standing):
            return
        best = max(core.view.camps(Camp(-1, core.lineage, 0, 0)), key=lambda camp: camp.epoch)
        if best.epoch > core.standing[0]:
            self._ask(best, held)

    def _ask(self, camp: Camp, held: Holding) -> None:
        """Those ahead of us know what became of the ballot that we hold."""
        core = self.core
        if "ask" not in core.timers:
            donors = self._donors(camp)
            for peer in donors:
                core.send(peer, Inquire(held.ballot, held.lineage))
            core.arm("ask", core.now + max(core.deadlines.answer(peer) for peer in donors))

    def on_settle_timer(self) -> None:
        """Nothing to do: `consider` runs after every event."""

    def on_found_timer(self) -> None:
        """Whoever had the state is gone: what we were built with is where the run begins again."""
        core = self.core
        if core.joining is None:
            core.role = Role.TRAINER
            core.trace("founded")
            core.wait_at(0)
            core.broadcast_progress()

    def on_ask_timer(self) -> None:
        """Nobody of the winning camp knows our ballot: it went another way."""
        core, held = self.core, self.machine.member.holding
        if held is not None and held.fact is not None and held.moves(core.now):
            core.arm("ask", core.now + core.deadlines.answer(held.ballot.leader))
            return  # it is committed, and the rest of it is still coming
        self._give_up()

    def on_unknown(self, peer: PeerId, message: Unknown) -> None:
        held = self.machine.member.holding
        if held is not None and held.ballot == message.ballot and message.epoch > self.core.standing[0]:
            self._give_up()

    def _give_up(self) -> None:
        core = self.core
        best = max(core.view.camps(core.camp()), key=lambda camp: (camp.epoch, camp.peers, camp.total))
        if best.epoch > core.standing[0]:
            self.machine.abandon_round("the others went on without us")
            if core.joining is None and not core.leaving:
                self._start(best, "behind the others")

    def behind(self, peer: PeerId, epoch: int) -> None:
        """A peer has committed what we cannot: it stands at least at `epoch`."""
        facts = self.core.view.get(peer)
        if facts is not None and facts.epoch >= epoch:
            self.consider()
        elif facts is not None:
            self.core.send(peer, self.core.progress())  # its answer tells where it stands

    def _donors(self, camp: Camp) -> list[PeerId]:
        """Who stands there: rather those that others can dial, have applied their average, and are near."""
        rtt = self.core.deadlines.rtt
        there = self.core.view.standing(camp.epoch, camp.lineage)
        return [f.peer for f in sorted(there, key=lambda f: (f.client_only, f.pending, rtt(f.peer), f.peer))]

    def _start(self, camp: Camp, why: str, leader: PeerId | None = None) -> None:
        """leader: stands there for sure, though it has not told us yet."""
        core = self.core
        self.machine.abandon_round(why)
        core.joining = core.joined_at = (camp.epoch, camp.lineage)
        core.followed.clear()
        core.resume()
        core.wait_at(None)
        core.deadlines.scale = 1.0  # the round in which it grew is over for us
        donors = self._donors(camp) or ([leader] if leader is not None else [])
        core.trace("heal", to=camp.epoch, lineage=camp.lineage, why=why)
        core.act(StartHeal(camp.epoch, camp.lineage, tuple(donors), why))
        core.broadcast_progress()

    def on_healed(self, event: Healed) -> None:
        """The training thread has loaded a state."""
        core = self.core
        # What a committed average holds of ours, that the training thread has yet to apply, is in both.
        void = core.history.offered_since(core.applied_epoch)
        lost = core.history.adopt(event.history, event.dropped - void)
        if lost:
            core.act(Discarded(lost, "healed" if lost > 0 else "healed back"))
        passed = [core.joined_at, *((g.epoch + 1, g.lineage) for g in core.followed)]
        here = (event.epoch, event.lineage)
        since = core.followed[passed.index(here) :] if here in passed else []
        for made in since:
            core.history.append(replace(made, total=core.history.total + made.samples))
        epoch, lineage = passed[-1] if since else here
        core.samples = 0
        core.boundary = False
        core.applied_epoch = event.epoch
        if core.joining is not None and event.epoch < core.joined_at[0]:
            core.epoch, core.lineage = here  # a later state is on its way
            return
        self._settles_at = None
        core.unheard = {f.peer for f in core.view.trainers() if f.epoch < epoch}
        wait = max(map(core.deadlines.answer, core.unheard), default=0.0)
        core.arm("unheard", core.now + wait)
        core.pending = bool(since)
        core.joining = None
        core.role = Role.TRAINER
        core.disarm("heal")
        core.sticky = None
        core.new_epoch(
            epoch, lineage, core.history.generations[-1].leader if core.history.generations else None
        )
        self.machine.new_epoch()
        core.trace("healed", lineage=event.lineage, results=len(since))
        held = self.machine.member.holding
        if held is not None and (held.ballot.epoch, held.lineage) != core.standing:
            self.machine.member.abandon("the state belongs to another epoch")
        if not core.pending:
            core.wait_at(0)
        core.broadcast_progress()

    def on_heal_failed(self, event: HealFailed) -> None:
        core = self.core
        if core.joining is not None:
            core.trace("heal failed", why=event.why)
            core.arm("heal", core.now + RETRY_S)

    def on_heal_timer(self) -> None:
        """Try again: with whoever wins now. What was followed is of no use without the state."""
        core, held = self.core, self.machine.member.holding
        core.joining = None
        if held is not None and (held.ballot.epoch, held.lineage) != core.standing:
            self.machine.member.abandon("the state that it follows on could not be downloaded")
        self.consider()
        if core.joining is None:
            core.wait_at(0)
            core.broadcast_progress()

    def on_moved(self) -> None:
        """While we download, nobody of the camp is left: look again."""
        core = self.core
        if core.joining is None:
            return
        epoch, _ = core.joining
        if any(f.epoch >= epoch for f in core.view.trainers()):
            return
        core.arm("heal", core.now + RETRY_S)
