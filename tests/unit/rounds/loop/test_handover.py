"""A departing peer's handover, between two fakes: what is offered, refused, carried and dropped."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from p2pavg import codecs
from p2pavg.errors import UnreachableError
from p2pavg.rounds.loop import handover
from p2pavg.rounds.loop.handover import MOST_AT_ONCE, Handovers
from p2pavg.rounds.machine.departure import Acceptance
from p2pavg.rounds.machine.events import HandedOver
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
        self.refusals: dict[int, Acceptance] = {}  # by the how many-th question whether it takes something
        self.silences = 0  # so many answers come too late
        self.most = 1000  # samples that a departing peer can have
        self.handovers = Handovers(
            self,  # type: ignore[arg-type]
            {b"receiver": self},  # type: ignore[dict-item]
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

    def judge(self, accept: bool) -> Acceptance:
        self.asked += 1
        return self.refusals.get(self.asked, Acceptance.TAKEN) if accept else Acceptance.NEVER

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
                self.other.handovers.chunk(transfer)
            self.handovers.sent(link, transfer)

        asyncio.get_running_loop().call_soon(arrive)

    # As a link: of the one that leaves to send requests, of the receiver to answer them.

    async def request(self, message: dict[str, Any], timeout: float) -> Any:
        if self.closed:
            raise UnreachableError("the link is closed")
        if message["t"] == "handover-end":
            self.other.at_the_end(message)
            if self.closed:
                self.other.handovers.message(self.other, {**message, "_answer": asyncio.Future()})  # type: ignore[arg-type]
                raise UnreachableError("the link is gone")
        answer = asyncio.get_running_loop().create_future()
        self.other.answers.append(answer)
        self.other.handovers.message(self.other, {**message, "_answer": answer})  # type: ignore[arg-type]
        async with asyncio.timeout(timeout):
            return await answer

    def reply(self, request: dict[str, Any], message: dict[str, Any]) -> None:
        if self.silences:
            self.silences -= 1
        elif not request["_answer"].done():
            request["_answer"].set_result(message)


def pair(**receiver: Any) -> tuple[Side, Side]:
    departing, other = Side(codec=receiver.get("codec", "fp16")), Side(**receiver)
    departing.other, other.other = other, departing
    return departing, other


def contribution() -> Contribution:
    return Contribution(np.random.default_rng(1).standard_normal(NUMEL).astype(np.float32), 0.5, 12)


async def given(departing: Side, what: Contribution | None = None, seconds: float = 10.0) -> HandedOver:
    deadline = time.monotonic() + seconds
    return await departing.handovers.give(
        [b"nobody", b"receiver"], what or contribution(), HERE, OFFERS, deadline
    )


async def give(departing: Side, what: Contribution | None = None, seconds: float = 10.0) -> bool:
    return (await given(departing, what, seconds)).taken


@pytest.mark.parametrize("codec", ["none", "fp16", "bf16", "int8", "int4"])
async def test_the_receiver_gets_mean_and_samples(codec: str) -> None:
    """The receiver decodes the departing peer's mean, as precisely as the codec is (int8 and int4 go as
    fp16).
    """
    departing, receiver = pair(codec=codec)
    assert await give(departing)
    (inheritance,) = receiver.taken
    assert inheritance.samples == 12
    out = np.empty(NUMEL, np.float32)
    inheritance.result.decode_into(out)
    gradient = contribution().gradient
    assert isinstance(gradient, np.ndarray)
    assert np.abs(out - 0.5 * gradient).max() <= (1e-2 if codec == "bf16" else 2e-3)
    assert not receiver.blobs


async def test_who_stands_elsewhere_takes_nothing() -> None:
    """A receiver that the machine forbids refuses; the samples stay with the departing peer."""
    departing, receiver = pair(accept=False)
    assert not await give(departing)
    assert not receiver.taken
    assert not receiver.blobs


async def test_samples_that_nobody_can_have_are_not_taken() -> None:
    """Neither when they are offered nor, where the receiver has got others meanwhile, when all is there."""
    departing, receiver = pair()
    receiver.most = 11
    assert not await give(departing)
    assert not receiver.blobs
    receiver.most, receiver.at_the_end = 12, lambda message: setattr(receiver, "most", 11)
    assert not await give(departing)
    assert not receiver.taken


async def test_a_peer_leaves_once() -> None:
    """Over one link a second handover is not taken: a departing peer has nothing more."""
    departing, receiver = pair()
    assert await give(departing)
    assert not await give(departing)
    assert len(receiver.taken) == 1


def offer_to(receiver: Side, digest: bytes) -> dict[str, Any]:
    """Three samples, as a departing peer offers them."""
    return {
        "t": "handover",
        "epoch": HERE[0],
        "lineage": HERE[1],
        "samples": 3,
        "note": b"",
        "offered": [[7, 3]],
        "bytes": receiver.handovers.nbytes,
        "hash": digest,
    }


async def test_a_receiver_takes_in_few_at_a_time() -> None:
    """Whoever leaves when there is no room for its gradient is asked to come again later."""
    _, receiver = pair()
    offer = offer_to(receiver, b"h" * 32)
    answers = []
    for number in range(MOST_AT_ONCE + 2):
        from_another = copy.copy(receiver)
        from_another.id = number
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        receiver.handovers.message(from_another, {**offer, "_answer": answered})  # type: ignore[arg-type]
        answers.append(await answered)
    assert ["transfer" in answer for answer in answers] == [True] * MOST_AT_ONCE + [False] * 2
    assert len(receiver.blobs) == MOST_AT_ONCE
    assert answers[-1]["why"] == Acceptance.LATER.value
    receiver.handovers.close()


async def test_the_next_receiver_is_asked_when_one_changes_its_mind() -> None:
    """A receiver that leaves itself before all is there says no at the end: the next one takes it, once."""
    departing, receiver = pair()
    receiver.refusals = {2: Acceptance.NEVER}
    what, deadline = contribution(), time.monotonic() + 10
    assert (await departing.handovers.give([b"receiver", b"receiver"], what, HERE, (), deadline)).taken
    assert len(receiver.taken) == 1
    assert receiver.asked == 4
    assert not receiver.blobs


async def test_a_receiver_that_is_on_its_way_is_asked_again() -> None:
    """A receiver that has not yet heard of the epoch takes the samples as soon as it has, once."""
    departing, receiver = pair()
    receiver.refusals = {1: Acceptance.LATER, 2: Acceptance.LATER, 4: Acceptance.LATER}
    assert await give(departing)
    assert len(receiver.taken) == 1
    assert receiver.asked == 6
    assert not receiver.blobs


async def test_a_receiver_whose_answer_is_late_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to the offer does not come in time: the second offer replaces the first at the receiver."""
    monkeypatch.setattr(handover, "ANSWER_S", 0.05)
    departing, receiver = pair()
    receiver.silences = 1
    assert await give(departing)
    assert len(receiver.taken) == 1
    assert not receiver.blobs


