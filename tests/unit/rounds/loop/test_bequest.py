"""A leaving peer's bequest, between two fakes: what is offered, refused, carried and dropped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from p2pavg import codecs
from p2pavg.errors import UnreachableError
from p2pavg.rounds.loop import bequest
from p2pavg.rounds.loop.bequest import MOST_AT_ONCE, Bequests
from p2pavg.rounds.machine.departure import Verdict
from p2pavg.rounds.machine.events import Bequeathed
from p2pavg.rounds.training import Contribution, Inheritance

NUMEL = 700_000  # several chunks
HERE = (5, b"l" * 32)
OFFERS = ((77, 12), (78, 4))


class Side:
    """One peer: its engine hands chunks over to the other's, and its link carries messages there."""

    def __init__(self, accept: bool = True, codec: str = "fp16") -> None:
        self.other: Side
        self.id = 1
        self.peer_id = b"p" * 20
        self.taken: list[Inheritance] = []
        self.took = asyncio.Event()
        self.inherited: list[tuple[int, tuple[tuple[int, int], ...]]] = []
        self.at_the_end: Callable[[dict[str, Any]], None] = lambda message: None  # before it is told that
        self.blobs: dict[int, tuple[memoryview, int]] = {}
        self.lost_chunk: int | None = None
        self.closed = False
        self.answers: list[Any] = []
        self.asked = 0
        self.refusals: dict[int, Verdict] = {}  # by the how many-th question whether it takes something
        self.silences = 0  # so many answers come too late
        self.most = 1000  # samples that a leaver can have
        self.bequests = Bequests(
            self,  # type: ignore[arg-type]
            {b"heir": self},  # type: ignore[dict-item]
            codecs.get(codec),
            NUMEL,
            lambda epoch, lineage, transfers: self.judge(accept and (epoch, lineage) == HERE),
            lambda epoch, transfers: next(iter(transfers)) if epoch == HERE[0] else None,
            lambda samples: samples <= self.most,
            lambda inheritance, epoch, offers: (
                self.taken.append(inheritance),
                self.inherited.append((epoch, offers)),
                self.took.set(),
            ),
        )

    def judge(self, accept: bool) -> Verdict:
        self.asked += 1
        return self.refusals.get(self.asked, Verdict.TAKEN) if accept else Verdict.NEVER

    # As an engine.

    def open_blob(self, transfer: int, buffer: memoryview, chunk_bytes: int) -> None:
        self.blobs[transfer] = (buffer, chunk_bytes)

    def cancel(self, transfer: int) -> None:
        self.blobs.pop(transfer, None)

    def send_blob(self, link: int, transfer: int, chunk: int, data: memoryview) -> None:
        def arrive() -> None:
            blob = self.other.blobs.get(transfer)
            if blob is not None and chunk != self.lost_chunk:
                buffer, size = blob
                buffer[chunk * size : chunk * size + len(data)] = data
                self.other.bequests.chunk(transfer)
            self.bequests.sent(link, transfer)

        asyncio.get_running_loop().call_soon(arrive)

    # As a link: of the one that leaves to send requests, of the heir to answer them.

    async def request(self, message: dict[str, Any], timeout: float) -> Any:
        if self.closed:
            raise UnreachableError("the link is closed")
        if message["t"] == "bequest-end":
            self.other.at_the_end(message)
            if self.closed:
                self.other.bequests.message(self.other, {**message, "_answer": asyncio.Future()})  # type: ignore[arg-type]
                raise UnreachableError("the link is gone")
        answer = asyncio.get_running_loop().create_future()
        self.other.answers.append(answer)
        self.other.bequests.message(self.other, {**message, "_answer": answer})  # type: ignore[arg-type]
        async with asyncio.timeout(timeout):
            return await answer

    def reply(self, request: dict[str, Any], message: dict[str, Any]) -> None:
        if self.silences:
            self.silences -= 1
        elif not request["_answer"].done():
            request["_answer"].set_result(message)


def pair(**heir: Any) -> tuple[Side, Side]:
    leaver, other = Side(codec=heir.get("codec", "fp16")), Side(**heir)
    leaver.other, other.other = other, leaver
    return leaver, other


def contribution() -> Contribution:
    return Contribution(np.random.default_rng(1).standard_normal(NUMEL).astype(np.float32), 0.5, 12)


async def given(leaver: Side, what: Contribution | None = None, seconds: float = 10.0) -> Bequeathed:
    deadline = time.monotonic() + seconds
    return await leaver.bequests.give([b"nobody", b"heir"], what or contribution(), HERE, OFFERS, deadline)


async def give(leaver: Side, what: Contribution | None = None, seconds: float = 10.0) -> bool:
    return (await given(leaver, what, seconds)).taken


