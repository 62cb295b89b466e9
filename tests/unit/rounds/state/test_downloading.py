"""What a newcomer takes of donors that lie: no chunk that does not fit its hash, no size beyond the bound."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from p2pavg.errors import StateError
from p2pavg.rounds.state import manifest as state
from p2pavg.rounds.state.downloader import Downloader, Offers, _Partial
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
        self.frames = False
        self._given = set[tuple[int, int]]()
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

    def give(self, number: int, chunks: Any, wrong: bool) -> None:
        """Into this transfer, as whoever knows its number can, each chunk once."""
        buffer = self._buffers.get(number)
        for chunk in chunks if buffer is not None else ():
            if (number, chunk) in self._given:
                continue
            self._given.add((number, chunk))
            piece = bytearray(self._blob[chunk * self._size : (chunk + 1) * self._size])
            piece[-1] ^= wrong
            buffer[chunk * self._size : chunk * self._size + len(piece)] = piece
            self.inbox.chunk(number, chunk)

    async def _request(self, donor: bytes, message: Any) -> dict[str, Any]:
        self.asked.add(donor)
        number = message["transfer"]
        if donor == LIAR and self.frames:  # it sends what others were asked for, too, before they do
            self.give(number, range(len(self._blob) // self._size), wrong=True)
        elif LIAR in self.links and self.frames:
            await asyncio.sleep(0.05)
        self.give(number, message["chunks"], wrong=donor == LIAR)
        return {"t": "ok"}


@pytest.mark.parametrize("names", [(TRUE, LIAR), (LIAR,)])
async def test_each_chunk_of_a_state_is_hashed_as_it_comes(names: tuple[bytes, ...]) -> None:
    """A donor whose chunks do not fit their hashes is asked no more, and nothing of it is in the state."""
    parameters = np.random.default_rng(1).integers(0, 256, 4 << 20, np.uint8)
    meta_bytes, blob = packed(({"at": 7}, {"p": Section.of(parameters)}))
    manifest = state.describe(1, LINEAGE, meta_bytes, blob)
    donors = Donors(blob, manifest.chunk_bytes, *names)
    downloader = Downloader(donors, donors.inbox, 4)  # type: ignore[arg-type]
    offers = Offers(names, dict.fromkeys(names, manifest), {}, 0.0, {})
    async with asyncio.timeout(20):
        if TRUE in names:
            got = await downloader.fetch(manifest, offers, donors.links)
            assert np.array_equal(got.buffers["p"], parameters)
            assert donors.asked == set(names)
        else:
            with pytest.raises(StateError, match="gone"):
                await downloader.fetch(manifest, offers, donors.links)


def made() -> tuple[Any, Manifest, Any]:
    """Parameters, and their state."""
    parameters = np.random.default_rng(1).integers(0, 256, 4 << 20, np.uint8)
    meta_bytes, blob = packed(({"at": 7}, {"p": Section.of(parameters)}))
    return parameters, state.describe(1, LINEAGE, meta_bytes, blob), blob


async def test_a_donor_that_writes_what_others_were_asked_for_blames_none_of_them() -> None:
    """Whoever knows the number of a transfer can fill it with wrong chunks. It keeps nobody from the state,
    and no other donor is taken for a liar.
    """
    parameters, manifest, blob = made()
    donors = Donors(blob, manifest.chunk_bytes, LIAR, TRUE, b"u" * 20)
    donors.frames = True
    downloader = Downloader(donors, donors.inbox, 4)  # type: ignore[arg-type]
    names = tuple(donors.links)
    async with asyncio.timeout(20):
        got = await downloader.fetch(
            manifest, Offers(names, dict.fromkeys(names, manifest), {}, 0.0, {}), donors.links
        )
    assert np.array_equal(got.buffers["p"], parameters)
    assert [downloader.doubts(name) > 0 for name in names] == [True, False, False]


async def test_what_is_here_already_is_looked_at_again_when_it_may_have_been_written() -> None:
    """A download goes on where an earlier one ended. Its donor sends chunks that it was not asked for, over
    those that were right: that is found out, and they are asked for again.
    """
    parameters, manifest, blob = made()
    donors = Donors(blob, manifest.chunk_bytes, TRUE)
    downloader = Downloader(donors, donors.inbox, 4)  # type: ignore[arg-type]
    there = blob.copy()
    there[-manifest.chunk_bytes :] = 0  # only the end is missing
    have = bytearray(b"\1" * (manifest.chunks - 2) + bytes(2))
    downloader._partial = _Partial(manifest, there, have)
    truly = donors.open_blob

    def opened(transfer: int, buffer: memoryview, chunk_bytes: int) -> None:
        truly(transfer, buffer, chunk_bytes)
        if len(donors.asked) == 0:
            buffer[0] ^= 1  # nobody is told of this chunk before the transfer is over

    donors.open_blob = opened  # type: ignore[method-assign]
    async with asyncio.timeout(20):
        offers = Offers((TRUE,), {TRUE: manifest}, {}, 0.0, {})
        with pytest.raises(StateError, match="gone"):
            await downloader.fetch(manifest, offers, donors.links)
        assert downloader.doubts(TRUE)
        got = await downloader.fetch(manifest, offers, donors.links)
    assert np.array_equal(got.buffers["p"], parameters)


@pytest.mark.parametrize("liars", [1, 3])
async def test_a_newcomer_with_one_honest_donor_gets_in_after_a_few_tries(liars: int) -> None:
    """Others offer newer states, and send wrong bytes of them: each does so once, for all tries together."""
    parameters, manifest, blob = made()
    names = tuple(bytes([n]) * 20 for n in range(liars))
    donors = Donors(blob, manifest.chunk_bytes, TRUE, *names)
    downloader = Downloader(donors, donors.inbox, 4)  # type: ignore[arg-type]
    manifests = {TRUE: manifest}
    for number, name in enumerate(names):
        hashes = bytes([number]) * len(manifest.hashes)
        manifests[name] = Manifest(9, LINEAGE, manifest.meta_bytes, manifest.total_bytes, hashes)
    offers = Offers(tuple(manifests), manifests, {name: [] for name in manifests}, 0.0, {})
    tries = 0
    async with asyncio.timeout(20):
        while True:
            chosen, _ = downloader.chosen(offers)
            try:
                got = await downloader.fetch(chosen, offers, donors.links)
                break
            except StateError:
                tries += 1
    assert np.array_equal(got.buffers["p"], parameters)
    assert tries == liars


def test_a_state_beyond_the_bound_is_refused() -> None:
    """256 GiB may be promised, and no byte more: nothing is allocated for it."""

    def promised(total: int) -> dict[str, Any]:
        chunks = Manifest(1, LINEAGE, 0, total, b"").chunks
        return Manifest(1, LINEAGE, 0, total, bytes(state.HASH_BYTES * chunks)).to_message()

    Manifest.from_message(promised(MAX_STATE_BYTES))
    with pytest.raises(StateError, match="wrongly"):
        Manifest.from_message(promised(MAX_STATE_BYTES + 1))
