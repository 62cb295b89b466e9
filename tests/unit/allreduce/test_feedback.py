"""What int8 takes from a contribution comes back in later ones, whatever the weights, and only on commit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2pavg import codecs
from p2pavg.allreduce.encoding import HostGradient
from p2pavg.allreduce.feedback import Residual
from p2pavg.allreduce.jobs import Jobs
from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.rounds.loop.supply import Supply
from tests.unit.codecs.codec_cases import IMPLEMENTATIONS, briefly, decoded, implementation, runs
from tests.unit.optim.fake_path import FakeGradient
from tests.unit.transport.engine_swarm import ENGINES, Swarm

N = 6000
INT8 = codecs.get("int8")


def gradient(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(N).astype(np.float32)


def sent(residual: Residual, mean: np.ndarray, share: float, codec: codecs.Codec = INT8) -> np.ndarray:
    out = np.empty(codec.encoded_size(len(mean)), np.uint8)
    assert residual.encode(codec, 0, mean, 1.0, out, share)
    return decoded(codec, out, len(mean))


class TestResidual:
    def test_averages_add_up_whatever_the_weights(self) -> None:
        """With a share that changes a hundredfold from epoch to epoch, what all averages got of this peer is
        what it had, but for one rounding; without the residual it is off by as much as the epochs' roundings.
        """
        residual, with_it, without, exact = Residual(N), np.zeros(N), np.zeros(N), np.zeros(N)
        mean = gradient(1)
        for epoch in range(60):
            share = (0.9, 0.009, 0.3)[epoch % 3]
            with_it += share * sent(residual, mean, share)
            residual.commit()
            without += share * sent(Residual(N), mean, share)
            exact += share * mean.astype(np.float64)
        step = np.abs(mean).max() / 127
        assert np.abs(with_it - exact).max() < 0.6 * step
        assert np.abs(without - exact).max() > 10 * 0.6 * step

    def test_an_attempt_that_failed_changes_nothing(self) -> None:
        """Until commit() every attempt of an epoch sends the same bytes, though others came in between."""
        residual = Residual(N)
        sent(residual, gradient(1), 0.5)
        residual.commit()
        first = sent(residual, gradient(2), 0.5)
        sent(residual, gradient(3), 0.1)
        assert np.array_equal(sent(residual, gradient(2), 0.5), first)
        residual.commit()
        assert not np.array_equal(sent(residual, gradient(2), 0.5), first)

    def test_what_has_no_gradient_does_not_move(self) -> None:
        """An element that is 0 in an epoch is sent as 0; its residual waits for the next gradient."""
        residual, mean = Residual(N), gradient(1)
        sent(residual, mean, 0.5)
        residual.commit()
        half = mean.copy()
        half[: N // 2] = 0
        assert not sent(residual, half, 0.5)[: N // 2].any()
        residual.commit()
        fresh = Residual(N)
        sent(fresh, mean, 0.5)
        fresh.commit()
        assert np.array_equal(sent(residual, mean, 0.5)[: N // 2], sent(fresh, mean, 0.5)[: N // 2])

    def test_it_can_be_forgotten(self) -> None:
        """After a heal, contributions go as they are."""
        residual, mean = Residual(N), gradient(1)
        plain = sent(residual, mean, 0.5)
        residual.commit()
        residual.forget()
        assert np.array_equal(sent(residual, mean, 0.5), plain)

    @pytest.mark.parametrize("which", IMPLEMENTATIONS)
    @pytest.mark.parametrize("name", ["int8", "int4", "fp16"])
    @briefly
    @given(
        x=st.one_of(runs(), runs(finite=False)), share=st.floats(1e-6, 1), scale=st.floats(-2, 2, width=32)
    )
    def test_twins_lose_alike(self, which: str, name: str, x: np.ndarray, share: float, scale: float) -> None:
        """Compiled code and NumPy send the same bytes and keep the same residual, whatever the values."""
        twin, found = codecs.TwinCodec(name, codecs.WIRE_IDS[name]), []
        owed = np.empty(2 * len(x), np.uint8)
        codecs.get("bf16").encode(x[::-1].copy(), owed, 0.01)
        with implementation(which, name) as codec:
            for of in (codec, twin):
                out, kept = np.empty(codec.encoded_size(len(x)), np.uint8), np.empty(2 * len(x), np.uint8)
                finite = codecs.encode_feedback(of, x, scale, owed, share, out, kept)
                found.append((finite, out.tobytes(), kept.tobytes()))
        assert found[0] == found[1]


class TestHostEncoding:
    def test_in_layout_order(self) -> None:
        """Chunks of uneven parts are encoded one after the other, as the codec alone would."""
        values, parts = gradient(1), [(0, 2500), (2500, 0), (2500, 3500)]
        encoding = HostGradient(
            values,
            lambda codec, start, values, scale, out: codec.encode(values, out, scale),
            lambda nbytes: np.empty(nbytes, np.uint8),
        ).encode(INT8, parts, 1000, 0.5)
        assert encoding.finite()
        assert encoding.whole()
        at = 0
        for start, count in (
            (0, 1000),
            (1000, 1000),
            (2000, 500),
            *((2500 + k, 1000) for k in (0, 1000, 2000)),
        ):
            size, expected = INT8.encoded_size(count), np.empty(INT8.encoded_size(count), np.uint8)
            INT8.encode(values[start : start + count], expected, 0.5)
            assert np.array_equal(encoding.data[at : at + size], expected)
            at += size

    def test_it_stops(self) -> None:
        """Nothing is read or written any more once its attempt ended: only the chunk at hand is finished."""
        begun, going = threading.Event(), threading.Event()

        def encode(*chunk: object) -> bool:
            begun.set()
            return going.wait(10)

        encoding = HostGradient(gradient(1), encode, lambda n: np.empty(n, np.uint8)).encode(
            INT8, [(0, N)], 1000, 1.0
        )
        assert begun.wait(10)
        stopping = threading.Thread(target=encoding.stop)
        stopping.start()
        while not encoding._stopped.is_set():
            pass
        going.set()
        stopping.join(10)
        assert encoding.chunks_done() == 1
        assert not encoding.whole()

    def test_a_codec_that_raises_is_told(self, caplog: pytest.LogCaptureFixture) -> None:
        """What somebody else's codec raises is logged, and the chunk never counts as in place."""

        def encode(
            codec: codecs.Codec, start: int, values: np.ndarray, scale: float, out: np.ndarray
        ) -> bool:
            if start:
                raise ZeroDivisionError
            return True

        encoding = HostGradient(gradient(1), encode, lambda n: np.empty(n, np.uint8)).encode(
            INT8, [(0, N)], 1000, 1.0
        )
        assert not encoding.finite()
        assert encoding.chunks_done() == 1
        assert encoding.failed()
        assert "the codec 'int8' cannot encode this gradient" in caplog.text

    def test_infinity_is_told(self) -> None:
        """A value that is not finite is told at the end, and such an attempt leaves no residual."""
        values, residual = gradient(1), Residual(N)
        values[N - 1] = np.inf
        encoding = HostGradient(
            values,
            partial(residual.encode, share=0.5),
            lambda nbytes: np.empty(nbytes, np.uint8),
        ).encode(INT8, [(0, N)], 1000, 1.0)
        assert not encoding.finite()
        assert not encoding.whole()


