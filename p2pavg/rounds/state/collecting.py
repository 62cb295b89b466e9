"""Collecting the chunks of one thing from several donors at once, until all are verified."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pavg.errors import StateError
from p2pavg.identity import short_id
from p2pavg.printable import printable
from p2pavg.rounds.state.fetching import Fetching
from p2pavg.rounds.state.inbox import Inbox, Incoming
from p2pavg.transport.links.link import Link

logger = logging.getLogger("p2pavg.state")
U8 = npt.NDArray[np.uint8]

ANSWER_S = 60.0  # to a request for chunks
STALL_S = 10.0  # a donor is dropped when its link brought less than LEAST_BYTES in so long
LEAST_BYTES = 32 << 10
TICK_S = 0.05
MOST_WORDS = 200  # of a donor, why it does not give what was asked for

Request = Callable[[bytes], Mapping[str, Any]]  # what a donor is asked, without transfer and chunks
Broken = Callable[[Sequence[int]], Awaitable[Sequence[int]]]  # those of these chunks that are not right


class Collecting:
    """One thing in chunks, in one buffer."""

    def __init__(
        self,
        fetching: Fetching,
        buffer: U8,
        chunk_bytes: int,
        links: Mapping[bytes, Link],
        received: Callable[[int], int],
        request: Request,
        broken: Broken,
    ) -> None:
        """links: by peer, a live view. received(link): bytes that it ever brought."""
        self._fetching = fetching
        self._buffer = buffer
        self._chunk_bytes = chunk_bytes
        self._links = links
        self._received = received
        self._request = request
        self._broken = broken
        self._heard: dict[bytes, tuple[float, int]] = {}  # when its link had brought how much

    async def run(self, inbox: Inbox) -> None:
        """Raises StateError when no donor is left that can serve what is missing."""
        while self._fetching.left:
            with inbox.open(self._buffer, self._chunk_bytes) as incoming:
                await self._transfer(incoming)

    async def _transfer(self, incoming: Incoming) -> None:
        """Until all is verified, or a chunk was wrong: then the caller begins anew with what is missing."""
        asking: dict[bytes, asyncio.Task[None]] = {}
        fetching = self._fetching
        try:
            while fetching.left:
                for donor in fetching.donors:
                    self._ask(donor, incoming.transfer, asking)
                self._drop_silent()
                if not fetching.donors or fetching.stuck():
                    raise StateError("the members that gave their state are gone; others will be asked")
                arrived = await incoming.next(TICK_S)
                if arrived and not await self._verify(arrived):
                    return
        finally:
            for task in asking.values():
                task.cancel()

    def _ask(self, donor: bytes, transfer: int, asking: dict[bytes, asyncio.Task[None]]) -> None:
        task = asking.get(donor)
        if task is not None and task.done():
            del asking[donor]
            if task.exception() is not None:
                self._drop(donor, str(task.exception()))
                return
        link = self._links.get(donor)
        if donor in asking or link is None:
            return
        if chunks := self._fetching.ask(donor, link.rtt_min):
            if self._fetching.coming(donor) == len(chunks):  # it owed nothing before
                self._heard[donor] = time.monotonic(), self._received(link.id)
            request = {**self._request(donor), "transfer": transfer, "chunks": chunks}
            asking[donor] = asyncio.get_running_loop().create_task(_requested(link, request))

    async def _verify(self, arrived: Sequence[int]) -> bool:
        wrong = await self._broken(arrived)
        now = time.monotonic()
        for chunk in arrived:
            if chunk in wrong:
                for sender in self._fetching.owing(chunk):
                    self._drop(sender, "it sent bytes that do not fit its manifest")
            else:
                self._fetching.verified(chunk, now)
        if wrong:
            self._fetching.restart()
        return not wrong

    def _drop_silent(self) -> None:
        now = time.monotonic()
        for donor in self._fetching.donors:
            link = self._links.get(donor)
            if link is None:
                self._drop(donor, "the link is gone")
            elif self._fetching.coming(donor):
                received = self._received(link.id)
                since, before = self._heard.setdefault(donor, (now, received))
                if received >= before + LEAST_BYTES:
                    self._heard[donor] = now, received
                elif now - since > STALL_S:
                    self._drop(donor, "nothing comes from it any more")

    def _drop(self, donor: bytes, why: str) -> None:
        logger.info("no more state from %s: %s", short_id(donor), why)
        self._fetching.drop(donor)


async def _requested(link: Link, request: Mapping[str, Any]) -> None:
    answer = await link.request(request, ANSWER_S)
    if "error" in answer:
        raise StateError(printable(str(answer["error"])[:MOST_WORDS]))
