"""Newcomers for which the next round waits: results come faster than their links take them, or may do so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2pavg.rounds.machine.actions import Hold, TraceKind
from p2pavg.rounds.machine.rules.camps import Facts
from p2pavg.rounds.protocol.ballot import PeerId
from p2pavg.rounds.protocol.messages import CatchUp

if TYPE_CHECKING:
    from p2pavg.rounds.machine.machine import Machine

FRESH_S = 3.0  # seconds, and two round trips, for which a newcomer's word holds; the newcomer repeats it
TOLD_S = 0.5  # seconds: a shorter wait for a newcomer is not logged
PAUSE_FACTOR = 10.0  # times the wait that a newcomer is allowed, before rounds wait for that newcomer again
MOST_HELD_S = 600.0  # seconds that rounds wait for all newcomers together, whatever these say: each second is
# given back after ten, so that newcomers never cost the others much more than a tenth of their time


@dataclass(slots=True)
class _Asked:
    message: CatchUp
    heard_at: float
    used_s: float = 0.0  # how long rounds have waited for the newcomer
    spent_at: float = 0.0  # when rounds had waited for as long as the newcomer may ask
    told: bool = False

    def spend(self, seconds: float, now: float) -> None:
        """Rounds have waited. A newcomer that used all of its time gets the time anew after ten times
        as long.
        """
        before, self.used_s = self.used_s, self.used_s + seconds
        allowed = self.message.seconds
        if before < allowed <= self.used_s:
            self.spent_at = now
        elif before >= allowed and now > self.spent_at + PAUSE_FACTOR * allowed:
            self.used_s = 0.0


class Newcomers:
    """Newcomers that ask the leader to wait: while the next round waits, their links catch up.

    Each newcomer has as many seconds, in all, as it says that it needs: one and a half times as long as the
    state takes over its link, and a little more. Anybody may say so, under any number of names, so all
    newcomers together have a limit as well.
    """

    def __init__(self, machine: Machine) -> None:
        self.core = machine.core
        self._asked: dict[PeerId, _Asked] = {}
        self._looked_at: float | None = None  # when the next round was last seen to wait
        self._left_s = MOST_HELD_S  # that rounds may wait for newcomers
        self._counted_at = self.core.now

    def new_epoch(self) -> None:
        """A round ended: no round waits."""
        self._looked_at = None

    def on_catch_up(self, peer: PeerId, message: CatchUp) -> None:
        asked = self._asked.get(peer)
        if asked is None:
            linked = self.core.linked
            self._asked = {other: said for other, said in self._asked.items() if other in linked}
            self._asked[peer] = _Asked(message, self.core.now)
        else:
            asked.message, asked.heard_at = message, self.core.now

    def allowance(self) -> float:
        """How many seconds the leader may wait for newcomers."""
        linked = self.core.linked
        wanted = sum(asked.message.seconds for peer, asked in self._asked.items() if peer in linked)
        return min(wanted, MOST_HELD_S)

    def _spend(self, seconds: float) -> float:
        """Rounds have waited so long; for how much longer they may."""
        given_back = (self.core.now - self._counted_at) / PAUSE_FACTOR
        self._left_s = min(MOST_HELD_S, self._left_s + given_back) - seconds
        self._counted_at = self.core.now
        return max(0.0, self._left_s)

    def held_until(self) -> float:
        """The next round could begin: until when it waits for newcomers, if nothing happens before; now: it
        does not
        wait."""
        core = self.core
        passed = 0.0 if self._looked_at is None else core.now - self._looked_at
        self._looked_at = None
        until, left = core.now, self._spend(passed)
        for peer, asked in list(self._asked.items()):
            facts = core.linked.get(peer)
            if facts is None:
                del self._asked[peer]
            elif self._lacks(facts, asked.message):
                asked.spend(passed, core.now)
                most = core.now + min(left, asked.message.seconds - asked.used_s)
                fresh = asked.heard_at + FRESH_S + 2 * core.deadlines.rtt(peer)
                until = max(until, min(most, fresh))
                if asked.used_s >= TOLD_S:
                    self._tell(peer, asked)
        if until > core.now:
            self._looked_at = core.now
        return until

    def _lacks(self, facts: Facts, asked: CatchUp) -> bool:
        if facts.silent or not facts.joining:
            return False
        return asked.seconds > 0 and (not asked.spare or self.core.here.epoch - asked.epoch > asked.spare)

    def _tell(self, peer: PeerId, asked: _Asked) -> None:
        if not asked.told and asked.message.link_bps > 0:
            asked.told = True
            self.core.act(Hold(peer, asked.message))
            self.core.trace(TraceKind.HELD, peer=peer)
