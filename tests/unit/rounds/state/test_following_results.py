"""Results that come after a state: fetched in order, checked as a whole, from whoever keeps them."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from p2pavg import codecs, native
from p2pavg.allreduce.encoded import EncodedResult
from p2pavg.errors import StateError
from p2pavg.plan.part import Part
from p2pavg.rounds.protocol.ballot import Ballot
from p2pavg.rounds.protocol.lineage import next_lineage
from p2pavg.rounds.protocol.roles import Seat
from p2pavg.rounds.state import collecting
from p2pavg.rounds.state.following import Following
from p2pavg.rounds.state.inbox import Inbox
from p2pavg.rounds.state.manifest import chunk_bytes
from p2pavg.rounds.state.results import ResultHead
from p2pavg.rounds.state.trust import heads, patience
from p2pavg.rounds.state.trust.record import Record

NUMEL = 100_000
CODEC = codecs.get("fp16")
START = b"s" * 32
PEERS = (b"p" * 20, b"q" * 20)
PARTS = (Part(0, 0, 60_000), Part(1, 60_000, NUMEL - 60_000))


def result(epoch: int, before: bytes) -> tuple[ResultHead, np.ndarray]:
    """A round of two, and its encoded bytes."""
    blank = ResultHead(
        Ballot(epoch, 0, PEERS[0], 7, before),
        epoch,
        tuple(Seat(peer, True) for peer in PEERS),
        PARTS,
        False,
        (1.0, 2.0),
        (1, 2),
        (),
        b"",
        before,
        b"",
    )
    layout = blank.layout(CODEC)
    vector = np.random.default_rng(epoch).standard_normal(NUMEL).astype(np.float32)
    data, at = np.empty(layout.nbytes, np.uint8), 0
    digests = []
    for part in PARTS:
        crcs = b""
        for begin in range(0, part.count, layout.chunk_elements):
            count = min(layout.chunk_elements, part.count - begin)
            size = CODEC.encoded_size(count)
            start = part.start + begin
            CODEC.encode(vector[start : start + count], data[at : at + size], 1.0)
            crcs += native.crc32(data[at : at + size]).to_bytes(4, "little")
            at += size
        digests.append(hashlib.sha256(crcs).digest())
    after = next_lineage(before, epoch, PEERS, (1.0, 2.0), digests, b"")
    fields = {name: getattr(blank, name) for name in ResultHead.__slots__}
    return ResultHead(**(fields | {"digests": tuple(digests), "lineage": after})), data


def chain(count: int) -> list[tuple[ResultHead, np.ndarray]]:
    made: list[tuple[ResultHead, np.ndarray]] = []
    for epoch in range(3, 3 + count):
        made.append(result(epoch, made[-1][0].lineage if made else START))
    return made


BEHIND = 60_000_000  # bytes of other things that come first


class Network:
    """An engine, and links to donors that put what is asked for in place at once."""

    def __init__(self, kept: list[tuple[ResultHead, np.ndarray]], donors: dict[bytes, str]) -> None:
        """donors: "good"; "lies": it sends other bytes; "gone": it keeps nothing any more; "loses": of what
        is asked first, half never comes; "behind": it comes when so much else has.
        """
        self.brought = 0  # bytes, over any link, besides what is asked for
        self.enough = asyncio.Event()  # so many of them that what a donor is "behind" with comes
        self.kept = {head.lineage: data for head, data in kept}
        self.buffers: dict[int, memoryview] = {}
        self.asked: list[bytes] = []
        self.was_asked = asyncio.Event()
        self.inbox = Inbox(self)  # type: ignore[arg-type]
        self.links: dict[bytes, Any] = {
            donor: SimpleNamespace(
                id=number,
                rtt_min=0.01,
                request=lambda message, timeout, donor=donor, how=how: self.request(donor, how, message),
            )
            for number, (donor, how) in enumerate(donors.items())
        }
        self.came: list[tuple[ResultHead, EncodedResult]] = []
        engine: Any = self
        self.following = Following(engine, self.inbox, self.links, NUMEL, CODEC, self.deliver, Record())

    other = 0  # bytes of other things that a link brings between two looks
    ends = False  # a stream, once something was asked for

    def streams(self, link: int) -> tuple[int, ...]:
        return (1,) if self.ends and self.asked else (0, 1)

    async def deliver(self, head: ResultHead, made: EncodedResult) -> None:
        self.came.append((head, made))

    def open_blob(self, transfer: int, buffer: memoryview, chunk_bytes: int) -> None:
        self.buffers[transfer] = buffer

    def cancel(self, transfer: int) -> None:
        self.buffers.pop(transfer, None)

    def traffic(self, link: int) -> tuple[int, int]:
        self.brought += self.other
        if self.brought >= BEHIND:
            self.enough.set()
        return 0, self.brought

    async def request(self, donor: bytes, how: str, message: Any) -> dict[str, Any]:
        self.asked.append(donor)
        self.was_asked.set()
        await asyncio.sleep(0)
        first = len(self.asked) == 1
        if how == "gone":
            return {"error": "that result is gone"}
        if how == "behind":
            self.later = asyncio.ensure_future(self.give(how, first, message))
        else:
            await self.give(how, first, message)
        return {"t": "ok"}

    async def give(self, how: str, first: bool, message: Any) -> None:
        if how == "behind":
            await self.enough.wait()
        data, buffer = self.kept[message["lineage"]], self.buffers.get(message["transfer"])
        size = chunk_bytes(data.nbytes)
        for chunk in message["chunks"][:: 2 if how == "loses" and first else 1]:
            if buffer is not None:
                piece = bytearray(data[chunk * size : (chunk + 1) * size])
                piece[0] ^= how == "lies"
                buffer[chunk * size : chunk * size + len(piece)] = piece
                self.inbox.chunk(message["transfer"], chunk)

    def tell(self, donor: bytes, head: ResultHead) -> None:
        self.following.told(donor, head.to_message())

    async def run(self, count: int) -> None:
        """Until so many have come. Raises what `Following.run` raises."""
        running = asyncio.ensure_future(self.following.run())
        try:
            async with asyncio.timeout(20):
                while len(self.came) < count and not running.done():
                    await asyncio.wait((running,), timeout=0.01)
            if running.done():
                running.result()
        finally:
            running.cancel()


def test_a_newcomer_knows_how_large_a_result_will_be() -> None:
    """Before it is told of one, too: rounds may have waited for it since its first question."""
    assert Network([], {}).following.result_bytes == CODEC.encoded_size(NUMEL)


async def test_results_come_in_order_whatever_was_told_first() -> None:
    """Told backwards, by two donors, before the state is known: they are delivered one after the other."""
    made = chain(6)
    network = Network(made, {b"a": "good", b"b": "good"})
    for head, _ in reversed(made):
        network.tell(b"a", head)
        network.tell(b"b", head)
    assert network.following.lacking() == []
    network.following.begin((3, START))
    assert len(network.following.lacking()) == 6
    await network.run(6)
    assert [head for head, _ in network.came] == [head for head, _ in made]
    for (_, got), (_, data) in zip(network.came, made, strict=True):
        assert np.array_equal(got.data, data)
    assert network.following.standing == (9, made[-1][0].lineage)
    assert network.following.fetched == 6


async def test_a_donor_that_sends_other_bytes_spoils_no_result() -> None:
    """Bytes that do not fit the digests of the round are not delivered; the other donor's are."""
    made = chain(1)
    network = Network(made, {b"a": "lies", b"b": "good"})
    for donor in network.links:
        network.tell(donor, made[0][0])
    network.following.begin((3, START))
    await network.run(1)
    assert np.array_equal(network.came[0][1].data, made[0][1])


