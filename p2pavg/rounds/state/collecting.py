"""Collecting the chunks of one thing from several donors at once, until all are verified."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pavg.errors import StateError
from p2pavg.identity import short_id
from p2pavg.printable import printable
from p2pavg.rounds.state.fetching import Fetching
from p2pavg.rounds.state.inbox import Inbox, Incoming
from p2pavg.rounds.state.trust.patience import Credit, most_credit
from p2pavg.rounds.state.trust.record import ABSENT, WRONG, Record
from p2pavg.transport.engine import Engine
from p2pavg.transport.links.link import Link

logger = logging.getLogger("p2pavg.state")
U8 = npt.NDArray[np.uint8]

ANSWER_S = 15.0  # to a request for chunks, which says only whether they will come: else others are asked
PASSED = 6  # times all that a donor owes, of other things too, which go before or beside this one, and
PASSED_BYTES = 4 << 20  # that its link has brought since: what it owes was lost with a stream
QUIET_S = 3.0  # and so it is when the link brought less than LEAST_BYTES in so long, and four round trips
ENDED_PASSED, ENDED_PASSED_BYTES, ENDED_S = 2, 1 << 20, 0.5  # the same, once one of its streams has ended
LEAST_BYTES = 16 << 10
MOST_QUIET = 3  # times in a row, before a donor is dropped
TICK_S = 0.05
MOST_WORDS = 200  # of a donor, why it does not give what was asked for

Request = Callable[[bytes], Mapping[str, Any]]  # what a donor is asked, without transfer and chunks
Broken = Callable[[Sequence[int]], Awaitable[Sequence[int]]]  # those of these chunks that are not right


@dataclass(slots=True)
class _Heard:
    """A donor since something of this came from it last, or was asked of it. Bytes are those of its link."""

    received: int  # then
    owed: int  # then, of all things together: what is asked for later only adds to it
    moved_at: float  # when the link last brought something
    seen: int  # bytes, at that time
    quiet: int  # how often it was asked again because nothing came at all


@dataclass(slots=True)
class _Streams:
    """Those of a donor's link."""

    numbers: frozenset[int]
    ended: bool = False  # one of them, since the donor was last asked again