async def test_the_receiver_is_told_which_transfers_had_the_samples() -> None:
    """What the departing peer offered is the receiver's from then on."""
    departing, receiver = pair()
    assert await give(departing)
    assert receiver.inherited == [(HERE[0], OFFERS)]


@pytest.mark.parametrize("question", [1, 2])
async def test_what_is_counted_is_not_given(question: int) -> None:
    """A receiver knows that a transfer which had the samples was averaged, before they come or when they are
    there: nobody takes them, and the departing peer is told which.
    """
    departing, receiver = pair()
    receiver.refusals = {question: Acceptance.COUNTED}
    assert await given(departing) == HandedOver(taken=False, counted=77)
    assert receiver.asked == question
    assert not receiver.taken
    assert not receiver.blobs


@pytest.mark.parametrize("lost", ["the answer", "the link"])
async def test_a_handover_whose_answer_is_lost_goes_to_nobody_else(lost: str) -> None:
    """A receiver that has all of it took it, and its answer never came: no other receiver is offered
    the samples.
    """
    departing, receiver = pair()
    what, deadline = contribution(), time.monotonic() + 3.0

    def lose(_: dict[str, Any]) -> None:
        if lost == "the answer":
            receiver.silences = 1
        else:
            departing.closed = True

    receiver.at_the_end = lose
    outcome = await departing.handovers.give(
        [b"receiver", b"receiver", b"receiver"], what, HERE, OFFERS, deadline
    )
    assert outcome == HandedOver(taken=False, unknown=True)
    async with asyncio.timeout(10.0):
        await receiver.took.wait()
    assert len(receiver.taken) == 1


