"""Plain tensors averaged between real processes, and between peers of one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from p2pavg.bench.workers import Workers
from p2pavg.errors import ConfigurationError, CredentialError, RoundFailedError
from p2pavg.peer.peer import Peer
from p2pavg.rounds.machine.machine import Machine

LISTEN = "127.0.0.1:0"
DEADLINE_S = 60.0


@pytest.mark.parametrize(
    ("compression", "native"), [("none", "1"), ("fp16", "1"), ("bf16", "1"), ("int8", "1"), ("int8", "0")]
)
def test_three_processes_hold_the_same_bits(compression: str, native: str) -> None:
    """Every codec with the pump, and the hardest with its Python twin: the mean within the codec's error,
    equal to the bit.
    """
    tolerance = {"none": 1e-6, "fp16": 2e-2, "bf16": 1e-1, "int8": 2e-1}[compression]
    with Workers(3, "p2pavg.bench.allreduce.worker", environment={"P2PAVG_NATIVE": native}) as workers:
        workers.join(
            numel=300_001, peers=3, compression=compression, streams=2, beside="none", credentials=None
        )
        for index in range(2):
            workers.all(deadline_s=DEADLINE_S, do="fill")
            answers = workers.all(deadline_s=DEADLINE_S, do="round", index=index)
            assert len({answer["digest"] for answer in answers}) == 1
            assert max(answer["max_abs_error"] for answer in answers) <= tolerance


async def test_weights_shapes_and_dtypes() -> None:
    """Tensors and arrays of several dtypes and shapes become their weighted mean, in place."""
    async with (
        Peer("mix", listen=LISTEN, compression="none") as one,
        Peer("mix", listen=LISTEN, compression="none", initial_peers=[one.address]) as two,
    ):
        mine = [torch.ones(3, 4), np.ones((5,), np.float16), torch.ones(2, 2, dtype=torch.bfloat16).t()]
        yours = [torch.full((3, 4), 5.0), np.full((5,), 5.0, np.float16), torch.full((2, 2), 5.0).bfloat16()]
        first, second = await asyncio.gather(
            one.all_reduce(mine, weight=3.0, group_size=2), two.all_reduce(yours, weight=1.0, group_size=2)
        )
        for value in (*mine, *yours):
            assert np.all(np.asarray(torch.as_tensor(value).float()) == 2.0)
        assert first.lineage == second.lineage
        assert sorted(member.weight for member in first.members) == [1.0, 3.0]


async def test_a_newcomer_that_a_full_run_refuses_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears when it enters why it is one too many, and the members average on at the first attempt."""
    async with (
        Peer("full", listen=LISTEN) as one,
        Peer("full", listen=LISTEN, initial_peers=[one.address]) as two,
    ):
        await asyncio.gather(*(peer.all_reduce(torch.ones(9), group_size=2) for peer in (one, two)))
        monkeypatch.setenv("P2PAVG_MOST_PEERS", "2")
        async with Peer("full", listen=LISTEN, initial_peers=[one.address]) as third:
            with pytest.raises(ConfigurationError, match="has 2 peers, and P2PAVG_MOST_PEERS is 2"):
                await third.all_reduce(torch.ones(9), group_size=2)
        reports = await asyncio.gather(*(peer.all_reduce(torch.ones(9), group_size=2) for peer in (one, two)))
        assert {(report.attempts, len(report.members)) for report in reports} == {(1, 2)}


async def test_reports_tell_what_packing_spared() -> None:
    """Zeros cost their headers: what would have been sent of them stands in `spared_bytes`, in one
    report only.
    """
    async with (
        Peer("zeros", listen=LISTEN, compression="none") as one,
        Peer("zeros", listen=LISTEN, compression="none", initial_peers=[one.address]) as two,
    ):
        noise = np.random.default_rng(0).standard_normal(200_000).astype(np.float32)
        for values, least, most in ((np.zeros_like(noise), 700_000, 800_000), (noise, 0, 0)):
            reports = await asyncio.gather(
                *(peer.all_reduce(values.copy(), group_size=2) for peer in (one, two))
            )
            assert all(least <= report.spared_bytes <= most for report in reports)
            assert all(report.memory.host > report.memory.host_peak > values.nbytes for report in reports)
            assert all(report.bytes_sent + report.spared_bytes >= values.nbytes for report in reports)


async def test_a_peer_alone_keeps_its_values() -> None:
    """Without others the average is one's own."""
    async with Peer("alone", listen=LISTEN) as peer:
        values = np.linspace(-1, 1, 1000, dtype=np.float32)
        report = await peer.all_reduce(values, group_size=1)
        assert np.allclose(values, np.linspace(-1, 1, 1000), atol=1e-3)
        assert report.bytes_sent == 0


async def test_a_group_that_does_not_come_together() -> None:
    """The deadline ends the wait with RoundFailedError, and the values stay as they were."""
    async with Peer("lonely", listen=LISTEN) as peer:
        values = np.ones(10, np.float32)
        with pytest.raises(RoundFailedError, match="group"):
            await peer.all_reduce(values, group_size=2, timeout=0.5)
        assert np.all(values == 1.0)
        await peer.all_reduce(values, group_size=1)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), 2e12])
