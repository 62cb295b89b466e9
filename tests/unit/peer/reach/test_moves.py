"""Links that a change of address has left behind are found at once, and no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from p2pavg.membership.table.address import interface_addresses
from p2pavg.peer.reach.moves import Moves


def test_links_from_an_address_that_is_gone_are_stranded() -> None:
    """Whatever else an interface has, or loses; an address that comes back is this machine's again."""
    here = ["10.0.0.2", "127.0.0.1"]
    moves = Moves(lambda: here)
    links: list[Any] = [SimpleNamespace(local_host=host) for host in ("10.0.0.2", "127.0.0.1", "10.0.0.3")]
    assert moves.stranded(links) == []  # the last one's address is the second one of an interface
    assert not moves.moved
    here[:] = ["127.0.0.1", "192.168.1.7"]
    assert moves.stranded(links) == links[:1]
    assert moves.moved
    assert moves.stranded(links[1:]) == []
    assert moves.left == links[:1]  # still, when their end is told later
    assert not moves.moved
    here[:] = ["127.0.0.1", "192.168.1.7", "10.8.0.2"]  # a second interface comes up
    assert moves.stranded(links[1:]) == []
    assert moves.moved
    links.append(SimpleNamespace(local_host="192.168.1.7"))
    assert moves.stranded(links) == links[:1]
    here[:] = ["10.0.0.2", "127.0.0.1"]
    assert moves.stranded(links) == links[3:]


def test_the_machine_is_asked() -> None:
    """Its interfaces do not change while a test runs."""
    links: list[Any] = [SimpleNamespace(local_host=host) for host in interface_addresses()]
    assert links
    assert Moves().stranded(links) == []
