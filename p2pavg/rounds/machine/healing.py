"""Healing: a peer that is behind, or on a lineage that gives way, downloads the state of the camp that
wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2pavg.rounds.machine.actions import Discarded, Orphaned, Resume, StartHeal, StopHeal, TraceKind
from p2pavg.rounds.machine.events import Donors, Followed, Healed, HealFailed, Level
from p2pavg.rounds.machine.rules.camps import Camp, Facts
from p2pavg.rounds.machine.rules.deadlines import MOST_BEHIND, Timer
from p2pavg.rounds.protocol.ballot import Lineage, PeerId, Stage
from p2pavg.rounds.protocol.causes import Loss
from p2pavg.rounds.protocol.messages import Unknown
from p2pavg.rounds.protocol.roles import Generation, Role

if TYPE_CHECKING:
    from p2pavg.rounds.machine.machine import Machine

RETRY_S = 0.5  # seconds before another try, after no donor could give the state
# Seconds for which the others do not follow a peer that alone says that it is ahead, and gives nothing. Each
# further time they last twice as long.
DOUBT_S = 8.0
MOST_DOUBLINGS = 7  # of DOUBT_S
MOST_DOUBTS = 64  # peers, beyond which those without a link are forgotten
FIRST_ASKED = 4  # of a winning camp, about a ballot that is held here; the others when none of these answers
ALONE_S = 5.0  # seconds after which a joiner that sees nobody with a state says so


class Healing:
    """Decides to which camp this peer belongs."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.core = machine.core
        # When this peer gives way to a camp that keeps winning, over however many epochs.
        self._settles_at: float | None = None
        self._orphaned = False  # whether this peer has no state, and nobody that has one is there
        self._counted = (
            False  # whether others have averaged samples that wait here: then their state is needed
        )
        self._doubts: dict[PeerId, tuple[int, float]] = {}  # peer -> how often it was doubted, and until when
        self._asked: tuple[PeerId, ...] = ()  # those that give what is downloaded, or were asked for that

    def new_epoch(self) -> None:
        self.core.disarm(Timer.ASK)

    def consider(self) -> None:
        """Called after every event: does another camp win?"""
        core = self.core
        if core.here.role is Role.WATCHER:
            return
        if core.here.departing and self.machine.core.holding is None:
            return  # a departing peer heals only while it holds a ballot, which others may have decided
        if core.here.joining is not None:
            self._look_after_donors()
            return
        if core.linked.doubted:
            core.linked.doubt({peer for peer, (_, until) in self._doubts.items() if core.now < until})
        if core.here.role is Role.TRAINER and not core.linked.rivals(core.here.epoch, core.here.lineage):
            self._unrivalled()
            return
        mine, best = self._winner()
        if best is mine:
            self._unrivalled()
            return
        core.disarm(Timer.ORPHANED)
        self._orphaned = False
        if self._settles_at is None:
            self._settles_at = core.now + core.deadlines.settle()
            core.arm(Timer.SETTLE, self._settles_at)
        if best.epoch > mine.epoch:
            held = self.machine.core.holding
            if held is None:
                self._start(best, "behind the others")
            else:
                self._ask(best)
            return
        if self.machine.core.holding is not None:
            return  # the round of this epoch ends first
        if core.now >= self._settles_at:
            self._start(best, "another lineage of the same epoch wins")

    def _winner(self) -> tuple[Camp, Camp]:
        """The camp of this peer, and the one that beats all others, which may be the same."""
        mine, *others = self.core.linked.camps(self.core.camp())
        best = mine
        for camp in others:
            if camp.beats(best):
                best = camp
        return mine, best

    def _look_after_donors(self) -> None:
        """The donors of the download under way have all fallen silent: others may be heard. A peer that has a
        state, and hears nobody further, goes on with that, as all do that are cut off.
        """
        core = self.core
        if any(core.linked.gives(donor) for donor in self._asked):
            return
        mine, best = self._winner()
        if best is not mine:
            self._start(best, "its donors fell silent")
        elif core.here.role is Role.TRAINER:
            core.trace(TraceKind.HEAL_FAILED, why="its donors fell silent")
            core.act(StopHeal("its donors fell silent"))
            self._take_part()

    def on_donors(self, event: Donors) -> None:
        """The peers from which the download under way comes: what others could give is not on its way."""
        if self.core.here.joining is not None:
            self._asked = event.peers

    def _unrivalled(self) -> None:
        core = self.core
        if self._settles_at is not None or Timer.ASK in core.timers:
            self._settles_at = None
            core.disarm(Timer.SETTLE, Timer.ASK)
        if core.here.role is Role.JOINER and not self._orphaned:
            self._orphaned = True
            core.arm(Timer.ORPHANED, core.now + ALONE_S)
        if core.here.role is Role.JOINER and core.linked.doubted:
            # Nobody else has a state: those that gave none are asked again.
            core.arm(Timer.HEAL, min(until for _, until in self._doubts.values() if core.now < until))

    def _ask(self, camp: Camp) -> None:
        """Ask some of the peers ahead of this one what became of the ballot that it holds."""
        if Timer.ASK not in self.core.timers:
            self._ask_first(self._unasked(camp) or self._donors(camp), FIRST_ASKED)

    def _ask_first(self, peers: Sequence[PeerId], most: int | None) -> None:
        """most: how many of them; None: all."""
        core = self.core
        self.machine.member.inquire(peers[:most])
        core.arm(Timer.ASK, core.now + max(core.deadlines.answer(peer) for peer in peers[:most]))

    def _unasked(self, camp: Camp) -> list[PeerId]:
        """Those that were not asked about the ballot that is held here; first its members, who know most."""
        held = self.core.holding
        assert held is not None
        donors = [peer for peer in self._donors(camp) if peer not in held.asked]
        return sorted(donors, key=lambda peer: peer not in held.voting)

    def on_orphaned_timer(self) -> None:
        """Members have answered, and are gone: a run of this peer alone would go another way than theirs."""
        core = self.core
        if core.here.joining is None:
            core.trace(TraceKind.ORPHANED)
            core.act(Orphaned())

    def on_ask_timer(self) -> None:
        """Nobody of the winning camp knows the ballot that is held here: that camp went another way."""
        core, held = self.core, self.machine.core.holding
        committed = held is not None and held.fact is not None and held.moves(core.now)
        if held is not None and (committed or self._is_decided_soon()):
            core.arm(Timer.ASK, core.now + core.deadlines.answer(held.ballot.leader))
            return  # the leader decides, or the ballot is committed and the rest of its result is coming
        mine, best = self._winner()
        others = self._unasked(best) if held is not None and best.epoch > mine.epoch else ()
        if others:
            self._ask_first(others, None)
        else:
            self._give_up()

    def _is_decided_soon(self) -> bool:
        """The whole result is here, as the leader was told, and that leader's word is waited for: it may have
        committed the ballot already, whatever somebody outside of the round knows.
        """
        held = self.core.holding
        if held is None or held.stage is not Stage.DONE:
            return False
        leader = held.ballot.leader
        return self.machine.member.authority() == leader and self.machine.succession.usable(leader)

    def on_unknown(self, peer: PeerId, message: Unknown) -> None:
        held = self.machine.core.holding
        if held is None or held.ballot != message.ballot:
            return
        if self._is_decided_soon() and peer != held.ballot.leader:
            return
        if message.epoch > self.core.here.standing[0]:
            self._give_up()

    def _give_up(self) -> None:
        core = self.core
        best = max(core.linked.camps(core.camp()), key=lambda camp: (camp.epoch, camp.peers, camp.total))
        if best.epoch > core.here.standing[0]:
            self.machine.abandon_round("the others went on without us")
            if core.here.joining is None and not core.here.departing:
                self._start(best, "behind the others")

    def behind(self, peer: PeerId, epoch: int) -> None:
        """A peer has committed what this one cannot commit: that peer stands at least at `epoch`."""
        facts = self.core.linked.get(peer)
        if facts is not None and facts.epoch >= epoch:
            self.consider()
        elif facts is not None:
            self.core.send(peer, self.core.progress())  # the answer tells where the peer stands

    def _donors(self, camp: Camp) -> list[PeerId]:
        """Peers that stand at (epoch, lineage), the best donors first: easily dialled, with the average
        applied, near.
        """
        rtt = self.core.deadlines.rtt
        there = self.core.linked.standing(camp.epoch, camp.lineage)
        return [
            f.peer
            for f in sorted(there, key=lambda f: (f.relayed, f.client_only, f.pending, rtt(f.peer), f.peer))
        ]

    def _start(self, camp: Camp, why: str) -> None:
        core = self.core
        self.machine.abandon_round(why)
        # Samples counted here may wait for the next round, as the samples of a late peer do, but not for
        # long. The others may have averaged what these samples were offered to: see `counts_again`.
        old = core.own.samples and camp.epoch > core.here.epoch + MOST_BEHIND
        core.here.join(camp.epoch, camp.lineage)
        core.resume()
        core.wait_at(None)
        core.deadlines.relax(1.0)  # the round in which the deadlines grew is over for this peer
        core.disarm(Timer.HEAL)
        core.trace(TraceKind.HEAL, to=camp.epoch, lineage=camp.lineage, why=why)
        results_do = core.here.role is Role.TRAINER and not (core.here.pending or old or self._counted)
        self._asked = tuple(self._donors(camp))
        core.act(StartHeal(camp.epoch, camp.lineage, self._asked, why, results_do))
        core.broadcast_progress()

    def counts_again(self, epoch: int, transfer: int) -> bool:
        """Whether samples that wait here are in this result already. Then the result is not to be applied,
        unless a state is loaded before, which drops these samples.
        """
        self._counted = self.core.own.samples > 0 and self.core.history.own(epoch, transfer) > 0
        return self._counted

    def on_healed(self, event: Healed) -> None:
        """The training thread has loaded a state."""
        core = self.core
        # Own samples in an average that is committed and not yet applied are counted on both sides.
        void = core.history.offered_since(core.here.applied_epoch)
        lost = core.history.adopt(event.history, event.dropped - void)
        if lost:
            core.act(Discarded(lost, Loss.HEALED if lost > 0 else Loss.HEALED_BACK))
        self._counted = False
        core.own.drop()
        core.own.end_wait()
        core.here.load()
        generations = core.history.generations
        self._stand(event.epoch, event.lineage, generations[-1].leader if generations else None)
        core.trace(TraceKind.HEALED, lineage=event.lineage)

    def on_followed(self, event: Followed) -> None:
        """The training thread has applied a result on top of the state."""
        core = self.core
        if (event.epoch, event.before) != (core.here.epoch, core.here.lineage):
            return
        if (
            core.here.joining is None
        ):  # the download was given up meanwhile: this peer stands where the parameters are
            self.machine.abandon_round("the parameters have gone on")
        history = core.history
        # The state is older than an average to which this peer contributed.
        if own := history.own(event.epoch, event.transfer):
            core.act(Discarded(-own, Loss.HEALED_BACK))
        total = history.total + event.samples
        history.append(
            Generation(event.epoch, event.lineage, event.transfer, event.samples, total, event.leader)
        )
        self._stand(event.epoch + 1, event.lineage, event.leader)

    def _stand(self, epoch: int, lineage: Lineage, leader: PeerId | None) -> None:
        core = self.core
        core.here.reach(epoch, lineage)
        core.follow(None)
        core.new_epoch(epoch, lineage, leader)
        self.machine.new_epoch()

    def on_level(self, event: Level) -> None:
        """State and results are in: from here on this peer takes part."""
        core = self.core
        if core.here.joining is None:
            return
        self._settles_at = None
        core.await_word({f.peer for f in core.linked.trainers() if f.epoch < core.here.epoch})
        wait = max(map(core.deadlines.answer, core.unheard), default=0.0)
        core.arm(Timer.UNHEARD, core.now + wait)
        core.here.end_joining()
        core.disarm(Timer.HEAL)
        core.trace(TraceKind.LEVEL, lineage=core.here.lineage)
        core.wait_at(0)
        self.machine.trainer.let_idle_go()
        core.broadcast_progress()

    def on_heal_failed(self, event: HealFailed) -> None:
        core = self.core
        if core.here.joining is not None:
            core.trace(TraceKind.HEAL_FAILED, why=event.why)
            self._doubt()
            core.arm(Timer.HEAL, core.now + RETRY_S)

    def _doubt(self) -> None:
        """A minority says that it is ahead of all, or of another lineage that wins, and this peer got nothing
        from any of them: go on with the others for a while.
        """
        core = self.core
        ahead = [facts.peer for facts in core.linked.trainers() if self._leads_away(facts)]
        others = sum(facts.role is not Role.WATCHER and not facts.silent for facts in core.linked)
        if 2 * len(ahead) > others:
            return
        if len(self._doubts) > MOST_DOUBTS:
            self._doubts = {peer: told for peer, told in self._doubts.items() if peer in core.linked}
        for peer in ahead:
            times = self._doubts.get(peer, (0, 0.0))[0]
            until = core.now + DOUBT_S * 2.0 ** min(times, MOST_DOUBLINGS)
            self._doubts[peer] = times + 1, until
        core.linked.doubt({*core.linked.doubted, *ahead})

    def _leads_away(self, facts: Facts) -> bool:
        """Whether the peer says that it stands where this one, which has a state, would have to go; or, for
        one that has none, where the download was to end, or further on.
        """
        here = self.core.here
        if here.role is Role.TRAINER:
            return facts.epoch > here.epoch or (facts.epoch == here.epoch and facts.lineage != here.lineage)
        assert here.joining is not None
        return facts.epoch > here.joining[0] or facts.stands_at(*here.joining)

    def on_heal_timer(self) -> None:
        """Try again, with the camp that wins now."""
        self.core.here.end_joining()
        self.consider()
        if self.core.here.joining is None:
            self._take_part()

    def _take_part(self) -> None:
        """No state comes for now: this peer counts and averages from where it stands."""
        core = self.core
        core.here.end_joining()
        core.disarm(Timer.HEAL)
        core.wait_at(0)
        if not core.own.boundary:
            # It may wait for the state all the same: who has nothing to go on from is not let go before.
            core.own.serve()
            core.act(Resume())
        core.broadcast_progress()
