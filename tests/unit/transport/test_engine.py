"""Every engine, and a mixed swarm, keeps the promises of transport/engine.py."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import os
import socket
import struct
import time

import lz4.block
import numpy as np
import pytest

from p2pavg import native
from p2pavg.transport import frames
from p2pavg.transport.engine import Missing, Start
from p2pavg.transport.frames import NO_ANSWER, Header, Heartbeat, Kind
from p2pavg.transport.python.heartbeat import ANSWER_S
from tests.unit.transport.engine_swarm import DEADLINE_S, KINDS, Reduction, Swarm, gradients, poll, tcp_pair


@pytest.fixture(params=KINDS, ids="+".join)
def kinds(request):
    return request.param


@pytest.fixture
async def swarm_of(kinds):
    made: list[Swarm] = []

    def make(peers: int, streams: int = 2) -> Swarm:
        made.append(Swarm(kinds, peers, streams))
        return made[-1]

    yield make
    for swarm in made:
        swarm.close()


def frame(kind: Kind, body: bytes, **fields: int) -> bytes:
    return frames.pack(Header(kind, len(body), body_crc=native.crc32(body), **fields)) + body


async def send(sock: socket.socket, data: bytes) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.get_running_loop().sock_sendall(sock, data)


async def read_frame(sock: socket.socket) -> tuple[Header, bytes]:
    """Of a packed chunk what it holds."""
    async with asyncio.timeout(DEADLINE_S):
        header = frames.parse(await _exactly(sock, frames.HEADER_BYTES))
        body = await _exactly(sock, header.length)
        if not header.flags & frames.PACKED:
            return header, body
        size = 4 * header.count  # of codec "none"
        return header, lz4.block.decompress(body, uncompressed_size=size) if body else bytes(size)


async def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        got = await asyncio.get_running_loop().sock_recv(sock, count - len(data))
        assert got, "closed"
        data += got
    return data


class TestEngine:
    @pytest.mark.parametrize("codec", ["none", "fp16", "bf16", "int8", "int4"])
    @pytest.mark.parametrize("peers", [2, 3, 5])
    async def test_mean(self, swarm_of, peers, codec):
        """N peers end with equal bits: the weighted mean of what each brought, within the codec's error."""
        rng = np.random.default_rng(peers)
        swarm = swarm_of(peers)
        counts = rng.integers(3000, 20000, peers).tolist()
        weights = rng.integers(1, 1000, peers).astype(float).tolist()
        scales = [1.0 / weight for weight in weights]
        reduction = Reduction(
            gradients(rng, peers, sum(counts)),
            weights,
            counts,
            scales=scales,
            codec=codec,
            chunk_elements=4096,
        )
        await reduction.through(swarm)

    @pytest.mark.parametrize("pre_encoded", [False, True], ids=["raw", "encoded"])
    async def test_uneven_parts(self, swarm_of, pre_encoded):
        """Parts of any size work: empty, one element, several of one owner, none owned by a member."""
        rng = np.random.default_rng(1)
        swarm = swarm_of(4)
        counts, owners = [0, 1, 12345, 0, 999, 1001], [2, 0, 1, 0, 2, 0]
        reduction = Reduction(
            gradients(rng, 4, sum(counts)),
            [1.0, 2.0, 3.0, 4.0],
            counts,
            owners,
            codec="fp16",
            chunk_elements=1000,
            pre_encoded=pre_encoded,
        )
        await reduction.through(swarm)

    async def test_members_that_own_nothing_need_no_link(self, swarm_of):
        """Three that own nothing and have links to the owner alone bring theirs and get the mean."""
        rng = np.random.default_rng(4)
        swarm = swarm_of(4)
        reduction = Reduction(
            gradients(rng, 4, 9000), [1.0, 2.0, 3.0, 4.0], [9000], owners=[1], codec="fp16", unlinked=True
        )
        await reduction.through(swarm)

    async def test_other_result_codec(self, swarm_of):
        """Contributions and results may travel in different codecs."""
        rng = np.random.default_rng(2)
        swarm = swarm_of(2)
        reduction = Reduction(
            gradients(rng, 2, 9000), [1.0, 1.0], [4000, 5000], codec="int8", result_codec="fp16"
        )
        await reduction.through(swarm)

    async def test_weight_zero_serves(self, swarm_of):
        """A member of weight 0 contributes nothing but reduces its part and receives the result."""
        rng = np.random.default_rng(3)
        swarm = swarm_of(3)
        sources = gradients(rng, 3, 9000)
        sources[1] = None
        reduction = Reduction(sources, [1.0, 0.0, 3.0], [2000, 3500, 3500], codec="fp16")
        await reduction.through(swarm)
        assert swarm.engines[1].progress(reduction.transfer).contributions_sent == (0, 0, 0)

    async def test_only_one_contributes(self, swarm_of):
        """When one member alone has a weight, all get its values, its own part included."""
        rng = np.random.default_rng(4)
        swarm = swarm_of(3)
        sources = [None, *gradients(rng, 1, 9000), None]
        reduction = Reduction(sources, [0.0, 5.0, 0.0], [3000, 3000, 3000], codec="bf16")
        await reduction.through(swarm)

    async def test_alone(self, swarm_of):
        """A group of one averages with itself."""
        rng = np.random.default_rng(5)
        swarm = swarm_of(1)
        reduction = Reduction(gradients(rng, 1, 5000), [3.0], [5000], codec="fp16")
        await reduction.through(swarm)

    async def test_nothing_to_average(self, swarm_of):
        """A vector of no elements is done at once, with the digest of nothing per part."""
        swarm = swarm_of(2)
        reduction = Reduction([np.empty(0, np.float32)] * 2, [1.0, 1.0], [0, 0])
        await reduction.through(swarm)

    async def test_joiner(self, swarm_of):
        """A joiner receives the same bits, and voters are done though it cannot be reached."""
        rng = np.random.default_rng(6)
        swarm = swarm_of(3, streams=0)
        swarm.connect(0, 1)
        reduction = Reduction(
            [*gradients(rng, 2, 9000), None],
            [1.0, 1.0, 0.0],
            [4500, 4500],
            voters=[True, True, False],
            codec="fp16",
        )
        reduction.go(swarm)
        await reduction.finished(swarm, [0, 1])
        assert reduction.transfer not in swarm.events[2].done
        for rank in (0, 1):  # committed: what the joiner still lacks goes on
            swarm.engines[rank].finish(reduction.transfer)
        swarm.connect(0, 2)
        swarm.connect(1, 2)
        await reduction.finished(swarm, [2])
        reduction.check(swarm)

    async def test_held_until_begin(self, swarm_of):
        """Contributions that arrive before `begin` wait for it; nothing of them is lost."""
        rng = np.random.default_rng(7)
        swarm = swarm_of(3)
        reduction = Reduction(gradients(rng, 3, 60000), [1.0, 2.0, 3.0], [20000] * 3, codec="fp16")
        reduction.open(swarm)
        reduction.start(swarm, [0, 2])
        await poll(lambda: swarm.engines[0].progress(7).contributions_received[2] == 20)
        assert swarm.engines[1].progress(7).contributions_received == (0, 0, 0)
        reduction.start(swarm, [1])
        await reduction.succeeded(swarm)

    @pytest.mark.parametrize("alone", [False, True])
    async def test_supplied_while_it_flows(self, swarm_of, alone):
        """What is encoded on the fly goes out, and is added to, once it was supplied; nothing is lost."""
        rng = np.random.default_rng(11)
        swarm = swarm_of(3)
        sources = gradients(rng, 3, 60000)
        weights = [0.0, 2.0, 0.0] if alone else [1.0, 2.0, 3.0]
        reduction = Reduction(
            [source if weight else None for source, weight in zip(sources, weights, strict=True)],
            weights,
            [20000] * 3,
            codec="fp16",
            pre_encoded=True,
        )
        reduction.open(swarm)
        reduction.start(swarm, [0, 2])
        whole = reduction.begin(1)
        growing = np.full_like(whole.encoded, 0xFF)  # NaN, should anybody read it too early
        swarm.engines[1].begin(7, Start(whole.weights, 1.0, None, growing, ready=0))
        size = whole.encoded.nbytes // len(reduction.chunks)
        for ready in (7, 23, 23, 41, 60):
            growing[: ready * size] = whole.encoded[: ready * size]
            swarm.engines[1].supply(7, ready)
            sent = [max(0, min(ready - first, 20)) for first in (0, 40)]
            await poll(
                lambda sent=sent: [swarm.engines[1].progress(7).contributions_sent[r] for r in (0, 2)] == sent
            )
        await reduction.succeeded(swarm)

    async def test_progress(self, swarm_of):
        """Progress counts chunks per rank and brackets the transfer in time; at the end nothing is
        missing.
        """
        rng = np.random.default_rng(8)
        swarm = swarm_of(2)
        reduction = Reduction(gradients(rng, 2, 9500), [1.0, 1.0], [4500, 5000])
        reduction.open(swarm)
        before = swarm.engines[0].progress(7)
        assert before.first_byte_at == 0.0
        start = asyncio.get_running_loop().time()
        reduction.start(swarm)
        await reduction.finished(swarm)
        progress = swarm.engines[0].progress(7)
        assert progress.contributions_received == (5, 5)
        assert progress.results_received == (5, 5)
        assert progress.contributions_sent == (0, 5)
        assert progress.results_sent == (0, 5)
        assert start <= progress.first_byte_at <= progress.last_byte_at <= asyncio.get_running_loop().time()
        assert swarm.engines[0].missing(7, 1) == Missing((), ())

    async def test_running(self, swarm_of):
        """A job runs from `begin` until it is finished or cancelled."""
        swarm = swarm_of(1)
        engine = swarm.engines[0]
        jobs = [Reduction([np.ones(10, np.float32)], [1.0], [10], transfer=transfer) for transfer in (1, 2)]
        for reduction in jobs:
            reduction.open(swarm)
        assert list(engine.running()) == []
        for reduction in jobs:
            reduction.start(swarm)
        assert sorted(job.transfer for job in engine.running()) == [1, 2]
        engine.cancel(1)
        await jobs[1].finished(swarm)
        assert [job.transfer for job in engine.running()] == [2]
        engine.finish(2)
        assert list(engine.running()) == []

    async def test_lost_stream_and_resend(self, swarm_of):
        """What a broken stream lost is asked for and sent again; duplicates change nothing."""
        rng = np.random.default_rng(9)
        swarm = swarm_of(2, streams=0)
        numel = 400_000
        reduction = Reduction(
            gradients(rng, 2, numel), [1.0, 2.0], [numel // 2] * 2, codec="fp16", chunk_elements=4096
        )
        lost = swarm.wire(0, 1)  # takes chunks and never passes them on
        reduction.go(swarm)
        await read_frame(lost)
        lost.close()
        await swarm.events[0].until(lambda: swarm.events[0].closed)
        swarm.connect(0, 1)
        swarm.connect(0, 1)
        engines = swarm.engines

        async def repair() -> None:
            while not all(7 in events.done for events in swarm.events):
                for asker, sender in ((0, 1), (1, 0)):
                    engines[sender].resend(7, asker, engines[asker].missing(7, sender))
                await asyncio.sleep(0.01)

        async with asyncio.timeout(DEADLINE_S):
            await repair()
        reduction.check(swarm)
        everything = Missing(tuple((0, i) for i in range(49)), tuple((1, i) for i in range(49)))
        before = engines[0].traffic(swarm.link(0, 1))[1]
        engines[1].resend(7, 0, everything)
        await poll(lambda: engines[0].traffic(swarm.link(0, 1))[1] > before + numel * 2 * 0.9)
        reduction.check(swarm)
        assert engines[0].progress(7).contributions_received == (49, 49)

    async def test_late_stream_is_helped(self, swarm_of):
        """What one stream holds and does not deliver goes over another as well, once."""
        rng = np.random.default_rng(9)
        swarm = swarm_of(2, streams=0)
        numel, chunk = 8_000_000, 4096
        reduction = Reduction(gradients(rng, 2, numel), [1.0, 2.0], [0, numel], [1, 1], chunk_elements=chunk)
        stuck = swarm.wire(0, 1)  # nobody reads it
        reduction.go(swarm)
        link, sender, receiver = swarm.link(0, 1), *swarm.engines
        stats = lambda: sender.stats(link)[0]  # noqa: E731
        await poll(lambda: stats().unsent_bytes > 0)
        swarm.connect(0, 1)
        size = frames.HEADER_BYTES + 4 * chunk
        everything = -(-numel // chunk)
        received = lambda: receiver.progress(7).contributions_received[0]  # noqa: E731
        held = lambda: everything - stats().bytes_sent // size  # noqa: E731
        await poll(lambda: held() <= received() + 1)
        assert received() < everything - stats().acked_bytes // size
        sender.repeat(link, 0)
        await poll(lambda: received() >= everything - stats().acked_bytes // size)
        before = sender.stats(link)[1].bytes_sent
        sender.repeat(link, 0)
        sender.send_blob(link, 5, 0, memoryview(b"after everything else"))
        await swarm.events[0].until(lambda: swarm.events[0].sent)
        assert sender.stats(link)[1].bytes_sent < before + size
        stuck.close()

    async def test_late_stream_to_a_joiner_is_helped(self, swarm_of):
        """Results on their way to a joiner go over another stream, too, after the round is over."""
        rng = np.random.default_rng(9)
        swarm = swarm_of(2, streams=0)
        numel, chunk = 8_000_000, 4096
        reduction = Reduction(
            [*gradients(rng, 1, numel), None],
            [1.0, 0.0],
            [numel],
            [0],
            voters=[True, False],
            chunk_elements=chunk,
        )
        stuck = swarm.wire(0, 1)  # nobody reads it
        reduction.go(swarm)
        link, sender, receiver = swarm.link(0, 1), *swarm.engines
        await swarm.events[0].until(lambda: 7 in swarm.events[0].done)
        sender.finish(7)
        stats = lambda: sender.stats(link)[0]  # noqa: E731
        await poll(lambda: stats().unsent_bytes > 0)
        size, everything = frames.HEADER_BYTES + 4 * chunk, -(-numel // chunk)
        swarm.connect(0, 1)
        received = lambda: receiver.progress(7).results_received[0]  # noqa: E731
        await poll(lambda: received() >= everything - stats().bytes_sent // size - 1)
        sender.repeat(link, 0)
        await poll(lambda: received() >= everything - stats().acked_bytes // size)
        stuck.close()

    async def test_cancelled_chunk_is_not_sent_again(self, swarm_of):
        """What a stream still has to deliver of a job that was cancelled goes over no other."""
        rng = np.random.default_rng(9)
        swarm = swarm_of(2, streams=0)
        numel, chunk = 8_000_000, 1 << 19
        reduction = Reduction(gradients(rng, 2, numel), [1.0, 2.0], [0, numel], [1, 1], chunk_elements=chunk)
        wire = swarm.wire(0, 1)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # most of a frame stays with its sender
        reduction.go(swarm)
        link, sender = swarm.link(0, 1), swarm.engines[0]
        stats = lambda: sender.stats(link)[0]  # noqa: E731
        await poll(lambda: stats().unsent_bytes > 0)
        sender.cancel(7)
        begun = -(-stats().bytes_sent // (frames.HEADER_BYTES + 4 * chunk))
        async with asyncio.timeout(DEADLINE_S):
            while stats().bytes_sent < begun * (frames.HEADER_BYTES + 4 * chunk):
                if stats().unsent_bytes > 0:  # else it is the sender's turn, however late it gets it
                    await _exactly(wire, 1 << 12)
                await asyncio.sleep(0)
        assert stats().unacked_bytes + stats().unsent_bytes > 0
        number = swarm.connect(0, 1)
        sender.repeat(link, 0)
        sender.send_blob(link, 5, 1, memoryview(b"after everything else"))
        await swarm.events[0].until(lambda: swarm.events[0].sent)
        assert all(row.bytes_sent < 1000 for row in sender.stats(link) if row.stream == number)
        wire.close()

    async def test_paced_stream(self, swarm_of):
        """Streams that are held back deliver everything, in no less time than that takes."""
        rng = np.random.default_rng(9)
        swarm = swarm_of(2)
        numel = 400_000
        reduction = Reduction(gradients(rng, 2, numel), [1.0, 2.0], [numel // 2] * 2)
        for rank in range(2):
            swarm.engines[rank].pace(swarm.link(rank, 1 - rank), 2e6)
        reduction.open(swarm)
        start = time.monotonic()
        reduction.start(swarm)
        await reduction.succeeded(swarm)
        assert time.monotonic() - start > 0.1  # 0.4 s, less what the kernel sends at once and holds

    async def test_stream_dies_between_frames(self, swarm_of):
        """With one of three streams gone, what was not handed to it goes over the others."""
        rng = np.random.default_rng(10)
        swarm = swarm_of(2, streams=3)
        reduction = Reduction(gradients(rng, 2, 50_000), [1.0, 2.0], [25_000] * 2)
        swarm.engines[0].detach(swarm.link(0, 1), 1)
        await reduction.through(swarm)
        await swarm.events[1].until(lambda: swarm.events[1].closed)
        assert [(link, stream) for link, stream, _ in swarm.events[1].closed] == [(swarm.link(1, 0), 1)]
        assert swarm.events[0].closed == []
        assert list(swarm.engines[0].streams(swarm.link(0, 1))) == [0, 2]

    async def test_cancel_in_mid_job(self, swarm_of):
        """After `cancel` no buffer is touched; the streams go on with the next job."""
        rng = np.random.default_rng(11)
        swarm = swarm_of(3)
        numel = 3_000_000
        reduction = Reduction(
            gradients(rng, 3, numel), [1.0] * 3, [numel // 3] * 3, codec="fp16", chunk_elements=65536
        )
        reduction.open(swarm)
        for engine in swarm.engines:
            engine.set_upload_limit(50e6)  # or it may be over before it is cancelled
        reduction.start(swarm)
        await poll(lambda: swarm.engines[1].progress(7).results_received[0] > 0)
        for engine in swarm.engines:
            engine.cancel(7)
            engine.cancel(7)
            engine.set_upload_limit(None)
        frozen = [result.copy() for result in reduction.results]
        for source in reduction.sources:
            source.fill(np.nan)
        again = Reduction(gradients(rng, 3, 9000), [1.0] * 3, [3000] * 3, codec="fp16", transfer=8)
        await again.through(swarm)
        for result, before in zip(reduction.results, frozen, strict=True):
            assert np.array_equal(result, before)
        assert all(7 not in events.done for events in swarm.events)

    async def test_cancel_releases_held_streams(self, swarm_of):
        """Streams held for a job that never begins go on after its cancel."""
        rng = np.random.default_rng(12)
        swarm = swarm_of(2)
        first = Reduction(gradients(rng, 2, 50_000), [1.0] * 2, [25_000] * 2)
        first.open(swarm)
        first.start(swarm, [0])
        await poll(lambda: swarm.engines[0].progress(7).contributions_sent[1] > 0)
        for engine in swarm.engines:
            engine.cancel(7)
        second = Reduction(gradients(rng, 2, 9000), [1.0] * 2, [4500] * 2, transfer=8)
        await second.through(swarm)

    async def test_two_jobs_at_once(self, swarm_of):
        """Two jobs over the same links do not mix."""
        rng = np.random.default_rng(13)
        swarm = swarm_of(3)
        one = Reduction(gradients(rng, 3, 30_000), [1.0] * 3, [10_000] * 3, codec="fp16", transfer=1)
        two = Reduction(gradients(rng, 3, 20_000), [2.0, 1.0, 1.0], [5000, 5000, 10_000], transfer=2**64 - 1)
        one.open(swarm)
        two.go(swarm)
        one.start(swarm)
        await one.finished(swarm)
        await two.finished(swarm)
        one.check(swarm)
        two.check(swarm)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    async def test_non_finite_contribution(self, swarm_of, value):
        """A gradient that is not finite is refused by its own peer, and never becomes a result."""
        rng = np.random.default_rng(14)
        swarm = swarm_of(2)
        reduction = Reduction(gradients(rng, 2, 9000), [1.0, 1.0], [4500, 4500])
        reduction.sources[1][100] = value  # in a part of rank 0
        reduction.go(swarm)
        await swarm.events[1].until(lambda: swarm.events[1].refused)
        assert swarm.events[1].refused[0][:2] == (7, 1)
        assert not swarm.events[0].done
        assert not swarm.events[1].done

    async def test_non_finite_in_own_part(self, swarm_of):
        """A gradient that is not finite in the part that its own peer reduces is refused too."""
        rng = np.random.default_rng(15)
        swarm = swarm_of(2)
        reduction = Reduction(gradients(rng, 2, 9000), [1.0, 1.0], [4500, 4500], codec="fp16")
        reduction.sources[1][5000] = math.nan
        reduction.go(swarm)
        await swarm.events[1].until(lambda: swarm.events[1].refused)
        assert swarm.events[1].refused[0][:2] == (7, 1)
        assert not swarm.events[0].done
        assert not swarm.events[1].done

    async def test_sum_that_overflows(self, swarm_of):
        """Weighted values beyond float32 are refused rather than averaged to infinity."""
        swarm = swarm_of(2)
        sources = [np.full(2000, 3e38, np.float32) for _ in range(2)]
        reduction = Reduction(sources, [1.0, 1.0], [1000, 1000])
        reduction.go(swarm)
        await swarm.events[0].until(lambda: swarm.events[0].refused)
        assert 7 not in swarm.events[0].done

    @pytest.mark.parametrize(
        ("fields", "body"),
        [
            ({"sender": 2}, b"x" * 4000),
            ({"part": 1}, b"x" * 4000),
            ({"part": 9}, b"x" * 4000),
            ({"chunk": 5}, b"x" * 4000),
            ({"codec": 1}, b"x" * 4000),
            ({"count": 999}, b"x" * 4000),
            ({}, b"x" * 3999),
            ({}, struct.pack("<f", math.nan) * 1000),
        ],
        ids=["rank", "not mine", "no part", "no chunk", "codec", "count", "length", "NaN"],
    )
    async def test_unusable_contribution(self, swarm_of, fields, body):
        """A contribution that cannot be used is refused, named with the rank of the link it came over."""
        rng = np.random.default_rng(16)
        swarm = swarm_of(3, streams=0)
        wire = swarm.wire(0, 1)
        reduction = Reduction(gradients(rng, 3, 6000), [1.0] * 3, [2000] * 3)
        reduction.go(swarm, [0])
        given = {"transfer": 7, "count": 1000, "sender": 1} | fields
        await send(wire, frame(Kind.CONTRIBUTION, body, **given))
        await swarm.events[0].until(lambda: swarm.events[0].refused)
        assert swarm.events[0].refused[0][:2] == (7, 1)
        assert swarm.events[0].closed == []
        assert swarm.engines[0].progress(7).contributions_received[1] == 0
        wire.close()

    async def test_contribution_of_weight_zero(self, swarm_of):
        """A member announced with weight 0 that contributes all the same is refused."""
        rng = np.random.default_rng(17)
        swarm = swarm_of(2, streams=0)
        wire = swarm.wire(0, 1)
        reduction = Reduction([*gradients(rng, 1, 2000), None], [1.0, 0.0], [1000, 1000])
        reduction.go(swarm, [0])
        await send(wire, frame(Kind.CONTRIBUTION, bytes(4000), transfer=7, count=1000, sender=1))
        await swarm.events[0].until(lambda: swarm.events[0].refused)
        assert swarm.events[0].refused[0][:2] == (7, 1)
        wire.close()

    async def test_duplicate_contribution_counts_once(self, swarm_of):
        """The same contribution sent twice is added once; a result sent twice is taken once."""
        swarm = swarm_of(2, streams=0)
        wire = swarm.wire(0, 1)
        mine, theirs = np.full(2000, 1.0, np.float32), np.full(1000, 3.0, np.float32)
        reduction = Reduction([mine, None], [1.0, 1.0], [2000, 0], chunk_elements=1000)
        reduction.go(swarm, [0])
        given = {"transfer": 7, "count": 1000, "sender": 1}
        first = frame(Kind.CONTRIBUTION, theirs.tobytes(), chunk=0, **given)
        await send(
            wire,
            first + first + frame(Kind.CONTRIBUTION, theirs.tobytes(), chunk=1, flags=1, **given) + first,
        )
        results = [await read_frame(wire) for _ in range(2)]
        await reduction.finished(swarm, [0])
        assert [(header.kind, header.chunk) for header, _ in results] == [(Kind.RESULT, 0), (Kind.RESULT, 1)]
        assert all(np.frombuffer(body, np.float32).tolist() == [2.0] * 1000 for _, body in results)
        assert np.array_equal(reduction.decoded(0), np.full(2000, 2.0, np.float32))
        assert swarm.engines[0].progress(7).contributions_received == (2, 2)
        wire.close()

    async def test_later_copy_does_not_overwrite(self, swarm_of):
        """A whole chunk is never overwritten: not by another copy, not by one begun before it."""
        swarm = swarm_of(2, streams=0)
        slow, fast = swarm.wire(0, 1), swarm.wire(0, 1)
        reduction = Reduction([None, np.ones(1000, np.float32)], [0.0, 1.0], [0, 1000])
        reduction.go(swarm, [0])
        right, wrong = np.full(1000, 1.0, np.float32).tobytes(), np.full(1000, 2.0, np.float32).tobytes()
        given = {"transfer": 7, "part": 1, "count": 1000, "sender": 1}
        stalled = frame(Kind.RESULT, wrong, **given)
        link = swarm.link(0, 1)
        await send(slow, stalled[:2000])
        await poll(lambda: swarm.engines[0].traffic(link)[1] == 2000)
        await send(fast, frame(Kind.RESULT, right, **given))
        await reduction.finished(swarm, [0])
        assert reduction.results[0].tobytes() == right
        await send(slow, stalled[2000:] + frame(Kind.RESULT, wrong, **given))
        await poll(lambda: swarm.engines[0].traffic(link)[1] == 3 * len(stalled))
        assert reduction.results[0].tobytes() == right
        assert swarm.events[0].done[7] == reduction.digests(0)
        assert swarm.events[0].closed == []
        slow.close()
        fast.close()

    async def test_broken_copy_does_not_count(self, swarm_of):
        """A result that breaks off half-way, or whose checksum is wrong, is still missing."""
        swarm = swarm_of(2, streams=0)
        reduction = Reduction([None, np.ones(1000, np.float32)], [0.0, 1.0], [0, 1000])
        reduction.go(swarm, [0])
        whole = frame(
            Kind.RESULT, np.ones(1000, np.float32).tobytes(), transfer=7, part=1, count=1000, sender=1
        )
        for bad in (whole[:2000], whole[:-1] + b"\0"):
            wire = swarm.wire(0, 1)
            await send(wire, bad)
            wire.shutdown(socket.SHUT_WR)
            count = len(swarm.events[0].closed)
            await swarm.events[0].until(lambda count=count: len(swarm.events[0].closed) > count)
            wire.close()
            assert swarm.engines[0].missing(7, 1) == Missing((), ((1, 0),))
        wire = swarm.wire(0, 1)
        await send(wire, whole)
        await reduction.finished(swarm, [0])
        wire.close()

    @pytest.mark.parametrize(
        "data",
        [
            os.urandom(4096),
            bytes(40),
            b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n",
            frames.pack(Header(Kind.PING, 16, body_crc=1)) + bytes(16),
        ],
        ids=["random", "zeros", "http", "ping with a wrong checksum"],
    )
    async def test_garbage_closes_its_stream(self, swarm_of, data):
        """Bytes that are no frames close that stream with a reason; the link's other streams go on."""
        rng = np.random.default_rng(18)
        swarm = swarm_of(2, streams=1)
        wire = swarm.wire(0, 1)
        await send(wire, data)
        await swarm.events[0].until(lambda: swarm.events[0].closed)
        assert swarm.events[0].closed[0][:2] == (swarm.link(0, 1), 1)
        assert swarm.events[0].closed[0][2]
        wire.close()
        reduction = Reduction(gradients(rng, 2, 9000), [1.0] * 2, [4500] * 2)
        await reduction.through(swarm)

    async def test_unknown_transfers_are_dropped(self, swarm_of):
        """Frames of transfers that nobody opened are read and forgotten; the stream stays open."""
        swarm = swarm_of(2, streams=0)
        wire = swarm.wire(0, 1)
        buffer = bytearray(1000)
        swarm.engines[0].open_blob(99, memoryview(buffer), 1000)
        unknown = [
            frame(Kind.CONTRIBUTION, b"a" * 100_000, transfer=1),
            frame(Kind.RESULT, b"", transfer=2),
            frame(Kind.BLOB, b"c" * 300_000, transfer=3),
        ]
        await send(wire, b"".join(unknown) + frame(Kind.BLOB, b"d" * 1000, transfer=99))
        await swarm.events[0].until(lambda: swarm.events[0].chunks)
        assert bytes(buffer) == b"d" * 1000
        assert swarm.events[0].closed == []
        wire.close()

    async def test_blob(self, swarm_of):
        """A blob's chunks arrive in their places, in any order, each told once at both ends."""
        swarm = swarm_of(2, streams=3)
        data = os.urandom(1_000_001)
        buffer = bytearray(len(data))
        swarm.engines[1].open_blob(5, memoryview(buffer), 100_000)
        order = [3, 1, 10, 0, 2, 9, 4, 8, 5, 7, 6]
        for chunk in order:
            swarm.engines[0].send_blob(
                swarm.link(0, 1), 5, chunk, memoryview(data)[chunk * 100_000 : (chunk + 1) * 100_000]
            )
        await swarm.events[1].until(lambda: len(swarm.events[1].chunks) == 11)
        await swarm.events[0].until(lambda: len(swarm.events[0].sent) == 11)
        assert bytes(buffer) == data
        assert sorted(swarm.events[1].chunks) == [(5, chunk) for chunk in range(11)]
        assert sorted(swarm.events[0].sent) == [(swarm.link(0, 1), 5, chunk) for chunk in range(11)]
        swarm.engines[1].cancel(5)

    @pytest.mark.parametrize(("chunk", "length"), [(2, 500), (0, 999), (1, 1000)])
    async def test_impossible_blob_chunk(self, swarm_of, chunk, length):
        """A blob chunk that the blob has not, or of the wrong size, closes its stream."""
        swarm = swarm_of(2, streams=0)
        wire = swarm.wire(0, 1)
        swarm.engines[0].open_blob(5, memoryview(bytearray(1500)), 1000)
        await send(wire, frame(Kind.BLOB, bytes(length), transfer=5, chunk=chunk))
        await swarm.events[0].until(lambda: swarm.events[0].closed)
        assert swarm.events[0].chunks == []
        wire.close()

    async def test_cancelled_blob_is_not_touched(self, swarm_of):
        """After `cancel`, the rest of a blob chunk under way is not written into the buffer."""
        swarm = swarm_of(2, streams=0)
        wire = swarm.wire(0, 1)
        buffer = bytearray(100_000)
        swarm.engines[0].open_blob(5, memoryview(buffer), 100_000)
        whole = frame(Kind.BLOB, b"x" * 100_000, transfer=5)
        link = swarm.link(0, 1)
        await send(wire, whole[:50_000])
        await poll(lambda: swarm.engines[0].traffic(link)[1] > frames.HEADER_BYTES)
        swarm.engines[0].cancel(5)
        frozen = bytes(buffer)
        await send(wire, whole[50_000:])
        await poll(lambda: swarm.engines[0].traffic(link)[1] == len(whole))
        assert bytes(buffer) == frozen
        assert swarm.events[0].chunks == []
        assert swarm.events[0].closed == []
        wire.close()

    async def test_gradients_before_blobs(self, swarm_of):
        """Contributions leave before results, and both before blobs that were queued earlier."""
        swarm = swarm_of(2, streams=0)
        reduction = Reduction([np.ones(4000, np.float32)] * 2, [1.0] * 2, [2000, 2000])
        blob = memoryview(bytes(1000))
        swarm.engines[0].send_blob(swarm.link(0, 1), 5, 0, blob)
        reduction.go(swarm, [0])
        wire = swarm.wire(0, 1)
        kinds = [(await read_frame(wire))[0].kind for _ in range(3)]
        assert kinds == [Kind.CONTRIBUTION, Kind.CONTRIBUTION, Kind.BLOB]
        wire.close()

    async def test_heartbeats(self, swarm_of):
        """Heartbeats measure the round trip, and tell the other side's loop and trainer apart."""
        swarm = swarm_of(2)
        link = swarm.link(0, 1)
        silent = swarm.engines[0].health(link)
        assert (silent.last_heard_at, silent.rtt_s, silent.trainer_age_s) == (0.0, 0.0, math.inf)
        swarm.engines[1].note_loop()
        for engine in swarm.engines:
            engine.set_heartbeat(0.02)
        await poll(lambda: swarm.engines[0].health(link).rtt_s > 0)
        health = swarm.engines[0].health(link)
        assert 0 < health.rtt_s < DEADLINE_S
        assert 0 <= health.loop_age_s < DEADLINE_S
        assert health.trainer_age_s == math.inf
        swarm.engines[1].note_trainer()
        await poll(lambda: swarm.engines[0].health(link).trainer_age_s < DEADLINE_S)
        before = swarm.engines[0].health(link).last_heard_at
        await poll(lambda: swarm.engines[0].health(link).last_heard_at > before)
        swarm.engines[1].detach(swarm.link(1, 0))

    async def test_ping_is_answered(self, swarm_of):
        """A PING comes back as a PONG with its stamp."""
        swarm = swarm_of(2, streams=0)
        wire = swarm.wire(0, 1)
        await send(wire, frame(Kind.PING, Heartbeat(0xDEADBEEFCAFE, 0.5, math.inf).pack()))
        header, body = await read_frame(wire)
        assert header.kind is Kind.PONG
        assert Heartbeat.parse(body).stamp == 0xDEADBEEFCAFE
        wire.close()

    async def test_who_pings_is_pinged(self, swarm_of):
        """A PING asks for an answer while none come from the other side; else one a second does."""
        swarm = swarm_of(2, streams=0)
        wire = swarm.wire(0, 1)
        swarm.engines[0].set_heartbeat(0.02)

        async def beat() -> Heartbeat:
            header, body = await read_frame(wire)
            assert header.kind is Kind.PING
            return Heartbeat.parse(body)

        assert NO_ANSWER not in [(await beat()).stamp for _ in range(3)]
        asked: list[float] = []
        unasked = 0
        while unasked < 20:  # it is pinged, and answers none of these
            await send(wire, frame(Kind.PING, Heartbeat(NO_ANSWER, 0.0, 0.0).pack()))
            stamp = (await beat()).stamp
            if stamp == NO_ANSWER:
                unasked += 1
            elif unasked:
                asked.append(stamp / 1e9)
        assert all(b - a >= ANSWER_S for a, b in itertools.pairwise(asked))
        wire.close()

    async def test_a_ping_that_waits_still_asks(self, swarm_of):
        """While a stream takes nothing for a second, the PING that waits asks for the round trip, and so does
        each that replaces it.
        """
        swarm = swarm_of(2, streams=0)
        wire = swarm.wire(0, 1)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        swarm.engines[0].set_heartbeat(0.02)
        pinged = frame(Kind.PING, Heartbeat(NO_ANSWER, 0.0, 0.0).pack())
        stamp = 1
        while stamp != NO_ANSWER:
            await send(wire, pinged)
            header, body = await read_frame(wire)
            stamp = Heartbeat.parse(body).stamp
        blob = memoryview(os.urandom(4 << 20))  # eight are more than the sockets hold, and are not packed
        for chunk in range(8):
            swarm.engines[0].send_blob(swarm.link(0, 1), 5, chunk, blob)
        due = time.monotonic() + ANSWER_S + 0.2
        beats = 0
        while time.monotonic() < due or beats < 10:
            await send(wire, pinged)
            await asyncio.sleep(0.02)
            beats += time.monotonic() >= due
        beat = Heartbeat(0, 0.0, 0.0)
        while beat.loop_age_s <= ANSWER_S:  # as nobody calls note_loop(), its age tells when a PING was made
            header, body = await read_frame(wire)
            if header.kind is Kind.PING:
                beat = Heartbeat.parse(body)
        assert beat.stamp != NO_ANSWER
        wire.close()

    async def test_upload_limit(self, swarm_of):
        """An upload limit is exceeded by at most 5 % and put to use; lifting it lets the rest go at once."""
        swarm = swarm_of(2)
        loop = asyncio.get_running_loop()
        data = memoryview(os.urandom(50_000))
        swarm.engines[0].set_upload_limit(2_000_000)
        link = swarm.link(0, 1)
        start = loop.time()
        for chunk in range(1000):
            swarm.engines[0].send_blob(link, 5, chunk, data)
        moved = [(start, 0)]  # after every four chunks: a busy machine wakes late, but not always

        def put_to_use() -> bool:
            if len(swarm.events[0].sent) < 4 * len(moved):
                return False
            moved.append((loop.time(), swarm.engines[0].traffic(link)[0]))
            (before, less), (now, more) = moved[-2:]
            return len(moved) > 5 and more - less >= 2_000_000 * (now - before) * 0.4

        await swarm.events[0].until(put_to_use)
        for now, sent in moved:
            assert sent <= 2_000_000 * (now - start) + 60_000
        swarm.engines[0].set_upload_limit(None)
        await swarm.events[0].until(lambda: len(swarm.events[0].sent) == 1000)
        assert loop.time() - start < 10  # 25 s under the limit

    async def test_stats_and_traffic(self, swarm_of):
        """Stream statistics add up to the link's traffic, which survives the loss of a stream."""
        rng = np.random.default_rng(19)
        swarm = swarm_of(2, streams=2)
        reduction = Reduction(gradients(rng, 2, 40_000), [1.0] * 2, [20_000] * 2)
        reduction.go(swarm)
        await reduction.finished(swarm)
        link = swarm.link(0, 1)
        stats = swarm.engines[0].stats(link)
        assert sorted(row.stream for row in stats) == [0, 1]
        sent, received = swarm.engines[0].traffic(link)
        assert sent == sum(row.bytes_sent for row in stats) == 20_000 * 8 + 40 * (40 + 16 * swarm.sealed)
        assert received == sum(row.bytes_received for row in stats) == sent
        assert all(row.window_bytes > 0 and row.rtt_s > 0 for row in stats)
        assert sent < swarm.engines[0].wire(link).sent < 1.2 * sent  # headers and acknowledgements
        for engine in swarm.engines:
            engine.finish(reduction.transfer)
        swarm.engines[1].detach(swarm.link(1, 0), 0)
        await swarm.events[0].until(lambda: swarm.events[0].closed)
        assert swarm.engines[0].traffic(link) == (sent, received)
        swarm.engines[0].detach(link)
        assert swarm.engines[0].traffic(link) == (0, 0)
        assert list(swarm.engines[0].streams(link)) == []

    async def test_detach_is_silent(self, swarm_of):
        """`detach` tells nothing at its own side, may be repeated, and closes the other side's streams."""
        swarm = swarm_of(2)
        swarm.engines[0].detach(swarm.link(0, 1))
        swarm.engines[0].detach(swarm.link(0, 1))
        await swarm.events[1].until(lambda: len(swarm.events[1].closed) == 2)
        assert swarm.events[0].closed == []

    async def test_close(self, swarm_of):
        """`close` frees every socket, tells nothing, and may be repeated."""
        swarm = swarm_of(2)
        swarm.engines[0].close()
        swarm.engines[0].close()
        await swarm.events[1].until(lambda: len(swarm.events[1].closed) == 2)
        assert swarm.events[0].closed == []

    async def test_wrong_begin(self, swarm_of):
        """Weights that do not fit, or a missing contribution, are a ValueError of the caller."""
        swarm = swarm_of(2)
        reduction = Reduction([np.ones(10, np.float32)] * 2, [1.0] * 2, [5, 5])
        reduction.open(swarm, [0])
        source = reduction.sources[0]
        for begin in (
            Start((1.0,), 1.0, source),
            Start((0.0, 0.0), 1.0, source),
            Start((-1.0, 2.0), 1.0, source),
            Start((1.0, 1.0), 1.0),
            Start((1.0, 1.0), 1.0, source[:9]),
        ):
            with pytest.raises(ValueError):
                swarm.engines[0].begin(7, begin)
        reduction.start(swarm, [0])
        with pytest.raises(ValueError):
            swarm.engines[0].open_reduce(reduction.job(0))

    async def test_engines_are_collected(self, kinds):
        """A closed swarm leaves no open descriptor behind."""
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        swarm = Swarm(kinds, 3)
        swarm.close()
        del swarm
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= before

    async def test_many_streams(self, swarm_of):
        """Sixteen streams share one job: whichever is free carries the next chunk."""
        rng = np.random.default_rng(20)
        swarm = swarm_of(2, streams=16)
        numel = 2_000_000
        reduction = Reduction(
            gradients(rng, 2, numel), [1.0] * 2, [numel // 2] * 2, codec="fp16", chunk_elements=8192
        )
        await reduction.through(swarm)
        assert sum(row.bytes_sent > 0 for row in swarm.engines[0].stats(swarm.link(0, 1))) > 1


@pytest.mark.skipif(("pump",) not in KINDS, reason="needs the native module")
async def test_the_pump_s_idle_streams_take_turns():
    """Chunks that come one by one go over all streams: two in a row would queue behind each other."""
    swarm, chunks, size = Swarm(("pump",), 2, streams=4), 400, 1000
    link = swarm.link(0, 1)
    swarm.engines[1].open_blob(5, memoryview(bytearray(size * chunks)), size)
    for chunk in range(chunks):
        swarm.engines[0].send_blob(link, 5, chunk, memoryview(os.urandom(size)))
        await swarm.events[1].until(lambda n=chunk + 1: len(swarm.events[1].chunks) == n)
    assert min(row.bytes_sent for row in swarm.engines[0].stats(link)) > size * chunks / 10
    swarm.close()


def test_tcp_pair_is_tcp():
    """The tests' streams are real TCP connections."""
    one, other = tcp_pair()
    assert one.getpeername() == other.getsockname()
    one.close()
    other.close()