PEERS = (b"one", b"two")
PARTS = ((Part(0, 0, 2500), Part(1, 2500, 3500)), (Part(1, 0, 4096), Part(0, 4096, 1904)))


class Pair:
    """Two peers' jobs over real streams."""

    def __init__(self, kind: str, codec: codecs.Codec, feedback: int, on_device: bool = False) -> None:
        self.on_device = on_device
        self.swarm = Swarm([kind], 2)
        self.jobs = [Jobs(engine, codec, N, feedback=feedback) for engine in self.swarm.engines]
        self.transfer = 0

    def begin(self, epoch: int, means: list[np.ndarray], weights: list[float]) -> None:
        self.transfer += 1
        for rank, jobs in enumerate(self.jobs):
            links = {PEERS[1 - rank]: Swarm.link(rank, 1 - rank)}
            members = [(peer, True) for peer in PEERS]
            jobs.open(self.transfer, PEERS[rank], members, Plan(PARTS[epoch % 2]), links, epoch=epoch)
        for rank, jobs in enumerate(self.jobs):
            mean = means[rank]
            offered = FakeGradient(torch.from_numpy(mean)) if self.on_device else mean
            source = jobs.prepared(self.transfer, weights, offered)
            if not isinstance(source, np.ndarray):
                job = jobs.get(self.transfer)
                assert job is not None
                parts = [(part.start, part.count) for part in job.layout.parts]
                source = source.encode(job.codec, parts, job.layout.chunk_elements, 1.0)
            jobs.begin(self.transfer, weights, source, 1.0)
            while jobs.supply(self.transfer):
                pass

    def cancel(self) -> None:
        for jobs in self.jobs:
            jobs.cancel(self.transfer)

    async def average(self, epoch: int, means: list[np.ndarray], weights: list[float]) -> np.ndarray:
        self.begin(epoch, means, weights)
        results = []
        for rank, jobs in enumerate(self.jobs):
            events = self.swarm.events[rank]
            await events.until(lambda events=events: self.transfer in events.done)
            out = np.empty(N, np.float32)
            jobs.finish(self.transfer).encoded().decode_into(out)
            results.append(out)
        assert np.array_equal(*results)
        return results[0]


