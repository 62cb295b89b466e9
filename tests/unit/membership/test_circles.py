"""Circles: each member of a large run hears of each other one in two steps, in few messages."""

from __future__ import annotations

import asyncio
import hashlib
import math

import pytest

from p2pavg.bench.dht import idle
from p2pavg.bench.dht.simulation import Network, simulate
from p2pavg.membership.circles import draw
from p2pavg.membership.roster import LARGE_VIEW
from p2pavg.membership.view import LIFETIME

MEMBERS = LARGE_VIEW + 4


@pytest.mark.parametrize("count", [2, 34, 50, 97, 100, 128])
def test_each_hears_of_each_other_in_two_steps(count: int) -> None:
    """Whoever is not told by a member itself is told by one of its circle, and nobody sends much."""
    ids = [hashlib.sha256(b"%d" % number).digest()[:20] for number in range(count)]
    circles = {own: draw(own, (other for other in ids if other != own)) for own in ids}
    for own, (mates, charges) in circles.items():
        told = {*mates, *charges, *(charge for mate in mates for charge in circles[mate].charges)}
        assert told == set(ids) - {own}
        assert own not in mates
        assert len(mates) + len(charges) <= 2 * math.sqrt(count) + 2


def test_mates_agree() -> None:
    """Two members that see the same are in each other's circle, or neither is."""
    ids = [hashlib.sha256(b"%d" % number).digest()[:20] for number in range(75)]
    circles = {own: draw(own, ids) for own in ids}
    assert all(own in circles[mate].mates for own in ids for mate in circles[own].mates)


def test_a_large_run_stays_in_view_by_few_messages() -> None:
    """While all idle, nobody's record of anybody comes near its end, in half the datagrams of beats from
    all to all. One that dies is gone everywhere a lifetime later, and nobody else.
    """

    async def work() -> tuple[float, float, set[int]]:
        network = Network(seed=3)
        run = await idle._joined(network, MEMBERS)
        loop = asyncio.get_running_loop()
        await asyncio.sleep(60.0)
        before, least = network.datagrams, LIFETIME
        for _ in range(60):
            await asyncio.sleep(0.5)
            for _, view in run:
                ends = [member.held.expires for member in view._roster.members.values()]
                least = min(least, min(ends) - loop.time())
        rate = (network.datagrams - before) / 30.0 / MEMBERS
        dead = run[7][0].external_addresses()[0]
        network.reaches = lambda source, destination: dead not in (source, destination)
        await asyncio.sleep(LIFETIME + 1.0)
        seen = {len(view.peers) for node, view in run if node is not run[7][0]}
        for node, view in run:
            view.close()
            await node.stop()
        return rate, least, seen

    async def cheaply() -> tuple[float, float, set[int]]:
        with idle._cheap_signatures():
            return await work()

    rate, least, seen = simulate(cheaply())
    beats_from_all = (MEMBERS - 1) / (0.45 * LIFETIME)
    assert rate < beats_from_all / 2
    assert least > LIFETIME / 3
    assert seen == {MEMBERS - 2}