async def test_a_receiver_that_is_lost_before_the_end_is_passed_over() -> None:
    """The link breaks while the samples are on their way: without its end the receiver cannot take them, and
    another one gets them.
    """
    departing, receiver = pair()
    send = departing.handovers._engine.send_blob

    def breaks(link: int, transfer: int, chunk: int, data: memoryview) -> None:
        departing.handovers._engine.send_blob = send  # type: ignore[method-assign]
        departing.handovers.link_down(departing.id)

    departing.handovers._engine.send_blob = breaks  # type: ignore[method-assign]
    what, deadline = contribution(), time.monotonic() + 10.0
    assert (await departing.handovers.give([b"receiver", b"receiver"], what, HERE, OFFERS, deadline)).taken
    assert len(receiver.taken) == 1


async def test_the_end_of_the_notice_ends_the_asking() -> None:
    """A receiver that never gets there is asked until the deadline; too old samples are given up at once."""
    departing, receiver = pair()
    receiver.refusals = dict.fromkeys(range(1, 100), Acceptance.LATER)
    begun = time.monotonic()
    assert await given(departing, seconds=2.0) == HandedOver(taken=False)
    assert time.monotonic() - begun >= 2.0
    assert receiver.asked > 1
    receiver.asked, receiver.refusals = 0, {1: Acceptance.BEHIND}
    assert await given(departing) == HandedOver(taken=False, behind=True)
    assert receiver.asked == 1


async def test_a_gradient_that_is_not_finite_goes_nowhere() -> None:
    """NaN in the sums: nobody is offered them."""
    departing, receiver = pair()
    bad = contribution()
    assert isinstance(bad.gradient, np.ndarray)
    bad.gradient[3] = np.nan
    assert not await give(departing, bad)
    assert not receiver.answers


async def test_the_end_of_the_notice_ends_the_wait() -> None:
    """A chunk never arrives: at the deadline the departing peer gives up, and a lost link frees the
    receiver's memory.
    """
    departing, receiver = pair()
    departing.lost_chunk = 1
    assert not await give(departing, seconds=2.0)
    assert not receiver.taken
    assert receiver.blobs
    receiver.handovers.link_down(receiver.id)
    assert not receiver.blobs


async def test_bytes_that_do_not_fit_their_hash_are_dropped() -> None:
    """The hash of what arrived is not the one that was offered: not taken, and the departing peer is told."""
    departing, receiver = pair()
    offer = offer_to(receiver, b"wrong" * 6 + b"xx")
    transfer = (await departing.request(offer, 1.0))["transfer"]
    buffer, size = receiver.blobs[transfer]
    for _ in range(0, len(buffer), size):
        receiver.handovers.chunk(transfer)
    assert await departing.request({"t": "handover-end", "transfer": transfer}, 5.0) == {"taken": False}
    assert not receiver.taken
    assert not receiver.blobs


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
    departing, receiver = pair()
    offer = offer_to(receiver, b"h" * 32)
    assert await departing.request({**offer, **change}, 1.0) == {"taken": False}
    assert not receiver.blobs
    assert "transfer" in await departing.request(offer, 1.0)
    assert "transfer" in await departing.request(offer, 1.0)  # one at a time for each link: the last one
    assert len(receiver.blobs) == 1 < MOST_AT_ONCE
    for transfer in (None, "x", 5, -1):
        assert await departing.request({"t": "handover-end", "transfer": transfer}, 1.0) == {"taken": False}
    receiver.handovers.close()
    assert not receiver.blobs
