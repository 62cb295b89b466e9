from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from p2pavg import codecs
from p2pavg.allreduce.encoded import Layout
from p2pavg.errors import ConfigurationError, StateError
from p2pavg.peer.settings import check_rate
from p2pavg.plan.part import Part
from p2pavg.rounds.protocol.ballot import Ballot
from p2pavg.rounds.protocol.lineage import next_lineage
from p2pavg.rounds.protocol.roles import Seat
from p2pavg.rounds.state import donor as donor_module
from p2pavg.rounds.state import download as download_module
from p2pavg.rounds.state.donor import Donor, StateOffer
from p2pavg.rounds.state.download import IDLE_S, STATE_SHARE, Download, Piece, queued
from p2pavg.rounds.state.manifest import chunk_bytes
from p2pavg.rounds.state.results import ResultHead
from p2pavg.rounds.state.yielding import Yielding
from p2pavg.rounds.training import Section


class Engine:
    """Hands every chunk to the kernel at once, and says so a little later."""

    donor: Donor
    live: Live
    told: list[tuple[int, dict[str, Any]]]

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []
        self.at: list[float] = []
        self.moving = False  # gradients flow
        self.goal = 0
        self.reached = asyncio.Event()

    def send_blob(self, link: int, transfer: int, chunk: int, data: memoryview) -> None:
        self.sent.append((link, chunk))
        self.at.append(time.monotonic())
        if len(self.sent) == self.goal:
            self.reached.set()
        asyncio.get_running_loop().call_soon(self.donor.sent, link, transfer)


