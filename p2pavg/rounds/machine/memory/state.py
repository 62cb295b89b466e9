"""The state that a member is in, as one name made of what it knows; `docs/rounds.md` draws the states."""

from __future__ import annotations

from enum import StrEnum

from p2pavg.rounds.machine.memory.holding import Holding
from p2pavg.rounds.machine.memory.standing import Standing
from p2pavg.rounds.protocol.ballot import Stage
from p2pavg.rounds.protocol.roles import Role


class MemberState(StrEnum):
    """A member's state, from the target of one epoch to the next."""

    JOINING = "joining"  # has no state of the run, or downloads another state; member of no round
    COUNTING = "counting"  # accumulates samples; holds no ballot
    PROMISED = "promised"  # holds a ballot that has not begun
    AVERAGING = "averaging"  # the ballot has begun: gradients flow
    DENIED = "denied"  # told a successor that it is not DONE, and will not become so
    DONE = "done"  # holds the whole result, and waits for the outcome
    APPLYING = "applying"  # the result is committed, and waits for the training thread


def state_of(here: Standing, holding: Holding | None) -> MemberState:
    """The state of a member that stands at `here` and holds this ballot; None: no ballot."""
    if here.joining is not None or here.role is not Role.TRAINER:
        return MemberState.JOINING
    if holding is None:
        return MemberState.APPLYING if here.pending else MemberState.COUNTING
    if holding.stage is Stage.DONE:
        return MemberState.DONE
    if holding.frozen:
        return MemberState.DENIED
    return MemberState.AVERAGING if holding.begun else MemberState.PROMISED
