"""Following: fetches the results that come after a state, in order, from whoever keeps them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pavg import codecs
from p2pavg.allreduce.encoded import EncodedResult
from p2pavg.errors import StateError
from p2pavg.rounds.state.collecting import Collecting
from p2pavg.rounds.state.fetching import Fetching
from p2pavg.rounds.state.inbox import Inbox
from p2pavg.rounds.state.manifest import chunk_bytes
from p2pavg.rounds.state.results import ResultHead
from p2pavg.rounds.state.trust.heads import Heads
from p2pavg.rounds.state.trust.record import WRONG, Record
from p2pavg.transport.engine import Engine
from p2pavg.transport.links.link import Link

logger = logging.getLogger("p2pavg.state")
U8 = npt.NDArray[np.uint8]

SHARE = 0.25  # of a link, beside a state
AT_ONCE = 4  # results that are asked for at a time: a donor that has them to send is never idle
LOOK_S = 0.05  # between two looks for more of them, while one is on its way

Deliver = Callable[[ResultHead, EncodedResult], Awaitable[None]]


class Following:
    """The chain of results after a state: what is known of it, and how far it is here. On the loop thread."""

    def __init__(
        self,
        engine: Engine,
        inbox: Inbox,
        links: Mapping[bytes, Link],
        numel: int,
        codec: codecs.Codec,
        deliver: Deliver,
        record: Record,
    ) -> None:
        """numel: of the gradient. codec: of the run's results. deliver: called with one after the other.
        record: told of donors that do not give what they tell of.
        """
        self._engine = engine
        self._inbox = inbox
        self._links = links
        self._numel = numel
        self._codec = codec
        self._deliver = deliver
        self._heads = Heads()
        self._record = record
        self._standing: tuple[int, bytes] | None = None  # where the results that are delivered lead
        self.modest = False  # the state is on its way, too, and comes first
        self._changed = asyncio.Event()
        self.fetched = 0  # results
        self.fetched_bytes = 0
        self.result_bytes = codec.encoded_size(numel)  # of the last one; before there is one, as it will be
        self.tellings = Counter[bytes]()  # of results, by donor
        self.times: list[float] = []  # when results were told of, each once

    def told(self, donor: bytes, message: Mapping[str, Any]) -> None:
        """A donor keeps this result for us. Raises StateError when it describes it wrongly."""
        head = ResultHead.from_message(message, self._numel, codecs.is_sparse(self._codec))
        self.tellings[donor] += 1
        if self._heads.tell(donor, head):
            self.times.append(time.monotonic())
        self._changed.set()

    def lost(self, donor: bytes) -> None:
        """It keeps nothing for us any more."""
        self._heads.lost(donor)
        self._changed.set()

    def begin(self, standing: tuple[int, bytes]) -> None:
        """The state is that of `standing`."""
        self._standing = standing
        self._changed.set()

    @property
    def standing(self) -> tuple[int, bytes] | None:
        """(epoch, lineage) where the results that are here lead; None: where the state will stand is not
        known yet.
        """
        return self._standing

    def lacking(self) -> list[ResultHead]:
        """Results that are known, follow on one another, and are not here yet."""
        found: list[ResultHead] = []
        if self._standing is not None:
            before = self._standing[1]
            while (head := self._heads.after(before)) is not None:
                found.append(head)
                before = head.lineage
        return found

    @property
    def lacking_bytes(self) -> int:
        """About their size."""
        return len(self.lacking()) * self.result_bytes

    async def run(self) -> None:
        """Fetch for ever. Raises StateError when a result that is known cannot be had from anybody."""
        under_way: dict[bytes, asyncio.Task[EncodedResult]] = {}
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._changed.clear()
                lacking = self.lacking()
                wanted = {head.lineage: head for head in lacking[:AT_ONCE]}
                for lineage in under_way.keys() - wanted.keys():  # most donors tell of another one
                    under_way.pop(lineage).cancel()
                for lineage, head in wanted.items():
                    if lineage not in under_way:
                        under_way[lineage] = loop.create_task(self._fetch(head))
                        under_way[lineage].add_done_callback(_seen)
                if not lacking:
                    await self._changed.wait()
                    continue
                first = lacking[0]
                if not under_way[first.lineage].done():
                    with suppress(TimeoutError):  # another may be told of meanwhile, and fetched beside it
                        async with asyncio.timeout(LOOK_S):
                            await asyncio.wait((under_way[first.lineage],))
                    continue
                try:
                    result = under_way.pop(first.lineage).result()
                except StateError:
                    if not self._heads.refuted(first):
                        raise
                    continue
                await self._deliver(first, result)
                self._heads.fetched(first)
                self._standing = first.epoch + 1, first.lineage
                self.fetched += 1
        finally:
            for task in under_way.values():
                task.cancel()

    async def _fetch(self, head: ResultHead) -> EncodedResult:
        layout = head.layout(self._codec)
        data = np.empty(layout.nbytes, np.uint8)
        self.result_bytes = data.nbytes
        size = chunk_bytes(data.nbytes)
        count = -(-data.nbytes // size)
        loop = asyncio.get_running_loop()
        together = True
        while True:
            holders = [donor for donor in self._heads.tellers(head) if donor in self._links]
            if not holders:
                raise StateError("nobody keeps the results that follow on the state any more")
            serving = holders if together else holders[:1]
            fetching = Fetching(count, size, {donor: bytearray(b"\1" * count) for donor in serving})
            fetching.share = SHARE if self.modest else 1.0
            try:
                await self._collect(head, fetching, data, size)
            except StateError as error:
                logger.info("a result was not to be had: %s", error)
                for donor in serving:
                    self.lost(donor)
                continue
            if await loop.run_in_executor(None, head.fits, layout, data):
                return EncodedResult(layout, data)
            if len(serving) == 1:
                self.lost(serving[0])  # its bytes do not fit what it told of
                self._record.failed(serving[0], time.monotonic(), WRONG)
            together = False  # one of them sent something else: whoever it was is found one by one

    async def _collect(self, head: ResultHead, fetching: Fetching, data: U8, size: int) -> None:
        async def broken(chunks: Sequence[int]) -> Sequence[int]:
            self.fetched_bytes += sum(len(data[c * size : (c + 1) * size]) for c in chunks)
            return ()  # the whole is looked at

        collecting = Collecting(
            fetching,
            data,
            size,
            self._links,
            self._engine,
            lambda donor: {"t": "state-chunks", "lineage": head.lineage},
            broken,
            self._record,
        )
        await collecting.run(self._inbox)


def _seen(task: asyncio.Task[EncodedResult]) -> None:
    """Nobody may ask what came of it any more."""
    if not task.cancelled():
        task.exception()
