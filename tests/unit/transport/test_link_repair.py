"""Transfers survive stalled and lost streams: what is stuck is asked for again, and streams are replaced."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.errors import ProtocolError
from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.transport.engine import SELF, Missing, ReduceJob, StreamStats
from p2pavg.transport.links.repair import Repairs
from p2pavg.transport.links.stalls import Again, KindWatch, LinkWatch, RankWatch, overtaken
from tests.unit.transport.endpoints import Host
from tests.unit.transport.engine_swarm import Reduction, gradients, poll

RTT = 0.1
PATIENCE = 0.3  # the round trip and the kernel's least retransmission timeout


def row(stream: int, received: int = 0, sent: int = 0, unacked: int = 0) -> StreamStats:
    return StreamStats(stream, sent, received, RTT, 10_000, 0.0, unacked, 0.0)


def job(counts: list[int], owners: list[int], rank: int = 0, chunk: int = 10) -> ReduceJob:
    starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
    parts = tuple(Part(*facts) for facts in zip(owners, starts, counts, strict=False))
    members = max(owners) + 1
    return ReduceJob(
        1, rank, (SELF,) * members, (True,) * members, Plan(parts), chunk, 0, 0, np.empty(0, np.uint8)
    )


class TestStalls:
    def watch(self, *moments: tuple[float, list[StreamStats]]) -> LinkWatch:
        link = LinkWatch()
        for now, stats in moments:
            link.tick(now, stats)
        return link

    def test_nothing_before_the_first_byte(self):
        """A member that has sent nothing yet is not suspicious, however long it takes."""
        link = self.watch((0.0, [row(0)]), (100.0, [row(0, received=200)]))
        assert not RankWatch(0.0).suspicious(100.0, RTT, link)

    def test_quiet_stream(self):
        """A stream that carried chunks and then none for a round trip and a timeout is suspicious."""
        link = self.watch((0.0, [row(0), row(1)]), (1.0, [row(0, received=100_000), row(1)]))
        assert not RankWatch(0.0).suspicious(1.0 + PATIENCE - 0.01, RTT, link)
        assert RankWatch(0.0).suspicious(1.0 + PATIENCE + 0.01, RTT, link)
        assert not RankWatch(1.5).suspicious(1.0 + PATIENCE + 0.01, RTT, link)

    def test_a_stream_whose_bytes_wait_to_be_read_is_not_quiet(self):
        """They are asked for again only when none arrive: on a busy machine the engine reads them late."""
        unread = dataclasses.replace(row(0, received=100_000), unread_bytes=50_000)
        link = self.watch((0.0, [row(0)]), (1.0, [row(0, received=100_000)]), (1.0 + PATIENCE, [unread]))
        assert not RankWatch(0.0).suspicious(1.0 + PATIENCE + 0.01, RTT, link)

    def test_lost_stream(self):
        """A stream that closed during the job is suspicious; one that closed before is not."""
        link = self.watch((0.0, [row(0), row(1)]), (1.0, [row(0, received=90_000)]))
        assert RankWatch(0.5).suspicious(1.0, RTT, link)
        assert not RankWatch(1.0).suspicious(1.0, RTT, link)

    def test_heartbeats_are_not_progress(self):
        """A stream that carries heartbeats only is quiet."""
        link = self.watch(
            (0.0, [row(0)]), *((1.0 + i / 10, [row(0, received=90_000 + i * 112)]) for i in range(20))
        )
        assert RankWatch(0.0).suspicious(2.9, RTT, link)

    def test_what_to_ask_for(self):
        """What was overtaken at once; the rest of a kind when none of it has come for a while."""
        the_job = job([1000, 1000], [0, 1])
        missing = Missing(((0, 5), (0, 99)), ((1, 7), (1, 99)))
        link = self.watch(
            (0.0, [row(0), row(1)]),
            (1.0, [row(0, received=100_000), row(1, received=100_000)]),
            (2.0, [row(0, received=900_000), row(1, received=100_112)]),
        )
        watch = RankWatch(0.0)
        watch.contributions.tick(1.9, 98)
        watch.results.tick(1.5, 98)
        assert watch.ask(2.0, RTT, link, the_job, 1, missing) == Missing(((0, 5),), ((1, 7), (1, 99)))
        watch.contributions.tick(2.1, 98)
        watch.contributions.gap = 0.01
        assert watch.ask(2.1, RTT, link, the_job, 1, missing) == Missing((), ())
        assert watch.ask(2.35, RTT, link, the_job, 1, missing) == missing

    def test_quiet_link(self):
        """On a link that has gone quiet everything missing is asked for."""
        the_job = job([1000, 1000], [0, 1])
        missing = Missing(((0, 99),), ((1, 99),))
        link = self.watch((0.0, [row(0)]), (1.0, [row(0, received=100_000)]))
        watch = RankWatch(0.0)
        watch.contributions.tick(1.0, 1)
        watch.results.tick(1.0, 1)
        assert watch.ask(1.0 + PATIENCE + 0.01, RTT, link, the_job, 1, missing) == missing

    def test_slow_path(self):
        """Where a chunk takes long, no chunk for a while means nothing yet."""
        kind = KindWatch()
        assert not kind.stopped(100.0, PATIENCE)
        for second in range(1, 4):
            kind.tick(float(second), second)
        assert not kind.stopped(3.0 + 3.9, PATIENCE)
        assert kind.stopped(3.0 + 4.1, PATIENCE)

    def test_backoff(self):
        """A chunk is sent again after pauses that double up to five seconds; others do not wait."""
        kind = Again()
        times = [tenth / 10 for tenth in range(200) if kind.choose(tenth / 10, PATIENCE, [(0, 1)])]
        pauses = np.diff(times)
        assert pauses[:4] == pytest.approx([0.3, 0.6, 1.2, 2.4], abs=0.11)
        assert max(pauses) <= 5.01
        assert kind.choose(20.0, PATIENCE, [(0, 2)]) == ((0, 2),)

    def test_stalled_stream(self):
        """A stream is stalled when bytes wait and none is acknowledged; an idle one is not."""
        link = LinkWatch()
        for tenth in range(11):
            stats = [
                row(0, sent=100_000, unacked=50_000),
                row(1, sent=100_000 + tenth, unacked=50_000),
                row(2, sent=100_000, unacked=0),
            ]
            link.tick(tenth / 10, stats)
        assert link.stalled(1.0, RTT, 0.0) == [0]
        assert link.stalled(1.0, 1.0, 0.0) == []

    def test_usual_pauses(self):
        """On a path whose streams pause and recover, a pause twice as long as usual is a stall, no shorter
        one.
        """
        link = LinkWatch()
        for tenth in range(36):
            moved = tenth >= 8  # the first pause ends after 0.8 s; the next one goes on
            link.tick(
                tenth / 10,
                [
                    row(0, sent=200_000, unacked=100_000 if moved else 150_000),
                    row(1, sent=200_000 + tenth, unacked=9),
                ],
            )
            if 8 < tenth < 21:
                assert link.stalled(tenth / 10, RTT, 0.0) == []
        assert link.stalled(3.5, RTT, 0.0) == [0]

    def test_moving(self):
        """Bytes get through while each stream that has some under way is acknowledged; idle ones are no
        proof.
        """
        link = LinkWatch()
        for tenth in range(11):
            link.tick(tenth / 10, [row(0, sent=10**6, unacked=10**5 - tenth), row(1, sent=5)])
        assert link.moving(1.0, RTT)
        assert not link.moving(1.0 + PATIENCE + 0.05, RTT)
        link.tick(1.1, [row(0, sent=10**6), row(1, sent=5)])
        assert not link.moving(1.1, RTT)

    def test_all_stand_still(self):
        """When nothing moves at all no stream is to blame; when the control connection moves, they are."""
        link = LinkWatch()
        for tenth in range(11):
            link.tick(tenth / 10, [row(number, sent=100_000, unacked=50_000) for number in range(3)])
        assert link.stalled(1.0, RTT, heard_at=0.05) == []
        assert link.stalled(1.0, RTT, heard_at=0.9) == [0, 1, 2]

    def test_long_idle_is_no_stall(self):
        """A stream that starts to send after a long pause has its time from then on."""
        link = self.watch(
            (0.0, [row(0, sent=100)]),
            (60.0, [row(0, sent=9000, unacked=8900)]),
            (60.4, [row(0, sent=9000, unacked=8900)]),
        )
        assert link.stalled(60.4, RTT, 60.4) == []
        link.tick(60.6, [row(0, sent=9000, unacked=8900)])
        assert link.stalled(60.6, RTT, 60.5) == [0]

    def test_late_stream(self):
        """A stream is late while nothing of it is acknowledged for longer than a loaded round trip takes, and
        others have nothing to send. While all are busy it is after a timeout, if others move.
        """
        link = LinkWatch()
        stuck, idle = row(0, sent=10**5, unacked=5000), row(2, sent=10**5)
        busy = row(1, sent=10**5, unacked=9000)
        for tenth in range(3):
            link.tick(tenth / 10, [stuck, dataclasses.replace(busy, bytes_sent=10**5 + tenth), idle])
        loaded = 0.1 + 1.25 * RTT + 0.05  # its bytes were first seen to wait at 0.1
        assert link.late(loaded - 0.01, RTT) == []
        assert link.late(loaded + 0.01, RTT) == [0]
        assert link.late(loaded + 0.01, 2 * RTT) == []
        for tenth in range(3, 6):
            moving = dataclasses.replace(busy, bytes_sent=10**5 + tenth)
            link.tick(tenth / 10, [stuck, moving, dataclasses.replace(idle, unsent_bytes=9000)])
        assert link.late(0.1 + PATIENCE - 0.01, RTT) == []
        assert link.late(0.1 + PATIENCE + 0.01, RTT) == [0]
        link.streams[1].acked_at = link.acked_at = 0.1
        assert link.late(9.0, RTT) == []

    @given(
        st.lists(st.integers(0, 60), min_size=2, max_size=4),
        st.integers(1, 4),
        st.data(),
    )
    def test_overtaken(self, counts, streams, data):
        """Exactly those missing chunks are overtaken that have 2k received ones behind them."""
        owners = [0, 1, *[data.draw(st.sampled_from([0, 1])) for _ in counts[2:]]]
        the_job = job(counts, owners)

        def chunks(owner: int) -> list[tuple[int, int]]:
            return [
                (part, index)
                for part, count in enumerate(counts)
                if owners[part] == owner
                for index in range(-(-count // 10))
            ]

        mine, theirs = chunks(0), chunks(1)
        lost_mine = [chunk for chunk in mine if data.draw(st.booleans())]
        lost_theirs = [chunk for chunk in theirs if data.draw(st.booleans())]
        found = overtaken(the_job, 1, Missing(tuple(lost_mine), tuple(lost_theirs)), streams)

        def expected(everything: list[tuple[int, int]], lost: list[tuple[int, int]]) -> tuple:
            return tuple(
                chunk
                for at, chunk in enumerate(everything)
                if chunk in lost and sum(later not in lost for later in everything[at + 1 :]) >= 2 * streams
            )

        assert found.contributions == expected(mine, lost_mine)
        assert found.results == expected(theirs, lost_theirs)

    @pytest.mark.parametrize(
        "message",
        [
            {},
            {"contributions": [], "results": 5},
            {"contributions": [[1]], "results": []},
            {"contributions": [[1, -1]], "results": []},
            {"contributions": [], "results": [["a", 1]]},
            {"contributions": [], "results": [5]},
        ],
    )
    def test_malformed_request(self, message):
        """A malformed request to send again is a ProtocolError."""
        with pytest.raises(ProtocolError):
            Repairs(None, {}, lambda link, stream: None).asked(None, message)

    def test_chunks_that_the_job_lacks(self):
        """Whatever else is asked for, only chunks of the job are looked for, and remembered."""
        job = ReduceJob(
            7, 0, (SELF, 1), (True, True), Plan((Part(0, 0, 25), Part(1, 25, 25))), 10, 1, 1, None
        )
        sent = []
        engine = SimpleNamespace(
            running=lambda: [job], resend=lambda transfer, rank, missing: sent.append(missing)
        )
        repairs = Repairs(engine, {}, lambda link, stream: None)
        everything = [[part, chunk] for part in range(50) for chunk in range(100)]
        link = SimpleNamespace(id=1, rtt_min=0.1)
        repairs.asked(link, {"transfer": 7, "contributions": everything, "results": everything})
        whole = tuple((part, chunk) for part in range(2) for chunk in range(3))
        assert sent == [Missing(whole, whole)]
        assert len(repairs._ranks[7, 1].results_again.sent) == len(whole)


class Pair:
    """Two linked hosts and one reduction between them."""

    async def start(self, streams: int, numel: int) -> Pair:
        self.a, self.b = await Host().start(streams=streams), await Host().start(streams=streams)
        link = await self.a.connect(self.b)
        await poll(lambda: self.b.up)
        self.links = (link, self.b.link_to(self.a))
        self.hosts = (self.a, self.b)
        for host, to in zip(self.hosts, self.links, strict=True):
            await poll(lambda host=host, to=to: len(host.engine.streams(to.id)) == streams)
        rng = np.random.default_rng(0)
        self.reduction = Reduction(
            gradients(rng, 2, numel), [1.0, 2.0], [numel // 2] * 2, codec="fp16", chunk_elements=16384
        )
        return self

    def open(self) -> None:
        for rank, host in enumerate(self.hosts):
            links = [SELF, SELF]
            links[1 - rank] = self.links[rank].id
            host.engine.open_reduce(dataclasses.replace(self.reduction.job(rank), links=tuple(links)))

    def begin(self, ranks: tuple[int, ...] = (0, 1)) -> None:
        for rank in ranks:
            self.hosts[rank].engine.begin(7, self.reduction.begin(rank))

    async def finish(self) -> None:
        for host in self.hosts:
            await host.until(lambda host=host: host.done)
        assert self.reduction.results[0].tobytes() == self.reduction.results[1].tobytes()
        np.testing.assert_allclose(self.reduction.decoded(0), self.reduction.expected(), atol=0.02)

    async def close(self) -> None:
        for host in self.hosts:
            await host.close()


@pytest.fixture
async def pair_of():
    made = []

    async def start(streams: int, numel: int) -> Pair:
        made.append(await Pair().start(streams, numel))
        made[-1].open()
        return made[-1]

    yield start
    for pair in made:
        await pair.close()


class TestRepair:
    async def test_stream_that_stops(self, pair_of):
        """One stream of four stops in mid-round: the round ends soon, without a failure."""
        pair = await pair_of(4, 6_000_000)
        engine, link = pair.b.engine, pair.links[1]
        pair.begin()
        await poll(lambda: all(row.bytes_received > 300_000 for row in engine.stats(link.id)))
        stuck = engine._links[link.id].open[min(engine.streams(link.id))]
        asyncio.get_running_loop().remove_reader(stuck.sock.fileno())
        start = time.monotonic()
        await pair.finish()
        assert time.monotonic() - start < 10
        assert pair.a.down == pair.b.down == []

    async def test_reader_that_waits_is_no_stall(self, pair_of):
        """A stream whose other side reads nothing for long (its trainer is late) is not replaced."""
        pair = await pair_of(2, 6_000_000)
        numbers = [
            list(host.engine.streams(link.id)) for host, link in zip(pair.hosts, pair.links, strict=True)
        ]
        pair.begin((0,))
        stats = lambda: pair.a.engine.stats(pair.links[0].id)  # noqa: E731
        await poll(lambda: sum(row.bytes_sent for row in stats()) > 300_000)
        await poll(lambda: not any(row.unacked_bytes for row in stats()))
        now = time.monotonic()
        for tenth in range(50):  # five seconds pass for it
            pair.a.endpoint._repairs.tick(now + tenth / 10, pair.a.engine.running())
        pair.begin((1,))
        await pair.finish()
        assert numbers == [
            list(host.engine.streams(link.id)) for host, link in zip(pair.hosts, pair.links, strict=True)
        ]

    async def test_stalled_stream_is_replaced(self, pair_of, monkeypatch):
        """A stalled stream is closed, another one is opened, and the round ends."""
        pair = await pair_of(2, 6_000_000)
        link = pair.links[0]
        old = list(pair.a.engine.streams(link.id))
        monkeypatch.setattr(LinkWatch, "stalled", lambda self, *now: [n for n in self.streams if n == old[0]])
        pair.begin()
        await poll(lambda: old[0] not in pair.a.engine.streams(link.id))
        await poll(lambda: len(pair.a.engine.streams(link.id)) == 2)
        await pair.finish()

    @pytest.mark.parametrize("moving", [True, False])
    async def test_asked_too_early(self, pair_of, monkeypatch, moving):
        """What is on its way on streams that move is not sent twice; else it is, but not at each request."""
        pair = await pair_of(2, 1_000_000)
        monkeypatch.setattr(LinkWatch, "moving", lambda self, *now: moving)
        sent = []
        pair.begin((0,))
        repairs, engine = pair.a.endpoint._repairs, pair.a.engine
        repairs.tick(time.monotonic(), engine.running())
        monkeypatch.setattr(engine, "resend", lambda transfer, rank, missing: sent.append(missing))
        for _ in range(2):
            repairs.asked(pair.links[0], {"transfer": 7, "contributions": [[1, 3]], "results": []})
        assert sent == ([] if moving else [Missing(((1, 3),), ()), Missing((), ())])
        pair.begin((1,))
        await pair.finish()

    async def test_all_streams_lost(self, pair_of):
        """All streams break in mid-round: they are opened again, and the round ends."""
        pair = await pair_of(2, 6_000_000)
        engine, link = pair.b.engine, pair.links[1]
        pair.begin()
        await poll(lambda: engine.progress(7).contributions_received[0] > 10)
        for stream in list(engine.streams(link.id)):
            engine.detach(link.id, stream)
        await pair.finish()
        assert pair.a.down == pair.b.down == []
