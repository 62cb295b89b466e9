"""Host names that peers announce, and addresses inside of a home."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from p2pavg.membership.names import AGAIN_SECONDS, KEEP_SECONDS, Names, in_turn
from p2pavg.membership.table.address import Address, behind_one_router

OUT, PORT = "203.0.113.9", 31330


class Resolver:
    """A name's addresses, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.found = asyncio.Event()
        self.now = 100.0
        monkeypatch.setattr(socket, "getaddrinfo", self.answer)
        self.names = Names(lambda: self.now, self.found.set)

    def answer(self, host: str, *_: Any, **__: Any) -> list[Any]:
        self.asked += 1
        return [(0, socket.SOCK_DGRAM, 0, "", (answer, 0)) for answer in self.answers.pop(0).split()]

    async def known(self) -> Sequence[str]:
        await asyncio.wait_for(self.found.wait(), 5)
        self.found.clear()
        return self.names.numeric("home.example")


async def test_a_name_that_leads_nowhere_is_looked_up_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a dial in vain, not more often than every few seconds, and long before it would be forgotten."""
    resolver = Resolver(monkeypatch, "198.51.100.1", "198.51.100.2")
    assert not resolver.names.numeric("home.example")
    assert await resolver.known() == ["198.51.100.1"]
    resolver.names.doubt("home.example")
    assert resolver.asked == 1
    resolver.now += AGAIN_SECONDS
    assert AGAIN_SECONDS < KEEP_SECONDS
    resolver.names.doubt("home.example")
    resolver.names.doubt("home.example")
    assert resolver.names.numeric("home.example")  # the old one, until the new one is here
    assert await resolver.known() == ["198.51.100.2"]
    assert resolver.asked == 2
    resolver.names.doubt("another.example")
    resolver.names.doubt("198.51.100.7")
    assert resolver.asked == 2


async def test_a_name_leads_to_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both families in turn, as the system orders them, and a few at most: either may lead nowhere. What
    holds on one machine or link alone is none of another machine's.
    """
    resolver = Resolver(
        monkeypatch, "::1 fe80::5 2001:db8::5 2001:db8::6 2001:db8::7 127.0.0.1 203.0.113.5 203.0.113.5"
    )
    resolver.names.numeric("home.example")
    assert await resolver.known() == ["2001:db8::5", "203.0.113.5", "2001:db8::6", "2001:db8::7"]
    assert resolver.names.numeric("203.0.113.7") == ["203.0.113.7"]
    assert in_turn(["::1", "127.0.0.1", "fe80::5"]) == ["::1", "127.0.0.1"]  # localhost
    assert in_turn(["0.0.0.0", "::", "224.0.0.1", "203.0.113.5"]) == ["203.0.113.5"]
    assert in_turn([]) == []


@pytest.mark.parametrize(
    ("theirs", "own", "near"),
    [
        (
            [(OUT, 4242), (OUT, PORT), ("192.168.1.5", PORT)],
            [(OUT, 1), ("192.168.1.6", PORT)],
            ["192.168.1.5"],
        ),
        ([(OUT, 4242), ("192.168.1.5", PORT)], [("192.168.1.6", PORT), (OUT, 1)], ["192.168.1.5"]),
        ([("192.168.1.5", PORT), (OUT, 4242)], [(OUT, 1), ("192.168.1.6", PORT)], ["192.168.1.5"]),
        ([(OUT, 4242), ("192.168.1.5", PORT)], [("198.51.100.4", 1)], []),  # another home
        (
            [(OUT, 4242), ("192.168.1.5", PORT)],
            [("198.51.100.4", 1), ("192.168.1.5", PORT)],
            [],
        ),  # numbered alike
        ([(OUT, 4242), ("198.51.100.9", PORT)], [(OUT, 1)], []),  # announced, and no home's
        ([(OUT, 4242), ("fd00::5", PORT)], [(OUT, 1)], []),
        ([], [(OUT, 1)], []),
        ([(OUT, 4242), ("192.168.1.5", PORT)], [], []),
    ],
)
def test_peers_behind_one_router_know_each_other_inside(
    theirs: list[Address], own: list[Address], near: list[str]
) -> None:
    """Who is seen at this peer's own outside address is dialled at its address inside."""
    assert [host for host, _ in behind_one_router(theirs, own)] == near
