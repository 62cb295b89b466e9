"""Whether others reach a peer: found out at the start, and anew when its gateway gives or takes a port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from p2pavg.membership.table import dialling_back
from p2pavg.membership.table.address import Address
from p2pavg.peer.reach import reachability as reach
from p2pavg.peer.reach.reachability import OwnAddresses
from p2pavg.peer.settings import Settings

OUTSIDE = ("203.0.113.9", 4242)


class Table:
    """Others reach this peer at a mapped port alone."""

    def __init__(self) -> None:
        self.mapped: Address | None = None
        self.reached: bool | None = False  # at its own port
        self.listens = True
        self.asked = 0
        self.reviewed_times = 0
        self.on_moved: Callable[[], None] = lambda: None

    async def check_reachability(self, *, in_haste: bool = False) -> dialling_back.Reachability:
        self.asked += 1
        reached = self.reached or (self.mapped is not None) or self.reached
        return dialling_back.Reachability(reached, "203.0.113.9", "nobody gets through")

    async def reviewed(self) -> None:
        self.reviewed_times += 1
        self.on_moved()  # it found this peer elsewhere

    def review_address(self) -> None:
        pass

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


async def look(reachability: OwnAddresses, *, late: bool = False) -> None:
    """The look that is due now, or, after a while, was due later."""
    if late:
        reachability._next_look = 0.0
    reachability.beat()
    assert reachability._looking is not None
    await asyncio.wait_for(reachability._looking, 5)


async def test_a_late_mapping_ends_client_only(caplog: pytest.LogCaptureFixture) -> None:
    """A gateway that answers after a newcomer stopped waiting: others try the port, and all is announced."""
    reachability, table, hello, told = peer()
    await reachability.learn()
    assert (reachability.client_only, hello["client_only"], table.listens) == (True, True, False)
    assert "nobody gets through" in caplog.text
    reachability._mapped(OUTSIDE)
    await look(reachability)
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
    await look(reachability)
    assert (reachability.client_only, hello["client_only"], told) == (True, True, [True])


async def test_a_peer_that_moves_is_judged_anew(caplog: pytest.LogCaptureFixture) -> None:
    """Into a network that lets nothing in, and out of it: it asks where it is seen, has that tried at once,
    and says what follows; later it looks once more.
    """
    reachability, table, hello, told = peer()
    table.reached = True
    await reachability.learn()
    assert (reachability.client_only, told) == (False, [])
    for reached in (False, True):
        table.reached = reached
        reachability.moved()
        await look(reachability)
        assert (reachability.client_only, hello["client_only"], table.listens) == (not reached,) * 2 + (
            reached,
        )
    assert told == [True, False]
    assert table.reviewed_times == 2
    assert "nobody gets through" in caplog.text
    reachability.beat()
    assert table.asked == 3  # what the review found is in the look that it belongs to
    assert reachability._next_look - time.monotonic() < reach.AGAIN_S / 2


async def test_one_try_that_fails_does_not_hide_a_peer_that_stays() -> None:
    """Nothing moved: what others found counts the second time. A port that opens counts at once."""
    reachability, table, _, told = peer()
    table.reached = True
    await reachability.learn()
    table.reached = False
    await look(reachability, late=True)
    assert (reachability.client_only, told) == (False, [])
    assert reachability._next_look - time.monotonic() < reach.AGAIN_S / 2
    table.reached = True
    await look(reachability, late=True)
    table.reached = False
    for hidden in (False, True):
        await look(reachability, late=True)
        assert reachability.client_only is hidden
    table.reached = True
    await look(reachability, late=True)
    assert (reachability.client_only, told) == (False, [True, False])


async def test_who_moved_asks_until_somebody_can_tell() -> None:
    """Nobody is there after a move: asked again soon, ever more rarely; the answer counts at once."""
    reachability, table, _, _ = peer()
    table.reached = True
    await reachability.learn()
    table.reached = None
    reachability.moved()
    pauses = []
    for _ in range(3):
        await look(reachability, late=True)
        pauses.append(reachability._next_look - time.monotonic())
    assert pauses[0] < 2 * reach.FIRST_PAUSE_S
    assert pauses == sorted(pauses)
    assert not reachability.client_only
    table.reached = False
    await look(reachability, late=True)
    assert reachability.client_only


@pytest.mark.parametrize("options", [{"client_only": True}, {"announce": "203.0.113.7:5"}])
async def test_what_the_user_says_stands(options: dict[str, Any]) -> None:
    """Nobody is asked, whatever a gateway does."""
    reachability, table, _, told = peer(**options)
    before = reachability.client_only
    await reachability.learn()
    reachability._mapped(OUTSIDE)
    reachability.beat()
    assert (reachability._looking, reachability.client_only, table.asked, told) == (None, before, 0, [])


@pytest.mark.parametrize(("known", "told"), [([], 1), ([("203.0.113.7", 5)], 0)])
async def test_an_announced_name_without_an_address_is_told(
    known: list[Address], told: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is announced all the same: others may know it."""

    async def resolve(host: str, port: int) -> list[Address]:
        return known

    monkeypatch.setattr(reach, "resolve", resolve)
    reachability, *_ = peer(announce="nosuch.invalid:5")
    await reachability.learn()
    assert reachability._looking is not None
    await asyncio.wait_for(reachability._looking, 5)
    assert caplog.text.count("announce= names nosuch.invalid, which has no address") == told
    assert reachability.addresses() == (("nosuch.invalid", 5),)