@pytest.mark.parametrize("donors", [{b"a": "lies"}, {b"a": "gone"}, {b"a": "lies", b"b": "gone"}, {}])
async def test_a_result_that_nobody_has_is_an_error(donors: dict[bytes, str]) -> None:
    """When no donor can give a known result, the download says so, and nothing wrong is delivered."""
    made = chain(1)
    network = Network(made, donors)
    for donor in donors or {b"x": ""}:
        network.tell(donor, made[0][0])
    network.following.begin((3, START))
    with pytest.raises(StateError, match="nobody keeps"):
        await network.run(1)
    assert network.came == []


def forged(head: ResultHead, mark: bytes = b"f") -> ResultHead:
    """Another result that follows on the same, of which there are no bytes."""
    digests = tuple(mark * len(digest) for digest in head.digests)
    after = next_lineage(head.before, head.epoch, PEERS, head.weights, digests, b"")
    return replace(head, digests=digests, lineage=after)


@pytest.mark.parametrize("how", ["gone", "lies"])
async def test_a_forged_result_that_is_told_first_keeps_nobody_from_the_true_one(how: str) -> None:
    """A donor tells of results that there are not, before anybody tells of the true ones. What most donors
    tell of comes first; against a single honest donor it is found out once, and counts for nothing after.
    """
    made = chain(3)
    for honest in ({b"a": "good"}, {b"a": "good", b"b": "good"}):
        network = Network(made, {b"l": how, **honest})
        for head, data in made:
            other = forged(head)
            network.kept[other.lineage] = data
            network.tell(b"l", other)
            network.tell(b"l", forged(head, b"g"))  # its first word counts, and no other one
            for donor in honest:
                network.tell(donor, head)
        network.following.begin((3, START))
        await network.run(3)
        assert [head for head, _ in network.came] == [head for head, _ in made]
        assert network.asked.count(b"l") <= (1 if len(honest) == 1 else 0)


