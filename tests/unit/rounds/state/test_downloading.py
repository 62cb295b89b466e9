"""What a newcomer takes of donors that lie: no chunk that does not fit its hash, no size beyond the bound."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from p2pavg.errors import StateError
from p2pavg.rounds.state import manifest as state
from p2pavg.rounds.state.downloader import Downloader, Offers
from p2pavg.rounds.state.inbox import Inbox
from p2pavg.rounds.state.manifest import MAX_STATE_BYTES, Manifest
from p2pavg.rounds.training import Section
from tests.unit.rounds.state.packed import packed

LINEAGE = b"l" * 32
TRUE, LIAR = b"t" * 20, b"l" * 20


class Donors:
    """An engine, and links to donors of which one sends other bytes than its manifest says."""

    def __init__(self, blob: Any, size: int, *names: bytes) -> None:
        self._blob, self._size = blob, size
        self._buffers: dict[int, memoryview] = {}
        self.asked: set[bytes] = set()
        self.inbox = Inbox(self)  # type: ignore[arg-type]
        self.links: dict[bytes, Any] = {
            name: SimpleNamespace(
                id=number, rtt_min=0.0, request=lambda m, timeout, n=name: self._request(n, m)
            )
            for number, name in enumerate(names)
        }

    def open_blob(self, transfer: int, buffer: memoryview, chunk_bytes: int) -> None:
        self._buffers[transfer] = buffer

    def cancel(self, transfer: int) -> None:
        del self._buffers[transfer]

    def traffic(self, link: int) -> tuple[int, int]:
        return 0, 0

    def streams(self, link: int) -> tuple[int, ...]:
        return (0,)

    async def _request(self, donor: bytes, message: Any) -> dict[str, Any]:
        self.asked.add(donor)
        buffer = self._buffers.get(message["transfer"])
        for chunk in message["chunks"] if buffer is not None else ():
            piece = bytearray(self._blob[chunk * self._size : (chunk + 1) * self._size])
            piece[-1] ^= donor == LIAR
            buffer[chunk * self._size : chunk * self._size + len(piece)] = piece
            self.inbox.chunk(message["transfer"], chunk)
        return {"t": "ok"}


@pytest.mark.parametrize("names", [(TRUE, LIAR), (LIAR,)])
async def test_each_chunk_of_a_state_is_hashed_as_it_comes(names: tuple[bytes, ...]) -> None:
    """A donor whose chunks do not fit their hashes is asked no more, and nothing of it is in the state."""
    parameters = np.random.default_rng(1).integers(0, 256, 4 << 20, np.uint8)
    meta_bytes, blob = packed(({"at": 7}, {"p": Section.of(parameters)}))
    manifest = state.describe(1, LINEAGE, meta_bytes, blob)
    donors = Donors(blob, manifest.chunk_bytes, *names)
    downloader = Downloader(donors, donors.inbox, 4)  # type: ignore[arg-type]
    offers = Offers(names, dict.fromkeys(names, manifest), {}, 0.0)
    async with asyncio.timeout(20):
        if TRUE in names:
            got = await downloader.fetch(manifest, offers, donors.links)
            assert np.array_equal(got.buffers["p"], parameters)
            assert donors.asked == set(names)
        else:
            with pytest.raises(StateError, match="gone"):
                await downloader.fetch(manifest, offers, donors.links)


def test_a_state_beyond_the_bound_is_refused() -> None:
    """256 GiB may be promised, and no byte more: nothing is allocated for it."""

    def promised(total: int) -> dict[str, Any]:
        chunks = Manifest(1, LINEAGE, 0, total, b"").chunks
        return Manifest(1, LINEAGE, 0, total, bytes(state.HASH_BYTES * chunks)).to_message()

    Manifest.from_message(promised(MAX_STATE_BYTES))
    with pytest.raises(StateError, match="wrongly"):
        Manifest.from_message(promised(MAX_STATE_BYTES + 1))
