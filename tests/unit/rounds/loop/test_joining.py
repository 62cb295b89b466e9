from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from p2pavg.codecs import get
from p2pavg.rounds.loop.backlog import Backlog
from p2pavg.rounds.loop.deliveries import Deliveries
from p2pavg.rounds.loop.driver import Driver
from p2pavg.rounds.loop.joining import Joining
from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.protocol.roles import Generation
from p2pavg.rounds.state.downloader import Offers
from p2pavg.rounds.state.trust.record import Record
from p2pavg.rounds.training import State
from tests.unit.rounds.loop.test_deliveries import HERE, arrive

THERE = b"t" * 32
HISTORY = tuple(Generation(epoch, bytes([epoch]) * 32, 7, 16, 16 * epoch, b"l" * 20) for epoch in range(8))


class Downloads:
    """Two downloads: the first one's state comes, the second one's never does."""

    def __init__(self) -> None:
        self.asked = {b"d"}
        self.record = Record()
        self.begun = 0
        self.second = asyncio.Event()

    async def offers(self, *_: Any) -> Offers:
        manifest: Any = SimpleNamespace(epoch=8, lineage=THERE, total_bytes=100)
        return Offers((), {b"d": manifest}, {}, 0.5, {})

    def chosen(self, offers: Offers) -> Any:
        self.begun += 1
        return offers.manifests[b"d"], HISTORY if self.begun == 1 else ()

    async def fetch(self, *_: Any) -> State:
        if self.begun > 1:
            self.second.set()
            await asyncio.Event().wait()
        return State(8, THERE, {})


def joining(downloads: Any, session: Any, deliveries: Any, deliver: Any, feed: Any) -> Joining:
    """To the epoch 8, whose state "d" has."""
    engine: Any = SimpleNamespace(traffic=lambda link: (0, 0))
    action: Any = act.StartHeal(8, THERE, (b"d",), "behind the others", False)
    links: Mapping[bytes, Any] = {}
    others: Any = SimpleNamespace(has_reached=lambda *_: False, alone=False, level=False)
    nothing: Any = SimpleNamespace()
    return Joining(
        action,
        engine,
        nothing,
        downloads,
        links,
        others,
        session,
        deliveries,
        4,
        get("none"),
        deliver,
        feed,
    )


async def test_only_those_that_were_asked_tell_of_results() -> None:
    """Any peer with a link may say that it keeps a result: the word of one that is no donor is nothing."""
    session: Any = SimpleNamespace(standing=(4, HERE), next_standing=(4, HERE))
    one = joining(Downloads(), session, Deliveries(session, Backlog()), None, None)
    told: list[bytes] = []
    one.following.told = lambda donor, message: told.append(donor)  # type: ignore[method-assign]
    one.told(b"x", {})
    one.told(b"d", {})
    assert told == [b"d"]


async def test_donors_that_told_of_fewer_results_than_they_offered_are_remembered() -> None:
    """They stand in for others no longer."""
    session: Any = SimpleNamespace(standing=(4, HERE), next_standing=(4, HERE))
    downloads: Any = Downloads()
    one = joining(downloads, session, Deliveries(session, Backlog()), None, None)
    one._promised = {b"d": 2, b"l": 1}
    one.following.tellings[b"d"] = 2
    one._note_promises()
    now = time.monotonic()
    assert [downloads.record.doubts(donor, now) for donor in (b"d", b"l")] == [0, 1]


async def test_a_state_keeps_its_history_when_another_download_begins() -> None:
    """While the training thread loads a state, the peer turns to another one: the machine is told the history
    of the state that was loaded, by which it knows which samples of its own are in it.
    """
    session: Any = SimpleNamespace(standing=(4, HERE), next_standing=(4, HERE))
    deliveries = Deliveries(session, Backlog())
    there = asyncio.Event()
    fed: list[Any] = []

    def join() -> asyncio.Task[None]:
        deliveries.begin_download()
        made = joining(downloads, session, deliveries, there.set, fed.append)
        return asyncio.get_running_loop().create_task(made.run())

    downloads = Downloads()
    first = join()
    async with asyncio.timeout(10):
        await there.wait()
    answer = arrive(deliveries)
    assert deliveries.give()
    assert answer.done()
    first.cancel()
    second = join()
    async with asyncio.timeout(10):
        await downloads.second.wait()

    fed.clear()
    driver: Any = SimpleNamespace(
        _closed=False,
        _deliveries=deliveries,
        _dropped=0,
        _jobs=SimpleNamespace(healed=lambda: None),
        _peer=SimpleNamespace(standing_changed=lambda: None),
        recorder=SimpleNamespace(healed=lambda now: None),
        progress=lambda: None,
        feed=fed.append,
    )
    Driver.applied(driver, 0.1, {}, None, Future())
    assert [event.history for event in fed] == [HISTORY]
    second.cancel()