@pytest.mark.parametrize("codec", ["none", "fp16", "bf16", "int8", "int4"])
async def test_the_heir_gets_mean_and_samples(codec: str) -> None:
    """The heir decodes the leaver's mean, as precisely as the codec is (int8 and int4 go as fp16)."""
    leaver, heir = pair(codec=codec)
    assert await give(leaver)
    (inheritance,) = heir.taken
    assert inheritance.samples == 12
    out = np.empty(NUMEL, np.float32)
    inheritance.result.decode_into(out)
    gradient = contribution().gradient
    assert isinstance(gradient, np.ndarray)
    assert np.abs(out - 0.5 * gradient).max() <= (1e-2 if codec == "bf16" else 2e-3)
    assert not heir.blobs


async def test_who_stands_elsewhere_takes_nothing() -> None:
    """A heir that the machine forbids refuses; the samples stay with the leaver."""
    leaver, heir = pair(accept=False)
    assert not await give(leaver)
    assert not heir.taken
    assert not heir.blobs


async def test_samples_that_nobody_can_have_are_not_taken() -> None:
    """Neither when they are offered nor, where the heir has got others meanwhile, when all is there."""
    leaver, heir = pair()
    heir.most = 11
    assert not await give(leaver)
    assert not heir.blobs
    heir.most, heir.at_the_end = 12, lambda message: setattr(heir, "most", 11)
    assert not await give(leaver)
    assert not heir.taken


async def test_a_peer_leaves_once() -> None:
    """Over one link a second bequest is not taken: a leaver has nothing more."""
    leaver, heir = pair()
    assert await give(leaver)
    assert not await give(leaver)
    assert len(heir.taken) == 1


async def test_the_next_heir_is_asked_when_one_changes_its_mind() -> None:
    """An heir that leaves itself before all is there says no at the end: the next one takes it, once."""
    leaver, heir = pair()
    heir.refusals = {2: Verdict.NEVER}
    what, deadline = contribution(), time.monotonic() + 10
    assert (await leaver.bequests.give([b"heir", b"heir"], what, HERE, (), deadline)).taken
    assert len(heir.taken) == 1
    assert heir.asked == 4
    assert not heir.blobs


async def test_an_heir_that_is_on_its_way_is_asked_again() -> None:
    """An heir that has not yet heard of the epoch takes the samples as soon as it has, once."""
    leaver, heir = pair()
    heir.refusals = {1: Verdict.LATER, 2: Verdict.LATER, 4: Verdict.LATER}
    assert await give(leaver)
    assert len(heir.taken) == 1
    assert heir.asked == 6
    assert not heir.blobs


async def test_an_heir_whose_answer_is_late_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to the offer does not come in time: the second offer replaces the first at the heir."""
    monkeypatch.setattr(bequest, "ANSWER_S", 0.05)
    leaver, heir = pair()
    heir.silences = 1
    assert await give(leaver)
    assert len(heir.taken) == 1
    assert not heir.blobs


async def test_the_heir_is_told_which_transfers_had_the_samples() -> None:
    """What the leaver offered is the heir's from then on."""
    leaver, heir = pair()
    assert await give(leaver)
    assert heir.inherited == [(HERE[0], OFFERS)]


@pytest.mark.parametrize("question", [1, 2])
async def test_what_is_counted_is_not_given(question: int) -> None:
    """An heir knows that a transfer which had the samples was averaged, before they come or when they are
    there: nobody takes them, and the leaver is told which.
    """
    leaver, heir = pair()
    heir.refusals = {question: Verdict.COUNTED}
    assert await given(leaver) == Bequeathed(taken=False, counted=77)
    assert heir.asked == question
    assert not heir.taken
    assert not heir.blobs


@pytest.mark.parametrize("lost", ["the answer", "the link"])
async def test_a_bequest_whose_answer_is_lost_goes_to_nobody_else(lost: str) -> None:
    """An heir that has all of it took it, and its answer never came: no other heir is offered the samples."""
    leaver, heir = pair()
    what, deadline = contribution(), time.monotonic() + 3.0

    def lose(_: dict[str, Any]) -> None:
        if lost == "the answer":
            heir.silences = 1
        else:
            leaver.closed = True

    heir.at_the_end = lose
    outcome = await leaver.bequests.give([b"heir", b"heir", b"heir"], what, HERE, OFFERS, deadline)
    assert outcome == Bequeathed(taken=False, unknown=True)
    async with asyncio.timeout(10.0):
        await heir.took.wait()
    assert len(heir.taken) == 1


