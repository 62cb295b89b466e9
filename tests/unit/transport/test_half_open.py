"""Whoever fills the places of connections whose handshake is not over fills his own."""

from __future__ import annotations

import random

import pytest

from p2pavg.transport.links.half_open import MOST, MOST_SILENT, HalfOpen


def accept(places: HalfOpen[int], number: int, host: str) -> int | None:
    """One more, and the one that went for it."""
    gone = places.add(number, host)
    if gone is not None:
        places.remove(gone)
    return gone


def test_silent_ones_of_one_source_are_few() -> None:
    """The oldest silent one goes beyond the bound, and never one that has begun its handshake."""
    places = HalfOpen[int]()
    accept(places, 0, "192.0.2.1")
    places.spoke(0)
    gone = [accept(places, number, "192.0.2.1") for number in range(1, MOST_SILENT + 4)]
    assert gone == [None] * MOST_SILENT + [1, 2, 3]
    assert len(places) == 1 + MOST_SILENT


@pytest.mark.parametrize(
    "flood",
    [
        lambda number: "192.0.2.9",
        lambda number: f"192.0.2.{number % 16}",
        lambda number: f"192.0.2.{number % 256}",
        lambda number: f"192.0.{number % 3}.{number % 256}",
        lambda number: f"2001:db8:0:{number % 999:x}::1",
    ],
    ids=["one address", "16 addresses", "a network", "three networks", "many sources of an IPv6 network"],
)
@pytest.mark.parametrize("speaking", [False, True])
def test_a_flood_drives_out_itself(flood, speaking: bool) -> None:
    """Whatever comes from a few networks, connections of others stay until their handshake is over."""
    places, rng = HalfOpen[int](), random.Random(7)
    members = set()
    for number in range(2000):
        if number % 200 == 150:
            members.add(number)
            assert accept(places, number, f"198.51.100.{number // 200}") not in members
            places.spoke(number)
            continue
        gone = accept(places, number, flood(number))
        assert gone not in members
        if speaking and gone != number and rng.random() < 0.5:
            places.spoke(number)
        assert len(places) <= MOST
    for number in members:
        places.remove(number)
        places.remove(number)  # twice is as good as once
    assert len(places) <= MOST - len(members)


def test_a_neighbour_of_the_flood_stays() -> None:
    """Within one network somebody goes of the source that has most."""
    places = HalfOpen[int]()
    accept(places, -1, "127.0.0.1")
    places.spoke(-1)
    for number in range(2000):
        assert accept(places, number, f"127.0.0.{2 + number % 16}") != -1
        assert accept(places, number + 10_000, f"10.0.{number % 200}.1") != -1
