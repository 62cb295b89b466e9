"""What strangers may hold at a node is counted to their networks: connections of the table, dials back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from p2pavg.membership.table import dialling_back
from p2pavg.membership.table.carrying import streams
from p2pavg.membership.table.carrying.shares import Shares
from p2pavg.membership.table.dialling_back import DialBack

MEMBER, HOSTILE = "192.0.2.7", "198.51.100.66"


def take(shares: Shares[int], host: str, number: int) -> int | None:
    """What somebody at `host` holds one more for goes, the one held longest."""
    goes = min(shares.crowd(host), default=None)
    if goes is not None:
        shares.remove(goes)
    shares.add(number, host)
    return goes


@pytest.mark.parametrize("hosts", ["198.51.100.%d", "2001:db8:0:%x::1"])
def test_a_network_takes_only_its_share(hosts: str) -> None:
    """However many addresses one network has, and however many connections each: members that came before
    keep theirs, and whoever comes later gets in.
    """
    shares = Shares[int](most=1024, of_network=256, of_source=64)
    assert take(shares, MEMBER, 0) is None
    for number in range(1, 5000):
        take(shares, hosts % (number % 250 + 1), number)
    assert len(shares) == 257
    assert take(shares, "203.0.113.9", 6000) is None
    assert not take(shares, MEMBER, 6001)


def test_many_networks_that_fill_it_lose_their_own() -> None:
    """Sixteen networks of 64 connections each leave no room: for a member's, one of theirs goes."""
    shares = Shares[int](most=1024, of_network=256, of_source=64)
    assert take(shares, MEMBER, 0) is None
    for number in range(1, 5000):
        take(shares, f"{100 + number % 16}.51.100.{number // 16 % 4}", number)
    assert len(shares) == 1024
    for number in range(5000, 5040):
        assert take(shares, f"203.0.113.{number % 3}", number) not in range(5000, 5040)
        assert len(shares) == 1024
    assert 0 in shares._homes


def test_own_machines_share_with_all_others_alone() -> None:
    """Peers of one private network may have all there is."""
    shares = Shares[int](most=1024, of_network=256, of_source=64)
    assert not any(take(shares, "10.0.0.5", number) for number in range(1024))
    assert take(shares, "10.0.0.5", 1024) is not None


def test_what_is_free_again_leaves_nothing_behind() -> None:
    """Removed twice, or never added, it makes no difference."""
    shares = Shares[int](most=4, of_network=2, of_source=1)
    shares.add(1, MEMBER)
    for _ in range(2):
        shares.remove(1)
    shares.remove(2)
    assert len(shares) == 0
    assert not shares._networks


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def dials(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[DialBack, Clock]]:
    """A node that dials back, and reaches nobody within the test."""

    async def connect(host: str, port: int) -> bool:
        await asyncio.Event().wait()
        return False

    clock = Clock()
    back = DialBack(connect, clock)
    yield back, clock
    back.close()


async def test_who_drops_packets_holds_two_dials_back(dials: tuple[DialBack, Clock]) -> None:
    """A stranger that asks to be dialled at ever new ports, where nothing answers, leaves room for others; so
    does one with a whole network.
    """
    back, _ = dials
    asked = [back.dial(HOSTILE, port) for port in range(1, 200)]
    assert asked.count(DialBack.PENDING) == dialling_back.MOST_OF_SOURCE
    assert back.dial(MEMBER, 31330) == DialBack.PENDING
    asked += [back.dial(f"198.51.100.{n}", port) for n in range(100, 200) for port in range(1, 5)]
    assert asked.count(DialBack.PENDING) == dialling_back.MOST_OF_NETWORK
    assert back.dial("203.0.113.9", 31330) == DialBack.PENDING


async def test_dials_back_have_a_rate() -> None:
    """A stranger whose ports all answer at once, a few a second: what others asked is remembered."""

    async def connect(host: str, port: int) -> bool:
        return True

    clock = Clock()
    back = DialBack(connect, clock)
    back.dial(MEMBER, 31330)
    dialled = 0
    for port in range(1, 3000):
        clock.now += 0.001
        dialled += back.dial(HOSTILE, port) == DialBack.PENDING
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert dialled <= dialling_back.DIALS_AT_ONCE + 3 * dialling_back.DIALS_PER_S + 1
    assert back.dial(MEMBER, 31330) == DialBack.REACHED
    back.close()


async def test_a_network_opens_and_sends_four_times_as_much_as_a_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond, no more connections of the table are taken from it, and those that it has are read more slowly;
    another network is not touched.
    """
    table = streams.Streams(lambda *_: None, 0)
    now = time.monotonic()
    monkeypatch.setattr(table, "_loop", type("Loop", (), {"time": staticmethod(lambda: now)}))
    taken = sum(table._admits(f"198.51.100.{n % 250}") for n in range(5000))
    assert taken == streams.OF_NETWORK * streams.OPENED_AT_ONCE
    assert table._admits(MEMBER)
    pauses = [table._pause_s(f"198.51.100.{n % 250}", 100) for n in range(100)]
    assert pauses[0] == 0.0
    assert pauses[-1] > 0.0
    assert table._pause_s(MEMBER, 100) == 0.0
    monkeypatch.undo()
    table.close()