async def test_a_forged_result_gives_way_once_most_tell_of_another() -> None:
    """The true one is told of while the forged one, which never comes, is waited for."""
    made = chain(1)
    network = Network(made, {b"l": "behind", b"a": "good", b"b": "good"})
    network.tell(b"l", forged(made[0][0]))
    network.following.begin((3, START))
    running = asyncio.ensure_future(network.run(1))
    async with asyncio.timeout(10):
        await network.was_asked.wait()
    for donor in (b"a", b"b"):
        network.tell(donor, made[0][0])
    await running
    assert [head for head, _ in network.came] == [made[0][0]]


def test_a_donor_that_tells_without_end_stops_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is for what each donor tells: others still tell of what they keep."""
    monkeypatch.setattr(heads, "MOST_KNOWN", 2)
    made = chain(3)
    network = Network(made, {b"a": "good", b"l": "good"})
    for head, _ in made[:2]:
        network.tell(b"l", head)
    with pytest.raises(StateError, match="more results"):
        network.tell(b"l", made[2][0])
    network.tell(b"a", made[0][0])


@pytest.mark.parametrize("sign", ["silence", "others came", "a stream ended"])
async def test_what_a_broken_stream_lost_is_asked_for_again(
    sign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that do not come are asked for again: when nothing comes, when much else has come since, or soon
    after a stream that may have had them has ended.
    """
    monkeypatch.setattr(collecting, "QUIET_S", 0.01 if sign == "silence" else 60.0)
    monkeypatch.setattr(collecting, "ENDED_S", 0.01)
    made = chain(1)
    network = Network(made, {b"a": "loses"})
    network.other = 10_000_000 if sign == "others came" else 0
    network.ends = sign == "a stream ended"
    network.tell(b"a", made[0][0])
    network.following.begin((3, START))
    await network.run(1)
    assert np.array_equal(network.came[0][1].data, made[0][1])
    assert len(network.asked) >= 2