WEIGHTS = ([24.0, 8.0], [4.0, 28.0], [16.0, 16.0])


async def trained(
    kind: str, codec: codecs.Codec, feedback: bool, aborts: bool, on_device: bool = False
) -> list[np.ndarray]:
    """The averages of some epochs of constant gradients, under changing weights and parts."""
    pair, means, averages = Pair(kind, codec, feedback, on_device), [gradient(1), gradient(1)], []
    try:
        for epoch in range(12):
            weights = WEIGHTS[epoch % 3]
            if aborts and epoch % 2:
                pair.begin(epoch, means, weights)
                pair.cancel()
            averages.append(await pair.average(epoch, means, weights))
    finally:
        pair.swarm.close()
    return averages


@pytest.mark.parametrize("aborts", [False, True])
@pytest.mark.parametrize(("name", "levels", "returned"), [("int8", 127, 2.0**-12), ("int4", 7, 1 / 254)])
def test_jobs_remove_the_bias(name: str, levels: int, returned: float, aborts: bool) -> None:
    """Over epochs of changing weights and parts, with attempts that were aborted, averages of a coarse codec
    add up to the gradients; the pump and its Python twin agree to the bit, gradients on a device too, and
    without feedback they do not add up.
    """
    codec = codecs.get(name)
    found = [asyncio.run(trained(kind, codec, True, aborts)) for kind in ENGINES]
    found.append(asyncio.run(trained("python", codec, True, aborts, on_device=True)))
    for other in found[1:]:
        assert all(np.array_equal(*pair) for pair in zip(found[0], other, strict=True))
    largest = np.abs(gradient(1)).max()
    exact, step = 12 * gradient(1).astype(np.float64), largest / levels
    off = np.abs(np.sum(found[0], axis=0, dtype=np.float64) - exact)
    # what rounding results, to fp16 or int8, may add up to, at the very worst
    results = 12 * returned * (np.abs(gradient(1)) if name == "int8" else largest + step)
    assert (off < 1.2 * step + results).all()
    plain = asyncio.run(trained("python", codec, False, aborts))
    assert np.abs(np.sum(plain, axis=0, dtype=np.float64) - exact).max() > 2.5 * step


