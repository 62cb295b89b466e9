from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest

from p2pavg.errors import ConfigurationError, StateError
from p2pavg.peer.settings import check_rate
from p2pavg.rounds.state import donor as donor_module
from p2pavg.rounds.state.donor import HELD_S, Donor
from p2pavg.rounds.state.manifest import CHUNK_BYTES
from p2pavg.rounds.training import Section


class Engine:
    """Hands every chunk to the kernel at once, and says so a little later."""

    donor: Donor

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []
        self.at: list[float] = []
        self.moving = False  # gradients flow
        self.goal = 0
        self.reached = asyncio.Event()

    def send_blob(self, link: int, transfer: int, chunk: int, data: memoryview) -> None:
        self.sent.append((link, chunk))
        self.at.append(time.monotonic())
        if len(self.sent) == self.goal:
            self.reached.set()
        asyncio.get_running_loop().call_soon(self.donor.sent, link, transfer)


class Source:
    def snapshot(self) -> Any:
        return {}, {"values": Section.of(np.zeros(12 * CHUNK_BYTES - 100, np.uint8))}

    def load(self, meta: Any, buffers: Any) -> None:
        raise AssertionError


class Live:
    standing = (3, b"l" * 32)

    @contextmanager
    def reading(self) -> Iterator[Callable[[], bool]]:
        yield lambda: True


class Later(Live):
    standing = (4, b"m" * 32)


def donor(engine: Engine, upload_bps: float | None) -> Donor:
    engine.donor = Donor(
        engine,  # type: ignore[arg-type]
        Source(),
        Live(),
        lambda data: b"signed",
        ThreadPoolExecutor(1),
        lambda: engine.moving,
        upload_bps=upload_bps,
    )
    return engine.donor


async def serve(engine: Engine, newcomers: int) -> None:
    """All newcomers ask for all chunks, until everything is sent."""
    engine.goal = newcomers * 12
    for link in range(newcomers):
        manifest = await engine.donor.manifest(link, 0)
        assert manifest is not None
        chunks = list(range(manifest.chunks))
        engine.donor.send(link, {"root": manifest.root, "transfer": link, "chunks": chunks})
    await asyncio.wait_for(engine.reached.wait(), 20)


async def test_a_cap_holds_for_all_newcomers_together() -> None:
    """At 400 Mb/s two downloads of 12 MiB take 24 MiB / 50 MB/s, and neither waits for the other's end."""
    engine = Engine()
    donor(engine, 400e6)
    began = time.monotonic()
    await serve(engine, 2)
    assert engine.at[-1] - began >= 0.95 * 23 * CHUNK_BYTES / 50e6
    halfway = {link for link, _ in engine.sent[:12]}
    assert halfway == {0, 1}


async def test_without_a_cap_nothing_waits() -> None:
    """No cap: the chunks go out as fast as the engine takes them, each once."""
    engine = Engine()
    donor(engine, None)
    await serve(engine, 2)
    assert sorted(engine.sent) == [(link, chunk) for link in range(2) for chunk in range(12)]


async def test_state_waits_for_gradients_but_not_for_ever() -> None:
    """While a round's gradients are on their way nothing of the state goes out, for a quarter of a second."""
    engine = Engine()
    donor(engine, None)
    engine.moving = True
    began = time.monotonic()
    await serve(engine, 1)
    assert engine.at[0] - began >= HELD_S
    assert engine.at[-1] - engine.at[0] < HELD_S


async def test_state_goes_on_when_gradients_are_through() -> None:
    """The end of a round's transfer lets the state go on, and the next one holds it up again."""
    engine = Engine()
    donor(engine, None)
    loop = asyncio.get_running_loop()
    began = time.monotonic()
    engine.moving = True
    loop.call_later(0.05, setattr, engine, "moving", False)
    await serve(engine, 1)
    assert 0.05 <= engine.at[0] - began < HELD_S
    engine.moving = True
    engine.sent.clear()
    engine.reached.clear()
    began = time.monotonic()
    await serve(engine, 1)
    assert engine.at[12] - began >= HELD_S


async def test_chunks_of_another_snapshot_are_refused() -> None:
    """Who asks for a snapshot that is gone, or for a chunk that it does not have, gets StateError."""
    engine = Engine()
    served = donor(engine, None)
    manifest = await served.manifest(0, 0)
    assert manifest is not None
    for request in (
        {"root": b"other", "transfer": 1, "chunks": [0]},
        {"root": manifest.root, "transfer": 1, "chunks": [manifest.chunks]},
        {"root": manifest.root, "transfer": -1, "chunks": [0]},
        {"root": manifest.root, "transfer": 1, "chunks": "abc"},
    ):
        with pytest.raises(StateError):
            served.send(0, request)
    assert engine.sent == []