async def test_impossible_weights_are_refused(weight: float) -> None:
    """A weight that is negative, not finite or beyond 1e12 never reaches a round."""
    async with Peer("weights", listen=LISTEN) as peer:
        with pytest.raises(ConfigurationError, match="weight"):
            await peer.all_reduce(np.ones(10, np.float32), weight=weight)


async def test_a_closed_run() -> None:
    """Members of a closed run average; who has no credentials, or another run's, is told so."""
    from p2pavg.credentials import Authority

    authority = Authority.new("closed")
    texts = [authority.member().to_text() for _ in range(2)]
    async with (
        Peer("closed", listen=LISTEN, credentials=texts[0]) as one,
        Peer("closed", listen=LISTEN, credentials=texts[1], initial_peers=[one.address]) as two,
    ):
        values = [np.ones(1000, np.float32), np.full(1000, 3.0, np.float32)]
        await asyncio.gather(
            *(p.all_reduce(v, group_size=2) for p, v in zip((one, two), values, strict=True))
        )
        assert all(np.all(v == 2.0) for v in values)
        for other in (None, Authority.new("closed").member().to_text()):
            async with Peer(
                "closed", listen=LISTEN, credentials=other, initial_peers=[one.address]
            ) as intruder:
                with pytest.raises(CredentialError, match="credentials"):
                    await intruder.all_reduce(values[0].copy(), group_size=1)


def _until_it_trains(peer: Peer) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while peer._session is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_who_asked_a_peer_before_it_trained_sees_it_train() -> None:
    """A peer that finds nobody in the table asks at the address it was given; that one may begin later."""
    async with (
        Peer("early", listen=LISTEN) as late,
        Peer("early", listen=LISTEN, initial_peers=[late.address]) as early,
    ):
        values = [np.full(10, 1.0, np.float32), np.full(10, 3.0, np.float32)]
        waiting = asyncio.create_task(early.all_reduce(values[0], group_size=2, timeout=20.0))
        await asyncio.to_thread(_until_it_trains, early)
        await asyncio.gather(waiting, late.all_reduce(values[1], group_size=2, timeout=20.0))
        assert np.all(values[0] == 2.0)
        assert np.array_equal(*values)


async def test_averaging_alone_by_accident_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Without a group_size a peer averages over whoever is there; when that is nobody, it says so, once."""
    async with Peer("alone", listen=LISTEN) as peer:
        for _ in range(2):
            await peer.all_reduce(np.ones(10, np.float32))
    told = [r.getMessage() for r in caplog.records if "averaged over this peer alone" in r.getMessage()]
    assert len(told) == 1
    assert "group_size=N" in told[0]


async def test_a_cancelled_call_takes_back_what_it_declared() -> None:
    """The next call has the turn at once; a call that waits for its turn ends there."""
    async with (
        Peer("cancelled", listen=LISTEN) as one,
        Peer("cancelled", listen=LISTEN, initial_peers=[one.address]) as two,
    ):
        first, second = np.ones(10, np.float32), np.full(10, 3.0, np.float32)
        await asyncio.gather(*(peer.all_reduce(first, group_size=2) for peer in (one, two)))
        alone = asyncio.create_task(one.all_reduce(first, group_size=2, timeout=DEADLINE_S))
        await until(lambda: one._session is not None and one._session.samples() == 1)  # it is under way
        queued = asyncio.create_task(one.all_reduce(first, group_size=2, timeout=DEADLINE_S))
        with pytest.raises(RoundFailedError, match=r"an earlier all_reduce .* the 0.1 s of this call"):
            await one.all_reduce(first, group_size=2, timeout=0.1)
        for call in (queued, alone):
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert not _machine(one).core.own.boundary
        await asyncio.gather(
            one.all_reduce(first, group_size=2), two.all_reduce(second, group_size=2, timeout=DEADLINE_S)
        )
        assert np.all(first == 2.0)


async def test_a_cancelled_call_leaves_the_values_alone() -> None:
    """A round that has begun is brought to its end, for the others' sake; the tensors are not written."""
    async with (
        Peer("leaves", listen=LISTEN) as one,
        Peer("leaves", listen=LISTEN, initial_peers=[one.address]) as two,
    ):
        for _ in range(50):
            values = [np.full(300_000, 1.0, np.float32), np.full(300_000, 3.0, np.float32)]
            calls = [
                asyncio.create_task(peer.all_reduce(value, group_size=2))
                for peer, value in zip((one, two), values, strict=True)
            ]
            await until(lambda: calls[0].done() or (one._session is not None and _machine(one).counted))  # noqa: B023
            if not calls[0].done():
                break
            await asyncio.gather(*calls)  # all of that round passed in one turn of the loop
        calls[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[0]
        await calls[1]
        assert np.all(values[0] == 1.0)
        assert np.all(values[1] == 2.0)


async def until(true: Callable[[], bool]) -> None:
    """Look at every turn of the loop: a round is short."""
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0)


