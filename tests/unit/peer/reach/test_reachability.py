"""Whether others reach a peer: found out at the start, and anew when its gateway gives or takes a port."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from p2pavg.membership.table import dialling_back
from p2pavg.membership.table.address import Address
from p2pavg.peer.reach.reachability import OwnAddresses
from p2pavg.peer.settings import Settings

OUTSIDE = ("203.0.113.9", 4242)


class Table:
    """Others reach this peer at a mapped port alone."""

    def __init__(self) -> None:
        self.mapped: Address | None = None
        self.listens = True
        self.asked = 0

    async def check_reachability(self) -> dialling_back.Reachability:
        self.asked += 1
        return dialling_back.Reachability(self.mapped is not None, "203.0.113.9", "nobody gets through")

    def become_client_only(self) -> None:
        self.listens = False

    def become_reachable(self, port: int) -> None:
        self.listens = port == 31330

    def external_addresses(self) -> list[Address]:
        return [self.mapped or ("10.0.0.2", 31330)]


def peer(**options: Any) -> tuple[OwnAddresses, Table, dict[str, Any], list[bool]]:
    table, hello, told = Table(), {"client_only": False}, []
    endpoint: Any = SimpleNamespace(port=31330, hello=hello)
    settings = Settings("run", listen="127.0.0.1:0", **options)
    reachability = OwnAddresses(settings, endpoint, table, lambda: told.append(hello["client_only"]))  # type: ignore[arg-type]
    return reachability, table, hello, told


async def settle(reachability: OwnAddresses) -> None:
    assert reachability._looking is not None
    await asyncio.wait_for(reachability._looking, 5)


async def test_a_late_mapping_ends_client_only(caplog: pytest.LogCaptureFixture) -> None:
    """A gateway that answers after a newcomer stopped waiting: others try the port, and all is announced."""
    reachability, table, hello, told = peer()
    await reachability.learn()
    assert (reachability.client_only, hello["client_only"], table.listens) == (True, True, False)
    assert "nobody gets through" in caplog.text
    reachability._mapped(OUTSIDE)
    await settle(reachability)
    assert (reachability.client_only, hello["client_only"], table.listens) == (False, False, True)
    assert reachability.addresses() == [OUTSIDE]
    assert told == [True, False]


async def test_a_mapping_that_is_lost_makes_a_peer_client_only() -> None:
    """Nobody is told of a port that leads nowhere any more."""
    reachability, table, hello, told = peer()
    table.mapped = OUTSIDE
    await reachability.learn()
    assert not reachability.client_only
    reachability._mapped(None)
    await settle(reachability)
    assert (reachability.client_only, hello["client_only"], told) == (True, True, [True])


@pytest.mark.parametrize("options", [{"client_only": True}, {"announce": "host.example:5"}])
async def test_what_the_user_says_stands(options: dict[str, Any]) -> None:
    """Nobody is asked, whatever a gateway does."""
    reachability, table, _, told = peer(**options)
    before = reachability.client_only
    await reachability.learn()
    reachability._mapped(OUTSIDE)
    assert (reachability.client_only, table.asked, told) == (before, 0, [])