async def in_turn(kind: str, turns: int) -> np.ndarray:
    """How far the sums of the averages of two vectors that take turns are off."""
    pair, gradients = Pair(kind, INT8, turns), (gradient(1), 1e-3 * gradient(2))
    sums = np.zeros((2, N))
    try:
        for epoch in range(12):
            mean = gradients[epoch % 2]
            sums[epoch % 2] += await pair.average(epoch, [mean, mean], WEIGHTS[epoch % 3])
    finally:
        pair.swarm.close()
    return np.abs(sums - [6 * each.astype(np.float64) for each in gradients])


def test_vectors_in_turn_lose_nothing_to_each_other() -> None:
    """What is owed to one vector is added to that one alone: a thousandth as large, the other has no trace of
    it; with one residual for both it has.
    """
    for kind in ENGINES:
        small = np.abs(1e-3 * gradient(2)).max()
        assert asyncio.run(in_turn(kind, 2))[1].max() < 0.02 * small
        assert asyncio.run(in_turn(kind, 1))[1].max() > 2 * small


def test_chance_draws_anew_in_every_epoch() -> None:
    """StochasticInt8 needs no residual: its errors of 12 epochs cancel, the same on both engines."""
    found = [asyncio.run(trained(kind, codecs.StochasticInt8(5), True, False)) for kind in ENGINES]
    for other in found[1:]:
        assert all(np.array_equal(*pair) for pair in zip(found[0], other, strict=True))
    step = np.abs(gradient(1)).max() / 127
    off = np.sum(found[0], axis=0, dtype=np.float64) / 12 - gradient(1)
    assert np.sqrt(np.mean(off**2)) < 0.25 * step / np.sqrt(12) * 2
    assert not np.array_equal(found[0][0], found[0][6])


def _own_parts(jobs: Jobs) -> Callable[[np.ndarray], bool]:
    jobs.open(1, PEERS[0], [(PEERS[0], True)], Plan((Part(0, 0, N),)), {})
    return lambda values: jobs.prepared(1, [8.0], values) is values


async def test_a_codec_that_raises_gives_its_contribution_up() -> None:
    """At once, by name, instead of waiting for chunks that never come."""
    swarm, told = Swarm(["python"], 1), asyncio.Event()
    try:
        jobs = Jobs(swarm.engines[0], INT8, N, feedback=True)
        jobs.open(1, PEERS[0], [(PEERS[0], True)], Plan((Part(0, 0, N),)), {})

        def refused(transfer: int, rank: int, why: str) -> None:
            assert (transfer, rank, why) == (1, 0, "its codec cannot encode its gradient")
            told.set()

        def encode(*chunk: object) -> bool:
            raise ZeroDivisionError

        broken = HostGradient(gradient(1), encode, lambda n: np.empty(n, np.uint8))
        Supply(asyncio.get_running_loop(), jobs, refused, pytest.fail).begin(1, [8.0], broken, 1.0)
        await asyncio.wait_for(told.wait(), 10)
    finally:
        swarm.close()


async def test_a_gradient_on_an_accelerator_is_made_up_for_alone_too() -> None:
    """It is encoded on its way to the host, even when all parts are our own: with what is owed."""
    swarm = Swarm(["python"], 1)
    try:
        jobs = Jobs(swarm.engines[0], INT8, N, feedback=True)
        jobs.open(1, PEERS[0], [(PEERS[0], True)], Plan((Part(0, 0, N),)), {})
        prepared = jobs.prepared(1, [8.0], FakeGradient(torch.from_numpy(gradient(1))))
        assert isinstance(prepared, FakeGradient)
        assert prepared.owed is not None
        assert prepared.owed.share == 1.0
    finally:
        swarm.close()


async def test_a_peer_alone_loses_nothing() -> None:
    """Where nothing travels, nothing is encoded beforehand."""
    swarm = Swarm(["python"], 1)
    try:
        assert _own_parts(Jobs(swarm.engines[0], INT8, N, feedback=True))(gradient(1))
    finally:
        swarm.close()
