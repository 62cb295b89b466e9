"""Handovers: what a departing peer accumulated, carried to a peer that stays and counts it as its own."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pavg import codecs
from p2pavg.allreduce.encoded import EncodedResult, Layout
from p2pavg.allreduce.encoding import DeviceGradient
from p2pavg.errors import P2PAvgError
from p2pavg.identity import short_id
from p2pavg.plan.part import Part
from p2pavg.rounds.machine.departure import Acceptance
from p2pavg.rounds.machine.events import HandedOver
from p2pavg.rounds.protocol.fields import MAX_NOTE
from p2pavg.rounds.state.manifest import CHUNK_BYTES
from p2pavg.rounds.training import Contribution, Inheritance
from p2pavg.transport.engine import Engine
from p2pavg.transport.links.link import Link

logger = logging.getLogger("p2pavg.rounds")
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Standing = tuple[int, bytes]  # (epoch, lineage)
Offers = tuple[tuple[int, int], ...]  # (transfer, how many of the samples it had)

KINDS = frozenset({"handover", "handover-end"})
SENT_AHEAD = 8  # chunks that are with the engine at a time
MOST_AT_ONCE = 4  # handovers that one peer takes in at a time
MOST_OFFERS = 1024  # attempts of one epoch
ANSWER_S = 1.0  # at most this long for the answer whether a peer takes it; then another is asked first
PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0  # before those are asked again that may take it later; it doubles


@dataclass(slots=True)
class _Arriving:
    link: Link
    standing: Standing
    offered: Offers
    samples: int
    note: bytes
    hash: bytes
    data: U8
    missing: int
    asked: dict[str, Any] | None = None  # the request that is answered when all of it is here


class Handovers:
    """Both sides, on the loop thread. The chunks go through the engine, after all gradients."""

    def __init__(
        self,
        engine: Engine,
        links: Mapping[bytes, Link],
        codec: codecs.Codec,
        numel: int,
        judge: Callable[[int, bytes, Collection[int]], Acceptance],
        counted: Callable[[int, Collection[int]], int | None],
        can_have: Callable[[int], bool],
        take: Callable[[Inheritance, int, Offers], None],
    ) -> None:
        """links: by peer, a live view. judge(epoch, lineage, transfers): whether samples of there that these
        transfers had may count here. counted(epoch, transfers): in which of them they are averaged here.
        can_have(samples): whether one peer can have so many, and this one can declare them beside its own.
        take(inheritance, epoch, offers): they are ours.
        """
        self._engine = engine
        self._links = links
        self._codec = codecs.for_handing_over(codec)
        self._numel = numel
        self._judge = judge
        self._counted = counted
        self._can_have = can_have
        self._take = take
        self._arriving: dict[int, _Arriving] = {}
        self._handed_over: set[int] = set()  # links whose handover was taken: a peer leaves once
        self._sending: tuple[int, int] | None = None  # link and transfer
        self._carrying: asyncio.Task[None] | None = None
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
        self,
        receivers: Sequence[bytes],
        what: Contribution,
        standing: Standing,
        offered: Offers,
        deadline: float,
    ) -> HandedOver:
        """What became of it. offered: as in `HandOver`. deadline: of time.monotonic().

        Receivers that cannot yet, or do not answer the offer, are asked again until then. A receiver that has
        all of it and does not say whether it took it is the last.
        """
        given = HandedOver(taken=False)
        if what.gradient is None:
            return given
        loop = asyncio.get_running_loop()
        data = await loop.run_in_executor(None, self._encoded, what.gradient, what.scale)
        if data is None:
            return given
        digest = await loop.run_in_executor(None, _hash, data)
        offer = {
            "t": "handover",
            "epoch": standing[0],
            "lineage": standing[1],
            "samples": what.samples,
            "note": what.note,
            "offered": [list(each) for each in offered],
            "bytes": data.nbytes,
            "hash": digest,
        }
        asking, pause = list(receivers), PAUSE_S
        while asking:
            later = []
            for receiver in asking:
                link = self._links.get(receiver)
                if link is None:
                    continue
                try:
                    acceptance, counted = await self._offer(link, offer, data, deadline)
                except TimeoutError:
                    return given  # the end of the notice
                match acceptance:
                    case Acceptance.TAKEN | Acceptance.UNKNOWN:
                        taken = acceptance is Acceptance.TAKEN
                        return replace(given, taken=taken, unknown=not taken)
                    case Acceptance.COUNTED if counted in dict(offered):
                        return replace(given, counted=counted)
                    case Acceptance.BEHIND:
                        given = replace(given, behind=True)
                    case Acceptance.LATER:
                        later.append(receiver)
            asking = later
            if asking:
                await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))
                pause = min(2 * pause, LONGEST_PAUSE_S)
        return given

    async def _offer(
        self, link: Link, offer: Mapping[str, Any], data: U8, deadline: float
    ) -> tuple[Acceptance, int | None]:
        """What one receiver says; and in which transfer it is counted. TimeoutError: the deadline is over."""
        receiver, left = short_id(link.peer_id), deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        try:
            answer = await link.request(offer, min(left, ANSWER_S))
        except TimeoutError:
            logger.info("peer %s does not answer whether it takes the samples", receiver)
            return Acceptance.LATER, None
        except P2PAvgError as error:
            logger.info("peer %s does not take the samples: %s", receiver, error)
            return Acceptance.NEVER, None
        transfer = answer.get("transfer")
        if type(transfer) is int and 0 <= transfer < 2**63:
            if not await self._carry(link, transfer, data, deadline) or link.closed:
                logger.info("peer %s does not take the samples: the link to it is gone", receiver)
                return Acceptance.NEVER, None  # it drops what it has: it was not told that this is all
            try:
                end = {"t": "handover-end", "transfer": transfer}
                answer = await link.request(end, max(0.0, deadline - time.monotonic()))
            except (TimeoutError, P2PAvgError):
                logger.warning("peer %s has the samples, and did not say whether it takes them", receiver)
                return Acceptance.UNKNOWN, None
        acceptance = _acceptance(answer)
        if acceptance is not Acceptance.TAKEN:
            logger.info("peer %s does not take the samples: %s", receiver, acceptance.value)
        counted = answer.get("counted")
        return acceptance, counted if type(counted) is int else None

    def _encoded(self, gradient: F32 | DeviceGradient, scale: float) -> U8 | None:
        """None: some value is not finite."""
        if isinstance(gradient, np.ndarray):
            data = np.empty(self.nbytes, np.uint8)
            return data if self._codec.encode(gradient, data, scale) else None
        encoding = gradient.encode(self._codec, [(0, self._numel)], self._numel, scale)
        return encoding.data if encoding.finite() else None

    async def _carry(self, link: Link, transfer: int, data: U8, deadline: float) -> bool:
        """Whether all of it is with the kernel; else the link is gone. TimeoutError: the deadline is over."""
        if link.closed:
            return False
        self._sending, self._free = (link.id, transfer), asyncio.Semaphore(SENT_AHEAD)
        sending = asyncio.get_running_loop().create_task(self._send(link, transfer, memoryview(data)))
        self._carrying = sending
        try:
            await asyncio.wait({sending}, timeout=max(0.0, deadline - time.monotonic()))
            if not sending.done():
                raise TimeoutError
            return not sending.cancelled()
        finally:
            sending.cancel()
            self._sending = self._carrying = None

    async def _send(self, link: Link, transfer: int, view: memoryview) -> None:
        for chunk, start in enumerate(range(0, len(view), CHUNK_BYTES)):
            await self._free.acquire()
            self._engine.send_blob(link.id, transfer, chunk, view[start : start + CHUNK_BYTES])
        for _ in range(SENT_AHEAD):
            await self._free.acquire()

    def sent(self, link: int, transfer: int) -> None:
        """The engine handed a chunk to the kernel."""
        if (link, transfer) == self._sending:
            self._free.release()

    # -------------------------------------------------------------------------------- the one that stays

    def message(self, link: Link, message: dict[str, Any]) -> None:
        """One of `KINDS`."""
        if message["t"] == "handover":
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
        digest, offered = message.get("hash"), _offers(message.get("offered"))
        note = message.get("note")
        sound = (
            type(epoch) is int
            and isinstance(lineage, bytes)
            and type(samples) is int
            and samples > 0
            and isinstance(digest, bytes)
            and isinstance(note, bytes)
            and len(note) <= MAX_NOTE
            and offered is not None
            and all(had <= samples for _, had in offered)
            and message.get("bytes") == self.nbytes
        )
        if not sound:
            return _answer(Acceptance.NEVER)
        assert isinstance(epoch, int)
        assert isinstance(lineage, bytes)
        assert isinstance(samples, int)
        assert isinstance(digest, bytes)
        assert isinstance(note, bytes)
        assert offered is not None
        acceptance = self._judge(epoch, lineage, dict(offered))
        if acceptance is not Acceptance.TAKEN:
            return self._said(acceptance, epoch, offered)
        if link.id in self._handed_over or not self._can_have(samples):
            logger.warning("peer %s leaves %d samples that it cannot have", short_id(link.peer_id), samples)
            return _answer(Acceptance.NEVER)
        for before in [t for t, arriving in self._arriving.items() if arriving.link is link]:
            self._forget(before)  # our answer came too late: it asks once more
        if len(self._arriving) >= MOST_AT_ONCE:
            return _answer(Acceptance.LATER)
        transfer = random.getrandbits(63)
        data = np.empty(self.nbytes, np.uint8)
        chunks = -(-data.nbytes // CHUNK_BYTES)
        standing = epoch, lineage
        self._arriving[transfer] = _Arriving(link, standing, offered, samples, note, digest, data, chunks)
        self._engine.open_blob(transfer, memoryview(data), CHUNK_BYTES)
        return {"transfer": transfer}

    def chunk(self, transfer: int) -> bool:
        """The engine put a chunk in place; whether it is of a handover."""
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
        acceptance, offered = Acceptance.NEVER, arriving.offered
        if whole == arriving.hash:
            acceptance = self._judge(*arriving.standing, dict(offered))
        link = arriving.link
        if acceptance is Acceptance.TAKEN and (
            link.id in self._handed_over or not self._can_have(arriving.samples)
        ):
            acceptance = Acceptance.NEVER  # others left us theirs meanwhile
        if acceptance is Acceptance.TAKEN:
            self._handed_over.add(link.id)
            layout = Layout((Part(0, 0, self._numel),), self._numel, self._codec)
            inheritance = Inheritance(arriving.samples, EncodedResult(layout, arriving.data), arriving.note)
            self._take(inheritance, arriving.standing[0], offered)
            logger.info(
                "took over %d samples of peer %s, which leaves",
                arriving.samples,
                short_id(link.peer_id),
            )
        if arriving.asked is not None:
            link.reply(arriving.asked, self._said(acceptance, arriving.standing[0], offered))

    def _said(self, acceptance: Acceptance, epoch: int, offered: Offers) -> dict[str, Any]:
        answer = _answer(acceptance)
        if acceptance is Acceptance.COUNTED:
            answer["counted"] = self._counted(epoch, dict(offered))
        return answer

    def link_down(self, link: int) -> None:
        """What was not whole yet is dropped, at either end."""
        self._handed_over.discard(link)
        if self._carrying is not None and self._sending is not None and self._sending[0] == link:
            self._carrying.cancel()
        for transfer in [t for t, arriving in self._arriving.items() if arriving.link.id == link]:
            self._forget(transfer)

    def _forget(self, transfer: int) -> None:
        del self._arriving[transfer]
        self._engine.cancel(transfer)


_SAID = (Acceptance.LATER, Acceptance.BEHIND, Acceptance.COUNTED)


def _answer(acceptance: Acceptance) -> dict[str, Any]:
    answer: dict[str, Any] = {"taken": acceptance is Acceptance.TAKEN}
    if acceptance in _SAID:
        answer["why"] = acceptance.value
    return answer


def _acceptance(answer: Mapping[str, Any]) -> Acceptance:
    if answer.get("taken") is True:
        return Acceptance.TAKEN
    why = answer.get("why")
    return next((acceptance for acceptance in _SAID if acceptance.value == why), Acceptance.NEVER)


def _offers(value: Any) -> Offers | None:
    """None: malformed."""
    if type(value) not in (list, tuple) or len(value) > MOST_OFFERS:
        return None
    sound = all(
        type(each) in (list, tuple)
        and len(each) == 2
        and all(type(n) is int for n in each)
        and 0 <= each[0] < 2**63
        and each[1] >= 0
        for each in value
    )
    return tuple((transfer, samples) for transfer, samples in value) if sound else None


def _hash(data: U8) -> bytes:
    return hashlib.blake2b(data.data, digest_size=32).digest()