class Collecting:
    """One thing in chunks, in one buffer."""

    def __init__(
        self,
        fetching: Fetching,
        buffer: U8,
        chunk_bytes: int,
        links: Mapping[bytes, Link],
        engine: Engine,
        request: Request,
        broken: Broken,
        record: Record,
    ) -> None:
        """links: by peer, a live view. record: told of donors that give nothing, or what is wrong."""
        self._fetching = fetching
        self._buffer = buffer
        self._chunk_bytes = chunk_bytes
        self._links = links
        self._engine = engine
        self._request = request
        self._broken = broken
        self._record = record
        self._heard: dict[bytes, _Heard] = {}
        self._inbox: Inbox  # while it runs
        self._incoming: Incoming
        self._told = set[bytes]()  # the donors that know its number
        self._streams: dict[bytes, _Streams] = {}
        self._credits: dict[bytes, Credit] = {}
        self._looked_at: float | None = None  # for donors that bring nothing

    async def run(self, inbox: Inbox) -> None:
        """Raises StateError when no donor is left that can serve what is missing."""
        while self._fetching.left:
            here = [chunk for chunk, have in enumerate(self._fetching.have) if have]
            with inbox.open(self._buffer, self._chunk_bytes) as incoming:
                self._inbox, self._incoming, self._told = inbox, incoming, set()
                await self._transfer()
            if here and (wrong := await self._broken(here)):  # a donor wrote there again, unasked
                for chunk in wrong:
                    self._fetching.wrong(chunk)
                self._blame()

    async def _transfer(self) -> None:
        """Until all is verified, or a chunk was wrong: then the caller begins anew with what is missing."""
        asking: dict[bytes, asyncio.Task[None]] = {}
        fetching = self._fetching
        try:
            while fetching.left:
                if fetching.one is not None and self._told - {fetching.one}:
                    fetching.restart()
                    return
                for donor in fetching.donors:
                    self._ask(donor, asking)
                self._drop_silent()
                if not fetching.donors or fetching.stuck():
                    raise StateError("the members that gave their state are gone; others will be asked")
                arrived = await self._incoming.next(TICK_S)
                if arrived and not await self._verify(arrived):
                    return
        finally:
            for task in asking.values():
                task.cancel()

    def _ask(self, donor: bytes, asking: dict[bytes, asyncio.Task[None]]) -> None:
        task = asking.get(donor)
        if task is not None and task.done():
            del asking[donor]
            if task.exception() is not None:
                self._drop(donor, str(task.exception()))
                return
        link = self._links.get(donor)
        if donor in asking or link is None:
            return
        if chunks := self._fetching.ask(donor, link.rtt_min, time.monotonic()):
            self._told.add(donor)
            self._note(donor)
            if self._fetching.coming(donor) == len(chunks):  # it owed nothing before
                self._hears(donor, quiet=0 if donor not in self._heard else self._heard[donor].quiet)
            request = {**self._request(donor), "transfer": self._incoming.transfer, "chunks": chunks}
            asking[donor] = asyncio.get_running_loop().create_task(_requested(link, request))

    def _note(self, donor: bytes) -> None:
        self._incoming.owed[donor] = self._fetching.coming(donor) * self._chunk_bytes

    async def _verify(self, arrived: Sequence[int]) -> bool:
        wrong = await self._broken(arrived)
        now = time.monotonic()
        for chunk in arrived:
            if chunk in wrong:
                self._fetching.wrong(chunk)
            else:
                senders = self._fetching.owing(chunk)
                self._fetching.verified(chunk, now)
                for sender in senders:
                    self._note(sender)
                    self._hears(sender)
                    if sender in self._credits:
                        self._credits[sender].brought(self._chunk_bytes, self._most_credit(sender))
        if wrong:
            self._blame()
        return not wrong

    def _blame(self) -> None:
        """Whoever knows the number of a transfer can write all of it. So a wrong chunk is laid to a donor
        that alone knew it, and where several did, the next transfers are of one donor each.
        """
        if len(self._told) == 1:
            self._drop(self._told.pop(), "it sent bytes that do not fit its manifest", WRONG)
        self._fetching.apart()
        self._fetching.restart()

    def _hears(self, donor: bytes, quiet: int = 0) -> None:
        """Something of this came from the donor, or is asked of it."""
        link = self._links.get(donor)
        if link is not None:
            now, received = time.monotonic(), self._engine.traffic(link.id)[1]
            self._heard[donor] = _Heard(received, self._inbox.owed(donor), now, received, quiet)

    def _drop_silent(self) -> None:
        """What was on its way over a stream that broke does not come: it is asked for again."""
        now = time.monotonic()
        passed_s, self._looked_at = now - (self._looked_at or now), now
        for donor in self._fetching.donors:
            link, owed = self._links.get(donor), self._fetching.coming(donor)
            if link is None:
                self._drop(donor, "the link is gone")
                continue
            if owed:
                credit = self._credits.setdefault(donor, Credit(self._most_credit(donor)))
                credit.passed(passed_s)
                if credit.left <= 0:
                    self._drop(donor, "nothing of what it was asked for comes from it")
                    continue
            ended = self._has_ended(donor, link)
            heard = self._heard.get(donor)
            if not owed or heard is None:
                continue
            received = self._engine.traffic(link.id)[1]
            if received >= heard.seen + LEAST_BYTES:
                heard.moved_at, heard.seen = now, received
            silence = now - heard.moved_at
            quiet = silence > QUIET_S + 4 * link.rtt_min
            lost = ended and silence > ENDED_S + 4 * link.rtt_min
            times, least = (ENDED_PASSED, ENDED_PASSED_BYTES) if ended else (PASSED, PASSED_BYTES)
            passed = received - heard.received > least + times * max(heard.owed, self._inbox.owed(donor))
            if quiet and heard.quiet + 1 >= MOST_QUIET:
                self._drop(donor, "nothing comes from it any more")
            elif quiet or lost or passed:
                self._fetching.again(donor)
                self._hears(donor, quiet=heard.quiet + quiet)
                self._streams.pop(donor)

    def _most_credit(self, donor: bytes) -> float:
        link = self._links.get(donor)
        rtt = 0.0 if link is None else link.rtt_min
        return most_credit(rtt, self._inbox.owed(donor), self._fetching.rate(donor))

    def _has_ended(self, donor: bytes, link: Link) -> bool:
        """One of its streams, since it was last asked again: what was on its way there is lost."""
        now = frozenset(self._engine.streams(link.id))
        streams = self._streams.setdefault(donor, _Streams(now))
        streams.ended = streams.ended or not now >= streams.numbers
        streams.numbers = now
        return streams.ended

    def _drop(self, donor: bytes, why: str, weight: float = ABSENT) -> None:
        logger.info("no more state from %s: %s", short_id(donor), why)
        self._record.failed(donor, time.monotonic(), weight)
        self._fetching.drop(donor)


async def _requested(link: Link, request: Mapping[str, Any]) -> None:
    answer = await link.request(request, ANSWER_S)
    if "error" in answer:
        raise StateError(printable(str(answer["error"])[:MOST_WORDS]))
