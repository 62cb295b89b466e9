"""When most members have come to one point of a round."""

from __future__ import annotations

import random

import pytest

from p2pavg.rounds.machine.memory.arrivals import Arrivals

NAMES = [bytes([name]) * 20 for name in range(9)]


@pytest.mark.parametrize("seed", range(200))
def test_most_of_the_others(seed: int) -> None:
    """It is as sorting the others' arrivals anew tells; who does not count, or comes twice, moves nothing."""
    dice = random.Random(seed)
    among = NAMES[: dice.randint(1, 7)]
    arrivals, first, now = Arrivals(among), dict[bytes, float](), 0.0
    for peer in [dice.choice(NAMES) for _ in range(dice.randint(0, 15))]:
        now += dice.choice((0.0, 1.0))
        arrivals.note(peer, now)
        first.setdefault(peer, now)
        assert arrivals[peer] == first[peer]
        for but in NAMES:
            others = [other for other in among if other != but]
            there = sorted(first[other] for other in others if other in first)
            most = len(others) // 2 + 1
            assert arrivals.most(but) == (there[most - 1] if len(there) >= most else None)
            assert (but in arrivals) == (but in first)
