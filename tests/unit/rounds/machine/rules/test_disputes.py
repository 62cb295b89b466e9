"""A member that gives the other region another mean, or another result, than its own region has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from p2pavg.allreduce.levels import Swaps, sized, trees
from p2pavg.plan import Plan
from p2pavg.rounds.protocol.ballot import PeerId
from tests.simulation import process
from tests.simulation.byzantine import Liar, Told
from tests.simulation.jobs import Job, Value

Lies = Callable[[Job, int, int], bool]  # whether it lies to this rank about this part


def to_all(job: Job, rank: int, part: int) -> bool:
    return True


def to_one(job: Job, rank: int, part: int) -> bool:
    """To one member of the other region, always the same one."""
    return job.members[rank] == min(other for other in job.members if _apart(job, other))


def to_each_in_turn(job: Job, rank: int, part: int) -> bool:
    others = sorted(other for other in job.members if _apart(job, other))
    return job.members[rank] == others[job.ballot.epoch % len(others)]


def _apart(job: Job, peer: PeerId) -> bool:
    groups = job.plan.groups
    return bool(groups) and groups[job.members.index(peer)] != groups[job.rank]


def play(monkeypatch: pytest.MonkeyPatch, seed: int, swaps: Swaps, lies: Lies, here: int) -> Told:
    """Five peers, `here` of them in the liar's region."""
    region: dict[PeerId, int] = {}

    def plan(members: Any) -> Plan:
        owners = [rank for rank, member in enumerate(members) if member.voter and member.owns]
        empty = trees([region[member.peer] for member in members], owners, None, swaps)
        return process.flat(members) if empty is None else sized(empty, 1024 * len(empty.parts), None)[0]

    send = Job._send

    def told(job: Job, rank: int, kind: str, part: int, value: Any) -> None:
        lied = job.node is run.liar and lies(job, rank, part)
        if lied and kind == "contribution" and rank == job.partners[part]:
            value = tuple((rank, what, 2 * weight) for rank, what, weight in value)
        elif lied and kind == "result" and rank in job.plan.parts[part].deputies:
            value = Value((*value, "lie"))
        send(job, rank, kind, part, value)

    with monkeypatch.context() as patched:
        patched.setattr(process, "plan", plan)
        patched.setattr(Job, "_send", told)
        run = Liar(None, seed)
        beside = [node.me for node in run.honest]
        region |= {run.liar.me: 0} | {peer: int(at >= here - 1) for at, peer in enumerate(beside)}
        return run.run(6.0)


@pytest.mark.parametrize("swaps", [Swaps.ALL, Swaps.NOBODY], ids=["swapped", "passed on"])
@pytest.mark.parametrize("lies", [to_all, to_one, to_each_in_turn])
@pytest.mark.parametrize("here", [2, 3])
def test_who_tells_two_regions_two_things_costs_no_honest_one_its_place(
    lies: Lies, swaps: Swaps, here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever region is larger, nobody honest is left out, and averages go on. One that lies to
    several at once is left out; one that lies to one is not told apart from that one, and as neither owns
    parts any more, it has nothing left to lie about.
    """
    told = play(monkeypatch, here, swaps, lies, here)
    assert told.excluded == {}
    assert told.epochs >= 8
    assert (told.liar > 0) == (lies is to_all)
