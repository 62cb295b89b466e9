"""Plain tensors averaged between real processes, and between peers of one process."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
import torch

from p2pavg.bench.workers import Workers
from p2pavg.errors import ConfigurationError, CredentialError, RoundFailedError
from p2pavg.peer.peer import Peer

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
