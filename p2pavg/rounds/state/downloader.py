"""Downloader: fetches the state of the swarm from several members at once."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pavg.errors import P2PAvgError, StateError
from p2pavg.identity import short_id
from p2pavg.printable import printable
from p2pavg.rounds.state import manifest as state
from p2pavg.rounds.state.fetching import Fetching, allowance, choose
from p2pavg.rounds.state.manifest import CHUNK_BYTES, Manifest
from p2pavg.rounds.training import State
from p2pavg.transport.engine import Engine
from p2pavg.transport.links.link import Link

logger = logging.getLogger("p2pavg.state")
U8 = npt.NDArray[np.uint8]

MAX_DONORS = 4
ASK_TIMEOUT_S = 60.0  # a donor copies and hashes its state first
BUSY_TRIES = 60
GRACE_S = 0.3  # how much longer than the first manifest the others may take, at least
STALL_S = 5.0  # a donor from which nothing comes for so long is dropped
TICK_S = 0.05
MOST_WORDS = 200  # of a donor, why it does not give its state


@dataclass(slots=True)
class _Incoming:
    """What the engine put in place and nobody verified yet."""

    chunks: list[int] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class Downloader:
    """Fetches states. One at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._incoming: dict[int, _Incoming] = {}
        self._ids = itertools.count(random.getrandbits(61))
        self.progress: tuple[int, int, int] | None = (
            None  # verified bytes, all bytes, donors; of the last one
        )

    def chunk(self, transfer: int, chunk: int) -> None:
        """The engine put a chunk in place."""
        incoming = self._incoming.get(transfer)
        if incoming is not None:
            incoming.chunks.append(chunk)
            incoming.wake.set()

    async def fetch(
        self, donors: Sequence[bytes], links: Mapping[bytes, Link], since: int
    ) -> tuple[State, dict[str, Any]]:
        """(state, facts of the donor whose manifest it is). since: the first epoch whose result we shall
        hold.

        Raises StateError when no donor can give a whole, verified state.
        """
        self.progress = None
        manifests, facts = await self._manifests(donors[:MAX_DONORS], links, since)
        primary = choose(manifests)
        manifest = manifests[primary]
        logger.info(
            "downloading %.1f MB of state (epoch %d) from %d members",
            manifest.total_bytes / 1e6,
            manifest.epoch,
            len(manifests),
        )
        self.progress = (0, manifest.total_bytes, len(manifests))
        try:
            blob = np.empty(manifest.total_bytes, np.uint8)
        except MemoryError:
            raise StateError(
                f"the state has {manifest.total_bytes / 1e6:.0f} MB, for which there is no memory; free some"
            ) from None
        fetching = Fetching(manifest, manifests)
        try:
            await self._chunks(fetching, manifests, links, blob)
        finally:
            for donor in manifests:
                if donor in links:
                    links[donor].send({"t": "state-done"})
        return state.unpack(manifest, blob), facts[primary]

    # ---------------------------------------------------------------------------------- manifests

    async def _manifests(
        self, donors: Sequence[bytes], links: Mapping[bytes, Link], since: int
    ) -> tuple[dict[bytes, Manifest], dict[bytes, dict[str, Any]]]:
        """Ask all donors at once; go on with those that answer about as fast as the first."""
        asked = {d: asyncio.ensure_future(self._ask(links[d], since)) for d in donors if d in links}
        manifests: dict[bytes, Manifest] = {}
        facts: dict[bytes, dict[str, Any]] = {}
        whys: list[str] = []
        start, deadline = time.monotonic(), None
        try:
            while pending := [d for d, task in asked.items() if d not in facts and not task.cancelled()]:
                timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
                done, _ = await asyncio.wait(
                    [asked[d] for d in pending], timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                for donor in [d for d in pending if asked[d] in done]:
                    try:
                        facts[donor] = asked[donor].result()
                        manifests[donor] = Manifest.from_message(facts[donor])
                        manifests[donor].check(links[donor].hello["key"])
                    except (P2PAvgError, TimeoutError, KeyError) as error:
                        whys.append(str(error) or type(error).__name__)
                        manifests.pop(donor, None)
                        facts[donor] = {}
                if manifests and deadline is None:
                    deadline = time.monotonic() + GRACE_S + (time.monotonic() - start)
        finally:
            for task in asked.values():
                task.cancel()
        if not manifests:
            raise StateError(f"no member could give its state ({'; '.join(whys) or 'nobody is there'})")
        return manifests, facts

    async def _ask(self, link: Link, since: int) -> dict[str, Any]:
        for _ in range(BUSY_TRIES):
            answer = await link.request({"t": "state", "since": since}, ASK_TIMEOUT_S)
            if "error" in answer:
                raise StateError(printable(str(answer["error"])[:MOST_WORDS]))
            if not answer.get("busy"):
                return answer
        raise StateError("a donor was busy with other newcomers for too long")

    # ------------------------------------------------------------------------------------- chunks

    async def _chunks(
        self, fetching: Fetching, manifests: Mapping[bytes, Manifest], links: Mapping[bytes, Link], blob: U8
    ) -> None:
        while fetching.left:
            transfer = next(self._ids) & (2**63 - 1)
            incoming = self._incoming[transfer] = _Incoming()
            self._engine.open_blob(transfer, memoryview(blob), CHUNK_BYTES)
            try:
                await self._transfer(fetching, manifests, links, blob, transfer, incoming)
            finally:
                self._engine.cancel(transfer)
                del self._incoming[transfer]

    async def _transfer(
        self,
        fetching: Fetching,
        manifests: Mapping[bytes, Manifest],
        links: Mapping[bytes, Link],
        blob: U8,
        transfer: int,
        incoming: _Incoming,
    ) -> None:
        """Until all is verified, or a chunk was wrong: then the caller begins anew with what is missing."""
        heard = dict.fromkeys(fetching.donors, time.monotonic())
        asking: dict[bytes, asyncio.Task[None]] = {}
        loop = asyncio.get_running_loop()
        try:
            while fetching.left:
                for donor in fetching.donors:
                    task = asking.get(donor)
                    if task is not None and task.done():
                        del asking[donor]
                        if task.exception() is not None:
                            self._drop(fetching, donor, str(task.exception()))
                            continue
                    link = links.get(donor)
                    if donor in asking or link is None:
                        continue
                    if chunks := fetching.ask(donor, allowance(link.rtt_min)):
                        work = self._request(link, manifests[donor], transfer, chunks)
                        asking[donor] = loop.create_task(work)
                self._drop_silent(fetching, links, heard)
                if not fetching.donors or fetching.stuck():
                    raise StateError("the members that gave their state are gone; others will be asked")
                incoming.wake.clear()
                if not incoming.chunks:
                    try:
                        async with asyncio.timeout(TICK_S):
                            await incoming.wake.wait()
                    except TimeoutError:
                        continue
                arrived, incoming.chunks = incoming.chunks, []
                wrong = await loop.run_in_executor(None, _broken, fetching.manifest, blob, arrived)
                total = fetching.manifest.total_bytes
                verified = self._verified(fetching, arrived, wrong, heard)
                self.progress = (max(0, total - fetching.left * CHUNK_BYTES), total, len(manifests))
                if not verified:
                    return
        finally:
            for task in asking.values():
                task.cancel()

    def _verified(
        self, fetching: Fetching, arrived: Sequence[int], wrong: Sequence[int], heard: dict[bytes, float]
    ) -> bool:
        for chunk in arrived:
            sender = fetching.wrong(chunk)
            if chunk in wrong:
                if sender is not None:
                    self._drop(fetching, sender, "it sent bytes that do not fit its manifest")
            else:
                if sender is not None:
                    heard[sender] = time.monotonic()
                fetching.verified(chunk)
        if wrong:
            fetching.restart()
        return not wrong

    def _drop_silent(
        self, fetching: Fetching, links: Mapping[bytes, Link], heard: Mapping[bytes, float]
    ) -> None:
        for donor in fetching.donors:
            if donor not in links:
                self._drop(fetching, donor, "the link is gone")
            elif fetching.coming(donor) and time.monotonic() - heard[donor] > STALL_S:
                self._drop(fetching, donor, "nothing comes from it any more")

    def _drop(self, fetching: Fetching, donor: bytes, why: str) -> None:
        logger.info("no more state from %s: %s", short_id(donor), why)
        fetching.drop(donor)

    async def _request(self, link: Link, manifest: Manifest, transfer: int, chunks: Sequence[int]) -> None:
        request = {"t": "state-chunks", "transfer": transfer, "chunks": list(chunks), "root": manifest.root}
        answer = await link.request(request, ASK_TIMEOUT_S)
        if "error" in answer:
            raise StateError(printable(str(answer["error"])[:MOST_WORDS]))


def _broken(manifest: Manifest, blob: U8, chunks: Sequence[int]) -> list[int]:
    """Those of `chunks` whose hash is wrong."""
    view, size = memoryview(blob), state.HASH_BYTES
    broken = []
    for i in chunks:
        hashed = state.chunk_hash(view[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES])
        if hashed != manifest.hashes[i * size : (i + 1) * size]:
            broken.append(i)
        state.give_way()
    return broken
