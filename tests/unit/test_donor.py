from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from p2pavg.errors import ConfigurationError, StateError
from p2pavg.rounds.donor import Donor
from p2pavg.rounds.state import CHUNK_BYTES
from p2pavg.rounds.training import Section
from p2pavg.settings import check_rate


class Engine:
    """Hands every chunk to the kernel at once, and says so a little later."""

    donor: Donor

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []
        self.at: list[float] = []
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


def donor(engine: Engine, upload_bps: float | None) -> Donor:
    engine.donor = Donor(
        engine,  # type: ignore[arg-type]
        Source(),
        Live(),
        lambda data: b"signed",
        ThreadPoolExecutor(1),
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


@pytest.mark.parametrize("value", [0, -1, 0.5, True, "10", float("inf"), float("nan")])
def test_caps_that_make_no_sense_are_refused(value: Any) -> None:
    """A cap is a finite number of Mb/s from 1 on, or None."""
    check_rate("max_upload_mbps", None)
    check_rate("max_upload_mbps", 1)
    with pytest.raises(ConfigurationError, match="max_upload_mbps"):
        check_rate("max_upload_mbps", value)
