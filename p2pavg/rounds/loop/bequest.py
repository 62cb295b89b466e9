"""Bequests: what a leaving peer accumulated, carried to a peer that stays and counts it as its own."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pavg import codecs
from p2pavg.allreduce.encoded import EncodedResult, Layout
from p2pavg.allreduce.encoding import Encodable
from p2pavg.errors import P2PAvgError
from p2pavg.identity import short_id
from p2pavg.part import Part
from p2pavg.rounds.machine.departure import Verdict
from p2pavg.rounds.state.manifest import CHUNK_BYTES
from p2pavg.rounds.training import Contribution, Inheritance
from p2pavg.transport.engine import Engine
from p2pavg.transport.links.link import Link

logger = logging.getLogger("p2pavg.rounds")
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Standing = tuple[int, bytes]  # (epoch, lineage)

KINDS = frozenset({"bequest", "bequest-end"})
SENT_AHEAD = 8  # chunks that are with the engine at a time
MOST_AT_ONCE = 4  # bequests that one peer takes in at a time
MOST_SAMPLES = 1 << 40
ANSWER_S = 1.0  # at most this long for the answer whether a peer takes it; then another is asked first
PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0  # before those are asked again that may take it later; it doubles


@dataclass(slots=True)
class _Arriving:
    link: Link
    standing: Standing
    samples: int
    hash: bytes
    data: U8
    missing: int
    asked: dict[str, Any] | None = None  # the request that is answered when all of it is here


class Bequests:
    """Both sides, on the loop thread. The chunks go through the engine, after all gradients."""

    def __init__(
        self,
        engine: Engine,
        links: Mapping[bytes, Link],
        codec: codecs.Codec,
        numel: int,
        judge: Callable[[int, bytes], Verdict],
        take: Callable[[Inheritance], None],
    ) -> None:
        """links: by peer, a live view. judge(epoch, lineage): whether samples of there may count here."""
        self._engine = engine
        self._links = links
        self._codec = codecs.for_results(codec)
        self._numel = numel
        self._judge = judge
        self._take = take
        self._arriving: dict[int, _Arriving] = {}
        self.outrun = False  # somebody did not take what we gave because it was too old
        self._sending: tuple[int, int] | None = None  # link and transfer
        self._free = asyncio.Semaphore(SENT_AHEAD)
        self._checking: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Take nothing any more."""
        for transfer in list(self._arriving):
            self._forget(transfer)
        for task in self._checking:
            task.cancel()

    # ------------------------------------------------------------------------------- the one that leaves

    @property
    def nbytes(self) -> int:
        """What is sent."""
        return self._codec.encoded_size(self._numel)

    async def give(
        self, heirs: Sequence[bytes], what: Contribution, standing: Standing, deadline: float
    ) -> bool:
        """Whether one of the heirs has taken it. deadline: of time.monotonic().

        Those that cannot yet, or do not answer, are asked again until then.
        """
        if what.gradient is None:
            return False
        loop = asyncio.get_running_loop()
        data = await loop.run_in_executor(None, self._encoded, what.gradient, what.scale)
        if data is None:
            return False
        digest = await loop.run_in_executor(None, _hash, data)
        offer = {
            "t": "bequest",
            "epoch": standing[0],
            "lineage": standing[1],
            "samples": what.samples,
            "bytes": data.nbytes,
            "hash": digest,
        }
        asking, pause = list(heirs), PAUSE_S
        while asking:
            later = []
            for heir in asking:
                link = self._links.get(heir)
                if link is None:
                    continue
                try:
                    verdict = await self._offer(link, offer, data, deadline)
                except TimeoutError:
                    return False  # the end of the notice
                if verdict is Verdict.TAKEN:
                    return True
                self.outrun = self.outrun or verdict is Verdict.BEHIND
                if verdict is Verdict.LATER:
                    later.append(heir)
            asking = later
            if asking:
                await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))
                pause = min(2 * pause, LONGEST_PAUSE_S)
        return False

    async def _offer(self, link: Link, offer: Mapping[str, Any], data: U8, deadline: float) -> Verdict:
        """What one heir says. TimeoutError: the deadline is over; whether it has taken it is not known."""
        heir, left = short_id(link.peer_id), deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        try:
            answer = await link.request(offer, min(left, ANSWER_S))
        except TimeoutError:
            logger.info("peer %s does not answer whether it takes the samples", heir)
            return Verdict.LATER
        except P2PAvgError as error:
            logger.info("peer %s does not take the samples: %s", heir, error)
            return Verdict.NEVER
        transfer = answer.get("transfer")
        if type(transfer) is int and 0 <= transfer < 2**63:
            try:
                answer = await self._carry(link, transfer, data, deadline - time.monotonic())
            except P2PAvgError as error:  # the link is gone: it drops what it has of it
                logger.info("peer %s does not take the samples: %s", heir, error)
                return Verdict.NEVER
        verdict = _verdict(answer)
        if verdict is not Verdict.TAKEN:
            logger.info("peer %s does not take the samples: %s", heir, verdict.value)
        return verdict

    def _encoded(self, gradient: F32 | Encodable, scale: float) -> U8 | None:
        """None: some value is not finite."""
        if isinstance(gradient, np.ndarray):
            data = np.empty(self.nbytes, np.uint8)
            return data if self._codec.encode(gradient, data, scale) else None
        encoding = gradient.encode(self._codec, [(0, self._numel)], self._numel, scale)
        return encoding.data if encoding.finite() else None

    async def _carry(self, link: Link, transfer: int, data: U8, timeout: float) -> dict[str, Any]:
        self._sending, self._free = (link.id, transfer), asyncio.Semaphore(SENT_AHEAD)
        sending = asyncio.get_running_loop().create_task(self._send(link, transfer, memoryview(data)))
        try:
            return await link.request({"t": "bequest-end", "transfer": transfer}, timeout)
        finally:
            sending.cancel()
            self._sending = None

    async def _send(self, link: Link, transfer: int, view: memoryview) -> None:
        for chunk, start in enumerate(range(0, len(view), CHUNK_BYTES)):
            await self._free.acquire()
            self._engine.send_blob(link.id, transfer, chunk, view[start : start + CHUNK_BYTES])

    def sent(self, link: int, transfer: int) -> None:
        """The engine handed a chunk to the kernel."""
        if (link, transfer) == self._sending:
            self._free.release()

    # -------------------------------------------------------------------------------- the one that stays

    def message(self, link: Link, message: dict[str, Any]) -> None:
        """One of `KINDS`."""
        if message["t"] == "bequest":
            link.reply(message, self._offered(link, message))
            return
        transfer = message.get("transfer")
        arriving = self._arriving.get(transfer) if type(transfer) is int else None
        if type(transfer) is not int or arriving is None or arriving.link is not link:
            link.reply(message, {"taken": False})
            return
        arriving.asked = message
        self._finish(transfer, arriving)

    def _offered(self, link: Link, message: Mapping[str, Any]) -> dict[str, Any]:
        epoch, lineage, samples = message.get("epoch"), message.get("lineage"), message.get("samples")
        digest = message.get("hash")
        sound = (
            type(epoch) is int
            and isinstance(lineage, bytes)
            and type(samples) is int
            and 0 < samples <= MOST_SAMPLES
            and isinstance(digest, bytes)
            and message.get("bytes") == self.nbytes
        )
        verdict = self._judge(epoch, lineage) if sound else Verdict.NEVER  # type: ignore[arg-type]
        if verdict is not Verdict.TAKEN:
            return _answer(verdict)
        for before in [t for t, arriving in self._arriving.items() if arriving.link is link]:
            self._forget(before)  # our answer came too late: it asks once more
        if len(self._arriving) >= MOST_AT_ONCE:
            return _answer(Verdict.LATER)
        transfer = random.getrandbits(63)
        data = np.empty(self.nbytes, np.uint8)
        chunks = -(-data.nbytes // CHUNK_BYTES)
        self._arriving[transfer] = _Arriving(link, (epoch, lineage), samples, digest, data, chunks)  # type: ignore[arg-type]
        self._engine.open_blob(transfer, memoryview(data), CHUNK_BYTES)
        return {"transfer": transfer}

    def chunk(self, transfer: int) -> bool:
        """The engine put a chunk in place; whether it is of a bequest."""
        arriving = self._arriving.get(transfer)
        if arriving is None:
            return False
        arriving.missing -= 1
        self._finish(transfer, arriving)
        return True

    def _finish(self, transfer: int, arriving: _Arriving) -> None:
        if arriving.missing or arriving.asked is None:
            return
        self._forget(transfer)
        task = asyncio.get_running_loop().create_task(self._check(arriving))
        self._checking.add(task)
        task.add_done_callback(self._checking.discard)

    async def _check(self, arriving: _Arriving) -> None:
        whole = await asyncio.get_running_loop().run_in_executor(None, _hash, arriving.data)
        verdict = self._judge(*arriving.standing) if whole == arriving.hash else Verdict.NEVER
        if verdict is Verdict.TAKEN:
            layout = Layout((Part(0, 0, self._numel),), self._numel, self._codec)
            self._take(Inheritance(arriving.samples, EncodedResult(layout, arriving.data)))
            logger.info(
                "took over %d samples of peer %s, which leaves",
                arriving.samples,
                short_id(arriving.link.peer_id),
            )
        if arriving.asked is not None:
            arriving.link.reply(arriving.asked, _answer(verdict))

    def link_down(self, link: int) -> None:
        """What was not whole yet is dropped."""
        for transfer in [t for t, arriving in self._arriving.items() if arriving.link.id == link]:
            self._forget(transfer)

    def _forget(self, transfer: int) -> None:
        del self._arriving[transfer]
        self._engine.cancel(transfer)


def _answer(verdict: Verdict) -> dict[str, Any]:
    """Earlier versions read `taken` alone."""
    answer: dict[str, Any] = {"taken": verdict is Verdict.TAKEN}
    if verdict in (Verdict.LATER, Verdict.BEHIND):
        answer["why"] = verdict.value
    return answer


def _verdict(answer: Mapping[str, Any]) -> Verdict:
    if answer.get("taken") is True:
        return Verdict.TAKEN
    why = answer.get("why")
    return Verdict(why) if why in (Verdict.LATER.value, Verdict.BEHIND.value) else Verdict.NEVER


def _hash(data: U8) -> bytes:
    return hashlib.blake2b(data.data, digest_size=32).digest()