TOTAL = 12 << 20
SIZE = chunk_bytes(TOTAL)
CHUNKS = -(-TOTAL // SIZE)


class Source:
    def snapshot(self) -> Any:
        return {}, {"values": Section.of(np.zeros(TOTAL - 100, np.uint8))}

    def load(self, meta: Any, buffers: Any) -> None:
        raise AssertionError


class Live:
    def __init__(self) -> None:
        self.standing = (3, b"l" * 32)

    @contextmanager
    def reading(self) -> Iterator[Callable[[], bool]]:
        yield lambda: True


def head(epoch: int, before: bytes) -> ResultHead:
    """Of a round of one."""
    peer, digest = b"p" * 20, b"d" * 32
    after = next_lineage(before, epoch, (peer,), (1.0,), (digest,), b"")
    layout = Layout((Part(0, 0, 100),), 4096, codecs.get("fp16"))
    commit: Any = SimpleNamespace(
        ballot=Ballot(epoch, 0, peer, epoch, before),
        transfer=epoch,
        members=(Seat(peer, True),),
        weights=(1.0,),
        samples=(1,),
        digests=(digest,),
        note=b"",
        before=before,
        lineage=after,
    )
    return ResultHead.of(commit, layout, False)


def chain(count: int) -> list[ResultHead]:
    """Results of the epochs from 3 on."""
    made: list[ResultHead] = []
    for epoch in range(3, 3 + count):
        made.append(head(epoch, made[-1].lineage if made else b"l" * 32))
    return made


RESULT = np.arange(400, dtype=np.uint16).view(np.uint8)


def donor(engine: Engine, upload_bps: float | None, keeps: int = 0) -> Donor:
    engine.told = []
    engine.live = Live()
    engine.donor = Donor(
        engine,  # type: ignore[arg-type]
        Source(),
        engine.live,
        lambda data: b"signed",
        ThreadPoolExecutor(1),
        lambda: engine.moving,
        list,
        lambda link, message: engine.told.append((link, message)),
        upload_bps=upload_bps,
        keeps=keeps,
    )
    return engine.donor


async def offered(served: Donor, link: int, **asked: Any) -> StateOffer:
    async with asyncio.timeout(20):
        while True:  # it may rest from the last snapshot
            if (offer := await served.offer(link, **asked)) is not None:
                return offer


def wanted(offer: StateOffer, transfer: int) -> dict[str, Any]:
    """All chunks of its state."""
    assert offer.manifest is not None
    return {"root": offer.manifest.root, "transfer": transfer, "chunks": list(range(CHUNKS))}


async def serve(engine: Engine, newcomers: int) -> None:
    """All newcomers ask for all chunks, until everything is sent."""
    engine.goal = newcomers * CHUNKS
    for link in range(newcomers):
        engine.donor.send(link, wanted(await offered(engine.donor, link), link))
    await asyncio.wait_for(engine.reached.wait(), 20)


async def test_a_cap_holds_for_all_newcomers_together() -> None:
    """At 400 Mb/s two downloads of 12 MiB take 24 MiB / 50 MB/s, and neither waits for the other's end."""
    engine = Engine()
    donor(engine, 400e6)
    began = time.monotonic()
    await serve(engine, 2)
    assert engine.at[-1] - began >= 0.9 * 2 * TOTAL / 50e6
    halfway = {link for link, _ in engine.sent[:CHUNKS]}
    assert halfway == {0, 1}


async def test_without_a_cap_nothing_waits() -> None:
    """No cap: the chunks go out as fast as the engine takes them, each once."""
    engine = Engine()
    donor(engine, None)
    await serve(engine, 2)
    assert sorted(engine.sent) == [(link, chunk) for link in range(2) for chunk in range(CHUNKS)]


async def test_state_waits_for_gradients() -> None:
    """While a round's gradients are on their way no state goes out; when they are through it goes on."""
    engine = Engine()
    served = donor(engine, None)
    engine.moving = True
    served.send(0, wanted(await offered(served, 0), 0))
    assert engine.sent == []
    engine.goal, engine.moving = CHUNKS, False
    await asyncio.wait_for(engine.reached.wait(), 20)


def held_share(moving: Callable[[float], bool]) -> float:
    """Of a minute, in which gradients are on their way when `moving` says so."""
    yielding, held = Yielding(0.0), 0
    for step in range(12_000):
        held += yielding.waits(step * 0.005, moving(step * 0.005))
    return held / 12_000


def test_state_does_not_wait_for_ever() -> None:
    """Where rounds follow each other without a pause, state waits for a third of the time."""
    assert held_share(lambda _: True) == pytest.approx(1 / 3, abs=0.03)


def test_state_makes_way_for_short_rounds() -> None:
    """Where gradients take a quarter of an epoch of a second, state waits for all of it."""
    assert held_share(lambda at: at % 1.0 < 0.25) == pytest.approx(0.25, abs=0.01)


async def test_what_there_is_not_is_refused() -> None:
    """Who asks for a snapshot or a result that is gone, or for a chunk that is not there, gets StateError."""
    engine = Engine()
    served = donor(engine, None)
    offer = await offered(served, 0)
    assert offer.manifest is not None
    root = offer.manifest.root
    for request in (
        {"root": b"other", "transfer": 1, "chunks": [0]},
        {"root": root, "transfer": 1, "chunks": [CHUNKS]},
        {"root": root, "transfer": -1, "chunks": [0]},
        {"root": root, "transfer": 1, "chunks": "abc"},
        {"lineage": b"n" * 32, "transfer": 1, "chunks": [0]},
        {"lineage": 7, "transfer": 1, "chunks": [0]},
    ):
        with pytest.raises(StateError):
            served.send(0, request)
    assert engine.sent == []


async def test_results_since_the_snapshot_are_kept_until_the_newcomer_has_them() -> None:
    """Each is told as it is committed, and served; what the newcomer says it has is let go."""
    engine = Engine()
    served = donor(engine, None)
    offer = await offered(served, 0)
    made = chain(3)
    for each in made:
        served.committed(each, RESULT)
    assert [(link, message["lineage"]) for link, message in engine.told] == [(0, h.lineage) for h in made]
    served.send(0, {"lineage": made[1].lineage, "transfer": 5, "chunks": [0]})
    assert engine.sent == [(0, 0)]
    served.send(0, wanted(offer, 6))  # its state is served as before
    served.has(0, 5, loaded=False)
    served.send(0, {"lineage": made[0].lineage, "transfer": 5, "chunks": [0]})  # if it has to begin anew
    served.has(0, 5, loaded=True)
    for gone in ({"lineage": made[1].lineage, "transfer": 7, "chunks": [0]}, wanted(offer, 8)):
        with pytest.raises(StateError):
            served.send(0, gone)
    served.send(0, {"lineage": made[2].lineage, "transfer": 9, "chunks": [0]})


async def test_newcomers_share_a_snapshot_and_the_results_since() -> None:
    """A second newcomer gets the first one's snapshot, and all that followed on it."""
    engine = Engine()
    served = donor(engine, None)
    first = await offered(served, 0)
    made = chain(2)
    for each in made:
        served.committed(each, RESULT)
    engine.live.standing = (5, made[-1].lineage)
    second = await offered(served, 1)
    assert second.manifest == first.manifest
    assert second.results == tuple(made)


async def test_a_snapshot_too_far_back_is_renewed_when_nobody_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With more results than a quarter of the state to follow, a newcomer gets a newer state instead."""
    monkeypatch.setattr(donor_module, "SNAPSHOT_PAUSE", 0.0)
    engine = Engine()
    served = donor(engine, None)
    await offered(served, 0)
    (made,) = chain(1)
    served.committed(made, np.zeros(TOTAL // 3, np.uint8))
    served.lost(0)
    engine.live.standing = (4, made.lineage)
    offer = await offered(served, 1)
    assert offer.manifest is not None
    assert (offer.manifest.epoch, offer.results) == (4, ())


async def test_who_comes_back_goes_on_where_it_was() -> None:
    """The snapshot of a newcomer whose link was lost is there for a while, whatever followed on it."""
    engine = Engine()
    served = donor(engine, None)
    offer = await offered(served, 0)
    assert offer.manifest is not None
    (made,) = chain(1)
    served.committed(made, np.zeros(TOTAL // 3, np.uint8))
    served.lost(0)
    engine.live.standing = (4, made.lineage)
    again = await offered(served, 3, root=offer.manifest.root)
    assert again.manifest == offer.manifest
    assert again.results == (made,)


async def test_who_has_a_state_of_the_chain_needs_results_only() -> None:
    """A peer that stands where a kept result follows is offered the results since, and no state."""
    engine = Engine()
    served = donor(engine, None)
    await offered(served, 0)
    made = chain(3)
    for each in made:
        served.committed(each, RESULT)
    offer = await offered(served, 1, have=(4, made[0].lineage))
    assert offer.manifest is None
    assert offer.results == tuple(made[1:])


async def test_who_missed_a_round_needs_its_result_only() -> None:
    """The last results are there though nobody has asked for any before; who lacks more gets the state."""
    engine = Engine()
    served = donor(engine, None, keeps=2)
    made = chain(4)
    for each in made:
        served.committed(each, RESULT)
        engine.live.standing = (each.epoch + 1, each.lineage)
        served.applied()
    offer = await offered(served, 1, have=(5, made[1].lineage))
    assert (offer.manifest, offer.results) == (None, tuple(made[2:]))
    served.send(1, {"lineage": made[2].lineage, "transfer": 5, "chunks": [0]})
    served.has(1, 7, loaded=True)
    assert (await offered(served, 2, have=(5, made[1].lineage))).results == tuple(made[2:])
    assert (await offered(served, 3, have=(4, made[0].lineage))).manifest is not None


async def test_who_was_left_out_of_a_round_needs_its_result_only() -> None:
    """It is kept for a while, as are the ones after it; else a run that keeps none keeps none."""
    engine = Engine()
    served = donor(engine, None)
    made = chain(4)
    for each in made:
        served.committed(each, RESULT, missed=each is made[1])
        engine.live.standing = (each.epoch + 1, each.lineage)
        served.applied()
    offer = await offered(served, 1, have=(4, made[0].lineage))
    assert (offer.manifest, offer.results) == (None, tuple(made[1:]))


async def test_results_are_kept_for_a_while_after_a_round_without_somebody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody came back for them: they go with the next round."""
    served, (first, second) = donor(Engine(), None), chain(2)
    served.committed(first, RESULT, missed=True)
    assert served._retained
    monkeypatch.setattr(donor_module, "IDLE_S", -1.0)
    served.committed(second, RESULT)
    assert not served._retained


async def test_who_heals_keeps_results_of_the_new_lineage() -> None:
    """Those of the one that it left are gone; the next ones are kept again."""
    engine = Engine()
    served = donor(engine, None, keeps=2)
    first, second, third = chain(3)
    served.committed(head(3, b"m" * 32), RESULT)
    engine.live.standing = (4, first.lineage)
    served.applied()
    served.committed(second, RESULT)
    served.committed(third, RESULT)
    offer = await offered(served, 1, have=(4, first.lineage))
    assert (offer.manifest, offer.results) == (None, (second, third))


async def test_idle_results_stay_within_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large results fewer are kept for whoever missed them."""
    from p2pavg.rounds.state import retained

    monkeypatch.setattr(retained, "MEMORY_BYTES", 2 * RESULT.nbytes)
    engine = Engine()
    served = donor(engine, None, keeps=3)
    for each in (made := chain(4)):
        served.committed(each, RESULT)
    engine.live.standing = (7, made[-1].lineage)
    assert (await offered(served, 1, have=(5, made[1].lineage))).manifest is None
    assert (await offered(served, 2, have=(4, made[0].lineage))).manifest is not None


async def test_a_result_larger_than_the_memory_for_idle_ones_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody has asked: nothing is written to the disk, and nothing is said."""
    from p2pavg.rounds.state import retained

    engine = Engine()
    served = donor(engine, None, keeps=3)
    first, *more = chain(4)
    served.committed(first, RESULT)
    monkeypatch.setattr(retained, "MEMORY_BYTES", RESULT.nbytes - 1)
    monkeypatch.setattr(retained, "MOST_BYTES", RESULT.nbytes - 1)
    for each in more:
        served.committed(each, RESULT)
        assert not served._retained
    assert not caplog.records


async def test_who_stands_behind_the_kept_results_gives_its_state_all_the_same() -> None:
    """Its training thread validates for longer than three epochs take: what it gives begins where it is."""
    engine = Engine()
    served = donor(engine, None, keeps=2)
    standing = engine.live.standing
    for each in chain(6):
        served.committed(each, RESULT)
    offer = await offered(served, 1)
    assert offer.manifest is not None
    assert (offer.manifest.epoch, offer.manifest.lineage) == standing


async def test_who_lacks_more_results_than_the_state_is_gets_the_state() -> None:
    """Where epochs are short, results that follow on an old state soon are many times the newest one."""
    engine = Engine()
    served = donor(engine, None)
    first = (await offered(served, 0)).manifest
    assert first is not None
    made = chain(12)
    bulky = np.zeros(first.total_bytes // 8, np.uint8)
    for each in made:
        served.committed(each, bulky)
    engine.live.standing = (made[-1].epoch + 1, made[-1].lineage)
    late = await offered(served, 1, have=(4, made[0].lineage))
    assert late.manifest is not None
    near = await offered(served, 2, have=(made[-3].epoch, made[-4].lineage))
    assert near.manifest is None
    assert near.results == tuple(made[-3:])


async def test_a_snapshot_that_takes_longer_than_an_epoch_is_offered() -> None:
    """Results that are committed while it is copied are kept for the newcomer that asked for it."""
    engine = Engine()
    served, made = donor(engine, None), chain(2)
    take, loop = served._take, asyncio.get_running_loop()

    def slow() -> Any:
        taken = take()
        for each in made:
            done = asyncio.run_coroutine_threadsafe(asyncio.to_thread(lambda: None), loop)
            loop.call_soon_threadsafe(served.committed, each, RESULT)
            done.result(20)
        return taken

    served._take = slow  # type: ignore[method-assign]
    offer = await served.offer(1)
    assert offer is not None
    assert offer.manifest is not None
    assert offer.results == tuple(made)


async def test_a_donor_that_follows_others_offers_no_chain_that_ends_too_early() -> None:
    """It was not in a round, and has its result from others: whoever stands where it stood needs more than it
    has kept, and gets a state. Whoever was at it is told.
    """
    engine = Engine()
    giver = donor(engine, None)
    await offered(giver, 1)
    engine.live.standing = (4, head(3, b"l" * 32).lineage)
    giver.applied()
    assert [message["t"] for _, message in engine.told] == ["state-gone"]
    assert (await offered(giver, 2, have=(3, b"l" * 32))).manifest is not None


async def test_a_donor_that_heals_within_an_epoch_offers_no_chain_of_the_lineage_that_it_left() -> None:
    """Whoever stands in that lineage would wait for results that never come."""
    engine = Engine()
    giver = donor(engine, None)
    await offered(giver, 1)
    engine.live.standing = (3, b"m" * 32)
    giver.applied()
    assert [message["t"] for _, message in engine.told] == ["state-gone"]
    assert (await offered(giver, 2, have=(3, b"l" * 32))).manifest is not None


async def test_a_donor_that_has_loaded_a_state_gives_that_at_once() -> None:
    """It served somebody in the lineage that it left, and has applied no average since: whoever asks need not
    wait for the next one.
    """
    engine = Engine()
    giver = donor(engine, None)
    await offered(giver, 1)
    engine.live.standing = (5, b"m" * 32)
    offer = await offered(giver, 2)
    assert offer.manifest is not None
    assert (offer.manifest.epoch, offer.manifest.lineage) == engine.live.standing
    assert [message["t"] for _, message in engine.told] == ["state-gone"]


async def test_a_donor_that_is_behind_what_newcomers_have_goes_on() -> None:
    """Its training thread may apply an average later than a newcomer that has it."""
    engine = Engine()
    served = donor(engine, None)
    await offered(served, 0)
    first, second = chain(2)
    served.committed(first, RESULT)
    served.committed(second, RESULT)
    served.has(0, 5, loaded=True)  # the newcomer needs neither of them any more
    engine.live.standing = (4, first.lineage)
    served.applied()
    assert "state-gone" not in [message["t"] for _, message in engine.told]


async def test_a_donor_that_changes_its_state_says_so() -> None:
    """Whoever downloads hears that what it downloads is not to be had any more, and gets nothing of it."""
    engine = Engine()
    served = donor(engine, None)
    offer = await offered(served, 0)
    served.committed(head(9, b"elsewhere" + bytes(23)), RESULT)
    assert [message["t"] for _, message in engine.told] == ["state-gone"]
    assert not served.serves
    with pytest.raises(StateError):
        served.send(0, wanted(offer, 1))


async def test_results_beyond_the_bound_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer for whom too many bytes wait has to begin anew; the donor's disk is not filled for it."""
    from p2pavg.rounds.state import retained

    monkeypatch.setattr(retained, "MOST_BYTES", 1000)
    monkeypatch.setattr(retained, "MOST_STATES", 0)
    engine = Engine()
    served = donor(engine, None)
    await offered(served, 0)
    made = chain(2)
    served.committed(made[0], RESULT)
    assert served.serves
    served.committed(made[1], RESULT)
    assert not served.serves


@pytest.mark.parametrize("limited", [False, True])
async def test_chunks_without_end(limited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer may ask for each chunk a few times; who asks on is refused, else all of it is queued."""
    engine = Engine()
    served = donor(engine, None)
    request = wanted(await offered(served, 0), 1)
    monkeypatch.setattr(
        engine.donor, "sent", lambda link, transfer: None
    )  # it does not read what it asks for
    if not limited:
        monkeypatch.setattr(donor_module, "MOST_TIMES", 1 << 40)
    accepted = 0
    for _ in range(100):
        with suppress(StateError):
            served.send(0, request)
            accepted += 1
    assert accepted == (4 if limited else 100)
    assert served._downloads[0].waits == accepted * CHUNKS - queued(SIZE)


def pieces(transfer: int, count: int, size: int = 1000) -> list[Piece]:
    return [Piece(transfer, chunk, memoryview(bytes(size))) for chunk in range(count)]


def download() -> Download:
    return Download(3, 0.0, 0.0, b"root")


def test_results_do_not_starve_the_state() -> None:
    """While both wait, the state gets its share of the bytes, however many results there are."""
    one = download()
    one.ask_state(pieces(1, 300))
    one.ask_result(pieces(2, 1000))
    taken = Counter[int]()
    for _ in range(300):
        piece = one.take()
        assert piece is not None
        taken[piece.transfer] += 1
        one.gone(piece.transfer, 1.0)
    assert taken[1] == pytest.approx(STATE_SHARE * taken[2], rel=0.05)


def test_what_waits_alone_waits_for_nothing() -> None:
    """Without results the state has all, and the other way round."""
    one = download()
    one.ask_result(pieces(2, 3))
    assert [one.take() is not None for _ in range(3)] == [True] * 3
    other = download()
    other.ask_state(pieces(1, 3))
    assert [other.take() is not None for _ in range(3)] == [True] * 3


def test_a_newcomer_that_reads_nothing_is_over() -> None:
    """Whoever takes nothing of what it asked for is forgotten, later than who asks for nothing."""
    one = download()
    assert not one.is_over(IDLE_S - 1)
    assert one.is_over(IDLE_S + 1)
    one.ask_state(pieces(1, 3))
    assert one.take() is not None
    assert not one.is_over(IDLE_S + 1)
    assert one.is_over(download_module.NO_CHUNK_S + 1)


def test_a_newcomer_that_reads_slowly() -> None:
    """One chunk now and then keeps nothing in memory for ever; 1 Mb/s is enough to be waited for."""
    for bps, over in ((1e3, True), (125e3, False)):
        one = download()
        one.ask_state(pieces(1, 3))
        assert one.take() is not None
        one.sent_bytes, one.moved_at = int(300 * bps), 299.0
        assert one.is_over(300.0) is over


async def test_snapshots_are_not_taken_without_a_rest() -> None:
    """Who asks for the state and drops it, again and again, does not keep this peer copying."""
    served = donor(Engine(), None)
    copies: list[float] = []
    truly = served._take

    def take() -> Any:
        began = time.monotonic()
        made = truly()
        copies.append(time.monotonic() - began)
        return made

    served._take = take  # type: ignore[method-assign]
    began = time.monotonic()
    for _ in range(5):
        await offered(served, 0)
        served.done(0)
    await offered(served, 0)
    assert len(copies) == 6
    assert time.monotonic() - began >= (1 + donor_module.SNAPSHOT_PAUSE) * sum(copies[:-1])


async def test_who_waits_for_a_snapshot_hears_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large state takes long to copy: whoever asks is told to ask again, and how much is done, and the
    snapshot is kept for it when it is there, though results follow meanwhile.
    """
    monkeypatch.setattr(donor_module, "BUSY_WAIT_S", 0.05)
    engine = Engine()
    served = donor(engine, None)
    truly, go_on, copies = served._take, threading.Event(), 0

    def take() -> Any:
        nonlocal copies
        copies += 1
        made = truly()
        assert go_on.wait(20)
        return made

    served._take = take  # type: ignore[method-assign]
    assert await served.offer(0) is None
    async with asyncio.timeout(20):
        while (said := served.busy())["done"] < 2 * TOTAL:  # copied, and hashed
            assert await served.offer(0) is None
    assert TOTAL - 100 < said["bytes"] <= TOTAL
    go_on.set()
    taking: Any = served._taking
    async with asyncio.timeout(20):
        await asyncio.wait((taking,))
    served.committed(chain(1)[0], RESULT)
    served.done(5)
    offer = await offered(served, 0)
    assert offer.manifest is not None
    assert (copies, [made.epoch for made in offer.results]) == (1, [3])


async def test_a_copy_that_fails_late_is_told_to_who_asks_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waited for it when it failed."""
    monkeypatch.setattr(donor_module, "BUSY_WAIT_S", 0.05)
    served = donor(Engine(), None)
    go_on = threading.Event()

    def take() -> Any:
        assert go_on.wait(20)
        raise MemoryError

    served._take = take  # type: ignore[method-assign]
    assert await served.offer(0) is None
    taking: Any = served._taking
    go_on.set()
    async with asyncio.timeout(20):
        await asyncio.wait((taking,))
    with pytest.raises(MemoryError):
        await served.offer(0)


async def test_a_newcomer_that_begins_anew() -> None:
    """Chunks of its first transfer that are still under way do not hold up its second."""
    engine = Engine()
    served = donor(engine, None)
    offer = await offered(served, 0)
    served.send(0, wanted(offer, 1))
    engine.goal = queued(SIZE) + CHUNKS
    served.send(0, wanted(offer, 2))
    await asyncio.wait_for(engine.reached.wait(), 20)


@pytest.mark.parametrize("first", [8, 9, 11])
async def test_donors_take_their_snapshots_at_one_epoch(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where epochs are short, donors that are asked a little apart wait for one with a round number."""
    monkeypatch.setattr(donor_module, "ALIGNED_S", 100.0)
    monkeypatch.setattr(donor_module, "BUSY_WAIT_S", 100.0)
    engine = Engine()
    served = donor(engine, None)
    for number in range(7):
        served._epochs.add(25.0 * number)  # so that four epochs take as long as that
    engine.live.standing = (first, b"l" * 32)
    asked = asyncio.ensure_future(served.offer(0, aligned=True))
    for _ in range(10):
        await asyncio.sleep(0)
    assert served._retained
    while engine.live.standing[0] % 4:
        epoch, before = engine.live.standing
        made = head(epoch, before)
        served.committed(made, RESULT)
        engine.live.standing = (epoch + 1, made.lineage)
        served._moved.set()
        await asyncio.sleep(0)
    offer = await asyncio.wait_for(asked, 20)
    assert offer is not None
    assert offer.manifest is not None
    assert offer.manifest.epoch == (8 if first == 8 else 12)


@pytest.mark.parametrize("value", [0, -1, 0.5, True, "10", float("inf"), float("nan")])
def test_caps_that_make_no_sense_are_refused(value: Any) -> None:
    """A cap is a finite number of Mb/s from 1 on, or None."""
    check_rate("max_upload_mbps", None)
    check_rate("max_upload_mbps", 1)
    with pytest.raises(ConfigurationError, match="max_upload_mbps"):
        check_rate("max_upload_mbps", value)
