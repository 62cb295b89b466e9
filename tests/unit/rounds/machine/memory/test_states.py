"""The drawing of a member's states shows what members do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.machine.member import Member
from p2pavg.rounds.machine.memory.state import MemberState
from pages.states import MEANINGS, TURNS
from tests.simulation.schedule import Schedule

RARE = {
    (MemberState.PROMISED, MemberState.APPLYING),
    (MemberState.APPLYING, MemberState.PROMISED),
    (MemberState.APPLYING, MemberState.JOINING),
}
SEEDS = range(60)


class Watched:
    """Notes each change of a machine's state, from one look at it to the next."""

    def __init__(self) -> None:
        self.turns: set[tuple[MemberState, MemberState]] = set()
        self._last: dict[int, tuple[Machine, MemberState]] = {}  # the machine, so that its id stays its own

    def look(self, machine: Machine) -> None:
        state = machine.state
        _, before = self._last.get(id(machine), (machine, state))
        self._last[id(machine)] = machine, state
        if before is not state:
            self.turns.add((before, state))

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def watched(part: Any, *given: Any, **named: Any) -> Any:
            machine = part if isinstance(part, Machine) else part.machine
            self.look(machine)
            answer = method(part, *given, **named)
            self.look(machine)
            return answer

        return watched


def test_simulated_members_do_what_the_drawing_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """No change of state is missing in the drawing, and none but rare ones is drawn that does not happen."""
    watched = Watched()
    for owner, name in (
        *((Machine, name) for name in ("handle", "_receive")),
        *((Member, name) for name in ("drop", "consider", "freeze", "on_job_done")),
    ):
        monkeypatch.setattr(owner, name, watched.around(getattr(owner, name)))
    for seed in SEEDS:
        assert Schedule(seed).run().broken is None
    assert watched.turns <= TURNS.keys()
    assert watched.turns >= TURNS.keys() - RARE


def test_each_state_has_its_words() -> None:
    """Nothing is left out of the drawing."""
    assert MEANINGS.keys() == set(MemberState)
