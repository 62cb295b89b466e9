"""Transfers survive stalled and lost streams: what is stuck is asked for again, and streams are replaced."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.errors import ProtocolError
from p2pavg.transport.engine import SELF, Missing, Part, ReduceJob, StreamStats
from p2pavg.transport.repair import Repairs
from p2pavg.transport.stalls import Ask, LinkWatch, RankWatch, overtaken
from tests.unit.endpoints import Host
from tests.unit.engine_swarm import Reduction, gradients, poll

RTT = 0.1
PATIENCE = 0.3  # the round trip and the kernel's least retransmission timeout


def row(stream: int, received: int = 0, sent: int = 0, unacked: int = 0) -> StreamStats:
    return StreamStats(stream, sent, received, RTT, 10_000, 0.0, unacked, 0.0)


def job(counts: list[int], owners: list[int], rank: int = 0, chunk: int = 10) -> ReduceJob:
    starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
    parts = tuple(Part(*facts) for facts in zip(owners, starts, counts, strict=False))
    members = max(owners) + 1
    return ReduceJob(1, rank, (SELF,) * members, (True,) * members, parts, chunk, 0, 0, np.empty(0, np.uint8))


class TestStalls:
    def watch(self, *moments: tuple[float, list[StreamStats]]) -> LinkWatch:
        link = LinkWatch()
        for now, stats in moments:
            link.tick(now, stats)
        return link

    def test_nothing_before_the_first_byte(self):
        """A member that has sent nothing yet is not asked, however long it takes."""
        link = self.watch((0.0, [row(0)]), (100.0, [row(0, received=200)]))
        assert RankWatch(0.0).judge(100.0, RTT, link) is Ask.NOTHING

    def test_quiet_link(self):
        """A link that carried chunks and then none for a round trip and a timeout is asked for all."""
        link = self.watch((0.0, [row(0)]), (1.0, [row(0, received=100_000)]))
        watch = RankWatch(0.0)
        assert watch.judge(1.0 + PATIENCE - 0.01, RTT, link) is Ask.NOTHING
        assert watch.judge(1.0 + PATIENCE + 0.01, RTT, link) is Ask.ALL

    def test_quiet_stream(self):
        """One quiet stream among busy ones means: ask for what was overtaken."""
        link = self.watch(
            (0.0, [row(0), row(1)]),
            (1.0, [row(0, received=100_000), row(1, received=100_000)]),
            (2.0, [row(0, received=900_000), row(1, received=100_112)]),
        )
        assert RankWatch(0.0).judge(2.0, RTT, link) is Ask.OVERTAKEN
        assert RankWatch(1.5).judge(2.0, RTT, link) is Ask.NOTHING

    def test_lost_stream(self):
        """A stream that closed during the job means: ask for what was overtaken."""
        link = self.watch((0.0, [row(0), row(1)]), (1.0, [row(0, received=90_000)]))
        assert RankWatch(0.5).judge(1.0, RTT, link) is Ask.OVERTAKEN

    def test_heartbeats_are_not_progress(self):
        """A link that carries heartbeats only is quiet."""
        link = self.watch(
            (0.0, [row(0)]), *((1.0 + i / 10, [row(0, received=90_000 + i * 112)]) for i in range(20))
        )
        assert RankWatch(0.0).judge(2.9, RTT, link) is Ask.ALL

    def test_backoff(self):
        """As long as nothing changes the pauses double up to five seconds; progress makes them short
        again.
        """
        watch = RankWatch(0.0)
        pauses = []
        for _ in range(8):
            watch.asked(100.0, RTT, 7)
            pauses.append(round(watch.next_at - 100.0, 3))
        assert pauses == [0.3, 0.6, 1.2, 2.4, 4.8, 5.0, 5.0, 5.0]
        watch.asked(100.0, RTT, 6)
        assert watch.next_at == pytest.approx(100.3)

    def test_stalled_stream(self):
        """A stream is stalled when bytes wait and none is acknowledged; an idle one is not."""
        link = LinkWatch()
        for tenth in range(40):
            now = tenth / 10
            link.tick(
                now,
                [
                    row(0, sent=100_000, unacked=50_000),
                    row(1, sent=100_000 + tenth, unacked=50_000),
                    row(2, sent=100_000, unacked=0),
                ],
            )
        assert link.stalled(3.9, RTT) == [0]
        assert link.stalled(3.9, 1.0) == []

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

    def begin(self) -> None:
        for rank, host in enumerate(self.hosts):
            links = [SELF, SELF]
            links[1 - rank] = self.links[rank].id
            host.engine.open_reduce(dataclasses.replace(self.reduction.job(rank), links=tuple(links)))
        for rank, host in enumerate(self.hosts):
            host.engine.begin(7, self.reduction.begin(rank))

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

    async def test_stopped_stream_is_replaced(self, pair_of, monkeypatch):
        """A stream on which nothing is acknowledged any more is closed, and another one opened."""
        monkeypatch.setattr("p2pavg.transport.stalls._STALLED_S", 0.5)
        monkeypatch.setattr("p2pavg.transport.stalls._STALLED_RTTS", 0.0)
        pair = await pair_of(2, 6_000_000)
        engine, link = pair.b.engine, pair.links[1]
        pair.begin()
        await poll(lambda: all(row.bytes_received > 300_000 for row in engine.stats(link.id)))
        number = min(engine.streams(link.id))
        asyncio.get_running_loop().remove_reader(engine._links[link.id].open[number].sock.fileno())
        await poll(lambda: number not in pair.a.engine.streams(pair.links[0].id))
        await poll(lambda: len(pair.a.engine.streams(pair.links[0].id)) == 2)
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