async def test_an_heir_that_is_lost_before_the_end_is_passed_over() -> None:
    """The link breaks while the samples are on their way: without its end the heir cannot take them, and
    another one gets them.
    """
    leaver, heir = pair()
    send = leaver.bequests._engine.send_blob

    def breaks(link: int, transfer: int, chunk: int, data: memoryview) -> None:
        leaver.bequests._engine.send_blob = send  # type: ignore[method-assign]
        leaver.bequests.link_down(leaver.id)

    leaver.bequests._engine.send_blob = breaks  # type: ignore[method-assign]
    what, deadline = contribution(), time.monotonic() + 10.0
    assert (await leaver.bequests.give([b"heir", b"heir"], what, HERE, OFFERS, deadline)).taken
    assert len(heir.taken) == 1


async def test_the_end_of_the_notice_ends_the_asking() -> None:
    """An heir that never gets there is asked until the deadline; too old samples are given up at once."""
    leaver, heir = pair()
    heir.refusals = dict.fromkeys(range(1, 100), Verdict.LATER)
    begun = time.monotonic()
    assert await given(leaver, seconds=2.0) == Bequeathed(taken=False)
    assert time.monotonic() - begun >= 2.0
    assert heir.asked > 1
    heir.asked, heir.refusals = 0, {1: Verdict.BEHIND}
    assert await given(leaver) == Bequeathed(taken=False, behind=True)
    assert heir.asked == 1


async def test_a_gradient_that_is_not_finite_goes_nowhere() -> None:
    """NaN in the sums: nobody is offered them."""
    leaver, heir = pair()
    bad = contribution()
    assert isinstance(bad.gradient, np.ndarray)
    bad.gradient[3] = np.nan
    assert not await give(leaver, bad)
    assert not heir.answers


async def test_the_end_of_the_notice_ends_the_wait() -> None:
    """A chunk never arrives: at the deadline the leaver gives up, and a lost link frees the heir's memory."""
    leaver, heir = pair()
    leaver.lost_chunk = 1
    assert not await give(leaver, seconds=2.0)
    assert not heir.taken
    assert heir.blobs
    heir.bequests.link_down(heir.id)
    assert not heir.blobs


async def test_bytes_that_do_not_fit_their_hash_are_dropped() -> None:
    """The hash of what arrived is not the one that was offered: not taken, and the leaver is told."""
    leaver, heir = pair()
    offer = {
        "t": "bequest",
        "epoch": HERE[0],
        "lineage": HERE[1],
        "samples": 3,
        "note": b"",
        "offered": [[7, 3]],
        "bytes": heir.bequests.nbytes,
        "hash": b"wrong" * 6 + b"xx",
    }
    transfer = (await leaver.request(offer, 1.0))["transfer"]
    buffer, size = heir.blobs[transfer]
    for _ in range(0, len(buffer), size):
        heir.bequests.chunk(transfer)
    assert await leaver.request({"t": "bequest-end", "transfer": transfer}, 5.0) == {"taken": False}
    assert not heir.taken
    assert not heir.blobs


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": "5"},
        {"epoch": None},
        {"lineage": 7},
        {"lineage": b"other"},
        {"samples": 0},
        {"samples": -1},
        {"samples": 1 << 60},
        {"samples": 1.5},
        {"samples": True},
        {"bytes": 1 << 50},
        {"bytes": None},
        {"hash": "text"},
        {"hash": None},
        {"note": None},
        {"note": bytes(1 << 20)},
        {"offered": None},
        {"offered": [7]},
        {"offered": [[7, 4]]},
        {"offered": [[7, -1]]},
        {"offered": [[1 << 63, 1]]},
        {"offered": [[7, True]]},
        {"offered": [[7, 1]] * 2000},
    ],
)
async def test_malformed_offers_cost_nothing(change: dict[str, Any]) -> None:
    """Whatever a peer claims, nothing is allocated for it, and it is told no."""
    leaver, heir = pair()
    offer = {
        "t": "bequest",
        "epoch": HERE[0],
        "lineage": HERE[1],
        "samples": 3,
        "note": b"",
        "offered": [[7, 3]],
        "bytes": heir.bequests.nbytes,
        "hash": b"h" * 32,
    }
    assert await leaver.request({**offer, **change}, 1.0) == {"taken": False}
    assert not heir.blobs
    assert "transfer" in await leaver.request(offer, 1.0)
    assert "transfer" in await leaver.request(offer, 1.0)  # one at a time for each link: the last one
    assert len(heir.blobs) == 1 < MOST_AT_ONCE
    for transfer in (None, "x", 5, -1):
        assert await leaver.request({"t": "bequest-end", "transfer": transfer}, 1.0) == {"taken": False}
    heir.bequests.close()
    assert not heir.blobs