@pytest.mark.parametrize("nothing", [{b"l": "behind"}, {b"l": "behind", b"a": "good"}])
async def test_a_donor_whose_link_brings_something_else_is_not_waited_for(
    nothing: dict[bytes, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its link moves, and nothing of what it owes comes: it loses its place within seconds, whoever else is
    there.
    """
    monkeypatch.setattr(patience, "ANSWER_S", 0.5)
    made = chain(1)
    network = Network(made, nothing)
    network.other = collecting.LEAST_BYTES
    for donor in nothing:
        network.tell(donor, made[0][0])
    network.following.begin((3, START))
    async with asyncio.timeout(10):
        if len(nothing) == 1:
            with pytest.raises(StateError, match="nobody keeps"):
                await network.run(1)
        else:
            await network.run(1)


@pytest.mark.parametrize("owed", [20_000_000, 0])
async def test_what_waits_behind_other_things_is_asked_for_once(owed: int) -> None:
    """A donor sends what it was asked for in turn: a result that comes after many bytes of the state, as it
    must, is not taken for lost, or it would come twice and the donor would take the asker for one that never
    has enough. When nothing else is owed, it is asked for again.
    """
    made = chain(1)
    network = Network(made, {b"a": "behind"})
    network.other = 1_000_000
    network.tell(b"a", made[0][0])
    network.following.begin((3, START))
    with network.inbox.open(np.zeros(4, np.uint8), 4) as state:
        state.owed[b"a"] = owed
        await network.run(1)
    assert (len(network.asked) == 1) is (owed > 0)


async def test_a_donor_that_is_lost_is_not_asked() -> None:
    """What a donor said it keeps does not count any more once it is gone."""
    made = chain(2)
    network = Network(made, {b"a": "good", b"b": "good"})
    for head, _ in made:
        network.tell(b"a", head)
        network.tell(b"b", head)
    network.following.lost(b"a")
    network.following.begin((3, START))
    await network.run(2)
    assert set(network.asked) == {b"b"}


@pytest.mark.parametrize("field", ["weights", "samples", "digests", "before", "lineage", "parts", "exact"])
def test_a_head_that_contradicts_itself_is_refused(field: str) -> None:
    """The lineage is a hash over what made it, so nothing of that can be changed; parts cover the vector."""
    (head, _), *_ = chain(1)
    changed: dict[str, Any] = {
        "weights": (1.0, 3.0),
        "samples": (1, 2, 3),
        "digests": (b"x" * 32, b"y" * 32),
        "before": b"z" * 32,
        "lineage": b"z" * 32,
        "parts": PARTS[:1],
        "exact": 7,
    }
    fields = {name: getattr(head, name) for name in ResultHead.__slots__}
    forged = ResultHead(**(fields | {field: changed[field]}))
    with pytest.raises(StateError):
        ResultHead.from_message(forged.to_message(), NUMEL)
    assert ResultHead.from_message(head.to_message(), NUMEL) == head


def test_a_head_of_gathered_contributions() -> None:
    """Of an all-gather a newcomer knows what each part counts; parts of other lengths, or two of one member,
    are no such result.
    """
    weights, digests = (1.0, 3.0), (b"d" * 32, b"e" * 32)
    codec = codecs.get("sparse-64")

    def message(*parts: Part) -> dict[str, Any]:
        after = next_lineage(START, 3, PEERS, weights, digests, b"")
        seats = tuple(Seat(peer, True) for peer in PEERS)
        ballot = Ballot(3, 0, PEERS[0], 7, START)
        head = ResultHead(ballot, 3, seats, parts, False, weights, (1, 3), digests, b"", START, after)
        return head.to_message()

    head = ResultHead.from_message(message(Part(0, 0, NUMEL), Part(1, NUMEL, NUMEL)), NUMEL, gathered=True)
    layout = head.layout(codec)
    assert (layout.numel, layout.shares) == (NUMEL, (0.25, 0.75))
    assert layout.nbytes == 2 * codec.encoded_size(NUMEL)
    for parts in (PARTS, (Part(0, 0, NUMEL), Part(0, NUMEL, NUMEL)), (Part(0, 0, NUMEL),)):
        with pytest.raises(StateError):
            ResultHead.from_message(message(*parts), NUMEL, gathered=True)