def _machine(peer: Peer) -> Machine:
    assert peer._runtime is not None
    assert peer._runtime.driver is not None
    return peer._runtime.driver.machine


async def test_more_peers_than_asyncio_has_threads_for() -> None:
    """Calls do not wait for each other's threads."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    async with (
        Peer("threads", listen=LISTEN) as one,
        Peer("threads", listen=LISTEN, initial_peers=[one.address]) as two,
    ):
        values = [np.full(10, 1.0, np.float32), np.full(10, 3.0, np.float32)]
        await asyncio.gather(
            *(p.all_reduce(v, group_size=2) for p, v in zip((one, two), values, strict=True))
        )
        assert np.all(values[0] == 2.0)


@pytest.mark.parametrize("native", ["1", "0"])
async def test_values_that_are_not_finite_are_told_at_once(
    native: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer alone that has NaN hears so, and no warning repeats it; its next call succeeds."""
    monkeypatch.setenv("P2PAVG_NATIVE", native)
    async with Peer("nan", listen=LISTEN) as peer:
        for bad in (np.nan, np.inf):
            values = np.array([1.0, bad, 2.0], np.float32)
            with pytest.raises(RoundFailedError, match="its contribution is not finite"):
                await peer.all_reduce(values, timeout=DEADLINE_S)
            assert np.array_equal(values, np.array([1.0, bad, 2.0], np.float32), equal_nan=True)
        await peer.all_reduce(np.ones(3, np.float32), group_size=1)
    assert not [record for record in caplog.records if "no average" in record.getMessage()]


async def test_others_average_without_values_that_are_not_finite() -> None:
    """Of three peers one has NaN: the others get their mean, and that one an error and its own values."""
    async with (
        Peer("nans", listen=LISTEN, compression="none") as one,
        Peer("nans", listen=LISTEN, compression="none", initial_peers=[one.address]) as two,
        Peer("nans", listen=LISTEN, compression="none", initial_peers=[one.address]) as bad,
    ):
        peers = (one, two, bad)
        await asyncio.gather(*(peer.all_reduce(np.ones(9, np.float32), group_size=3) for peer in peers))
        values = [np.full(9, value, np.float32) for value in (1.0, 3.0, np.nan)]
        *_, error = await asyncio.gather(
            *(peer.all_reduce(value) for peer, value in zip(peers, values, strict=True)),
            return_exceptions=True,
        )
        assert isinstance(error, RoundFailedError)
        assert np.all(values[0] == 2.0)
        assert np.all(values[1] == 2.0)
        assert np.all(np.isnan(values[2]))


async def test_a_group_is_never_smaller_than_asked_for() -> None:
    """Two are asked for, and one of them has NaN: both calls raise, and name the cause; both call again."""
    async with (
        Peer("pair", listen=LISTEN) as one,
        Peer("pair", listen=LISTEN, initial_peers=[one.address]) as two,
    ):
        good, bad = np.ones(10, np.float32), np.full(10, np.nan, np.float32)
        for _ in range(2):
            errors = await asyncio.gather(
                one.all_reduce(good, group_size=2), two.all_reduce(bad, group_size=2), return_exceptions=True
            )
            assert all(isinstance(error, RoundFailedError) for error in errors)
            assert "1 of 2 were averaged" in str(errors[0])
            assert all("its contribution is not finite" in str(error) for error in errors)
            assert np.all(good == 1.0)
        reports = await asyncio.gather(
            *(peer.all_reduce(np.ones(10, np.float32), group_size=2) for peer in (one, two))
        )
        assert [len(report.members) for report in reports] == [2, 2]


async def test_without_weight_a_call_waits_for_somebody_who_has_one(caplog: pytest.LogCaptureFixture) -> None:
    """It neither spins nor floods the log, says the true cause at its timeout, and gets others' mean."""
    async with Peer("light", listen=LISTEN, compression="none") as one:
        with pytest.raises(RoundFailedError, match=r"no peer with a weight above 0 .* within 0.5 s"):
            await one.all_reduce(np.ones(9, np.float32), weight=0.0, timeout=0.5)
        told = [record for record in caplog.records if "no average" in record.getMessage()]
        assert len(told) == 1
        assert one._runtime is not None
        assert one._runtime.driver is not None
        assert len(one._runtime.driver.recorder._causes) < 60
        values = np.ones(9, np.float32)
        light = asyncio.create_task(one.all_reduce(values, weight=0.0, timeout=DEADLINE_S))
        async with Peer("light", listen=LISTEN, compression="none", initial_peers=[one.address]) as two:
            await two.all_reduce(np.full(9, 5.0, np.float32), timeout=DEADLINE_S)
            await light
        assert np.all(values == 5.0)


async def test_nothing_to_average_is_told_at_every_call() -> None:
    """No tensors, or tensors without elements, are no other sizes."""
    async with Peer("empty", listen=LISTEN) as peer:
        for _ in range(2):
            for nothing in ([], np.ones(0, np.float32)):
                with pytest.raises(ConfigurationError, match="there is nothing to average"):
                    await peer.all_reduce(nothing)
            await peer.all_reduce(np.ones(10, np.float32), group_size=1)