@pytest.mark.parametrize("limited", [False, True])
async def test_chunks_without_end(limited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer may ask for each chunk a few times; who asks on is refused, else all of it is queued."""
    engine = Engine()
    served = donor(engine, None)
    manifest = await served.manifest(0, 0)
    assert manifest is not None
    monkeypatch.setattr(
        engine.donor, "sent", lambda link, transfer: None
    )  # it does not read what it asks for
    if not limited:
        monkeypatch.setattr(donor_module, "MOST_TIMES", 1 << 40)
    request = {"root": manifest.root, "transfer": 1, "chunks": list(range(manifest.chunks))}
    accepted = 0
    for _ in range(1000):
        with suppress(StateError):
            served.send(0, request)
            accepted += 1
    assert accepted == (4 if limited else 1000)
    assert len(served._downloads[0].left) == accepted * manifest.chunks - donor_module.QUEUED_CHUNKS


@pytest.mark.parametrize("limited", [False, True])
async def test_a_newcomer_that_does_not_read(limited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes nothing of what it asked for cannot keep others from a later snapshot."""
    engine = Engine()
    served = donor(engine, None)
    manifest = await served.manifest(0, 0)
    assert manifest is not None
    monkeypatch.setattr(engine.donor, "sent", lambda link, transfer: None)
    served.send(0, {"root": manifest.root, "transfer": 1, "chunks": [0, 1]})
    monkeypatch.setattr(served, "_live", Later())
    monkeypatch.setattr(donor_module, "BUSY_WAIT_S", 0.0)
    assert await served.manifest(1, 4) is None  # for a while it may be the network
    served._downloads[0].moved_at -= donor_module.STUCK_S
    if not limited:
        monkeypatch.setattr(donor_module, "STUCK_S", float("inf"))
    monkeypatch.setattr(donor_module, "BUSY_WAIT_S", 5.0 if limited else 0.0)
    assert (await served.manifest(1, 4) is not None) is limited


def test_a_newcomer_that_reads_slowly() -> None:
    """One chunk now and then keeps nobody waiting for ever; 1 Mb/s is enough to be waited for."""
    slow = donor_module._Download(began_at=0.0, moved_at=299.0, asked=12, left=deque(range(2)))
    assert slow.is_over(300.0)  # 10 chunks in five minutes
    enough = donor_module._Download(began_at=0.0, moved_at=299.0, asked=40, left=deque(range(2)))
    assert not enough.is_over(300.0)


async def test_snapshots_are_not_taken_without_a_rest() -> None:
    """Who asks for the state and drops it, again and again, does not keep this peer copying."""
    served = donor(Engine(), None)
    copied = 0.0
    truly = served._take

    def take() -> Any:
        nonlocal copied
        began = time.monotonic()
        made = truly()
        copied += time.monotonic() - began
        return made

    served._take = take  # type: ignore[method-assign]
    began = time.monotonic()
    for _ in range(5):
        assert await served.manifest(0, 0) is not None
        served.done(0)
    await served.manifest(0, 0)
    assert time.monotonic() - began >= 0.8 * (1 + donor_module.REST) * copied * 5 / 6


async def test_a_newcomer_that_begins_anew() -> None:
    """Chunks of its first transfer that are still under way do not hold up its second."""
    engine = Engine()
    served = donor(engine, None)
    manifest = await served.manifest(0, 0)
    assert manifest is not None
    chunks = list(range(manifest.chunks))
    served.send(0, {"root": manifest.root, "transfer": 1, "chunks": chunks})
    engine.goal = donor_module.QUEUED_CHUNKS + manifest.chunks
    served.send(0, {"root": manifest.root, "transfer": 2, "chunks": chunks})
    await asyncio.wait_for(engine.reached.wait(), 20)


@pytest.mark.parametrize("value", [0, -1, 0.5, True, "10", float("inf"), float("nan")])
def test_caps_that_make_no_sense_are_refused(value: Any) -> None:
    """A cap is a finite number of Mb/s from 1 on, or None."""
    check_rate("max_upload_mbps", None)
    check_rate("max_upload_mbps", 1)
    with pytest.raises(ConfigurationError, match="max_upload_mbps"):
        check_rate("max_upload_mbps", value)
