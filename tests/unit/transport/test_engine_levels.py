"""Every engine, and a mixed swarm, reduces in two levels: members to deputies, deputies to owners, and
back.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

import numpy as np
import pytest

from p2pavg.transport.frames import Kind
from tests.unit.transport.engine_swarm import Swarm, poll, two_levels
from tests.unit.transport.test_engine import frame, kinds, read_frame, send, swarm_of

__all__ = ["kinds", "swarm_of"]  # fixtures


class TestTwoLevels:
    @pytest.mark.parametrize("codec", ["none", "fp16", "int8"])
    @pytest.mark.parametrize("pre_encoded", [False, True], ids=["raw", "encoded"])
    @pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (2, 2, 2)], ids=str)
    async def test_two_levels(self, swarm_of, sizes, codec, pre_encoded):
        """With a deputy in each other region all end with equal bits: the weighted mean, over every tree of a
        part, though members of different regions have links only where they reduce.
        """
        reduction = two_levels(sizes, codec=codec, pre_encoded=pre_encoded)
        swarm = swarm_of(sum(sizes))
        await reduction.through(swarm)

    @pytest.mark.parametrize("silent", [(0, 1), (0,), (1, 2, 3), (2,)], ids=str)
    async def test_two_levels_with_weight_zero(self, swarm_of, silent):
        """Regions, deputies and members without weight bring nothing, and serve and get the mean."""
        reduction = two_levels((2, 2, 1), codec="fp16", silent=silent)
        await reduction.through(swarm_of(5))

    @pytest.mark.parametrize("codec", ["none", "fp16", "bf16", "int8", "int4"])
    @pytest.mark.parametrize("pre_encoded", [False, True], ids=["raw", "encoded"])
    @pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 1)], ids=str)
    async def test_two_that_swap(self, swarm_of, sizes, codec, pre_encoded):
        """Where two regions swap partial means, both make a result with equal bits, whatever engine they run:
        the weighted mean, of weights that add up to other floats in another order.
        """
        reduction = two_levels(sizes, codec=codec, pre_encoded=pre_encoded, swaps=True)
        reduction.weights = [0.1 + 0.7 * weight for weight in reduction.weights]
        await reduction.through(swarm_of(sum(sizes)))

    @pytest.mark.parametrize("silent", [(0, 1), (0,), (1, 2, 3), (2,), (2, 3, 4)], ids=str)
    async def test_two_that_swap_with_weight_zero(self, swarm_of, silent):
        """A side without weight sends no partial mean, and makes the result of the other one's."""
        reduction = two_levels((2, 3), codec="fp16", silent=silent, swaps=True)
        await reduction.through(swarm_of(5))

    async def test_both_that_swap_wait_for_no_result(self, swarm_of):
        """A member has the result as soon as both partial means are sent: nothing comes back across."""
        reduction = two_levels((2, 2), codec="fp16", swaps=True)
        swarm = swarm_of(4)
        await reduction.through(swarm)
        for rank, engine in enumerate(swarm.engines):
            progress = engine.progress(7)
            across = [other for other in range(4) if other // 2 != rank // 2]
            assert sum(progress.contributions_sent[other] for other in across) > 0
            assert not any(
                progress.results_sent[other] or progress.results_received[other] for other in across
            )

    @pytest.mark.parametrize("swaps", [False, True], ids=["result", "swap"])
    async def test_a_region_sends_each_part_once(self, swarm_of, swaps):
        """Between two regions of three go one partial mean and one result of each part, or two partial
        means.
        """
        reduction = two_levels((3, 3), codec="fp16", swaps=swaps)
        swarm = swarm_of(6)
        await reduction.through(swarm)
        crossing = sum(
            swarm.engines[i].traffic(Swarm.link(i, j))[0]
            for i in range(6)
            for j in range(6)
            if i // 3 != j // 3
        )
        assert crossing <= 1.05 * 2 * len(reduction.results[0])

    @pytest.mark.parametrize("growing", [False, True], ids=["whole", "growing"])
    async def test_parts_leave_together(self, swarm_of, growing):
        """A deputy gets the chunks of all its parts by turns, so that it uses its links to all owners from
        the beginning; also of a contribution that is encoded while it flows, and waits for a slow link.
        """
        reduction = two_levels((2, 2), pre_encoded=growing, numel=1_600_000)
        swarm = swarm_of(4, streams=0)
        wire = swarm.wire(1, 0)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
        reduction.open(swarm, [1])
        if growing:
            swarm.engines[1].begin(7, replace(reduction.begin(1), ready=0))
            for ready in range(0, 1700, 100):
                swarm.engines[1].supply(7, ready)
        else:
            reduction.start(swarm, [1])
        sent = [(await read_frame(wire))[0] for _ in range(800)]
        waited = sent[600 if growing else 0 :]
        assert {header.part for header in waited} == {0, 2}
        chunks = [header.chunk for header in waited]  # each part has 400
        assert chunks == sorted(chunks)

    @pytest.mark.parametrize("swaps", [False, True], ids=["result", "swap"])
    async def test_a_joiner_behind_a_deputy(self, swarm_of, swaps):
        """A joiner whose region has a deputy gets the result from it, after the voters."""
        reduction = two_levels((2, 3), codec="fp16", silent=(4,), joiners=(4,), swaps=swaps)
        swarm = swarm_of(5)
        await reduction.through(swarm)

    async def test_result_before_a_deputy_has_begun(self, swarm_of):
        """A deputy without weight below it that begins last passes on the result that came before that."""
        reduction = two_levels((2, 2), codec="fp16", silent=(2, 3))
        swarm = swarm_of(4)
        reduction.open(swarm)
        reduction.start(swarm, [0, 1, 3])
        await poll(lambda: swarm.engines[0].progress(7).results_sent[2])
        assert not any(swarm.events[rank].done for rank in (2, 3))
        reduction.start(swarm, [2])
        await reduction.finished(swarm)
        reduction.check(swarm)

    @pytest.mark.parametrize("swaps", [False, True], ids=["result", "swap"])
    async def test_lost_partial_is_resent(self, swarm_of, swaps):
        """Streams between two regions break in mid-job: what the owners and deputies lack is sent again."""
        reduction = two_levels((2, 2), codec="fp16", numel=400_000, swaps=swaps)
        swarm = swarm_of(4)
        reduction.open(swarm)
        reduction.start(swarm)
        await poll(lambda: any(sum(swarm.engines[r].progress(7).contributions_sent) for r in range(4)))
        for i in (0, 1):
            for j in (2, 3):
                swarm.engines[i].detach(Swarm.link(i, j))
                swarm.engines[j].detach(Swarm.link(j, i))
                swarm.connect(i, j)

        async def repair() -> None:
            while True:
                for i in range(4):
                    for j in range(4):
                        if i != j:
                            missing = swarm.engines[i].missing(7, j)
                            swarm.engines[j].resend(7, i, missing)
                await asyncio.sleep(0.05)

        repairing = asyncio.create_task(repair())
        try:
            await reduction.finished(swarm)
        finally:
            repairing.cancel()
        reduction.check(swarm)

    async def test_a_partner_whose_mean_is_not_finite(self, swarm_of):
        """A partial mean that holds an infinity is refused, as its sender's."""
        reduction = two_levels((1, 1), codec="fp16", swaps=True)
        swarm = swarm_of(2)
        reduction.open(swarm, [0])
        reduction.start(swarm, [0])
        wire = swarm.wire(0, 1)
        count = min(reduction.chunk_elements, reduction.parts[0].count)
        body = bytearray(reduction.encode(np.ones(count, np.float32)).tobytes())
        body[-2:] = np.array([np.inf], np.float16).tobytes()
        fields = {
            "codec": reduction.final_codec.wire_id,
            "transfer": 7,
            "part": 0,
            "count": count,
            "sender": 1,
        }
        await send(wire, frame(Kind.CONTRIBUTION, bytes(body), **fields))
        await swarm.events[0].until(lambda: swarm.events[0].refused)
        assert swarm.events[0].refused[0][:2] == (7, 1)

    @pytest.mark.parametrize("swaps", [False, True], ids=["result", "swap"])
    async def test_partial_in_another_codec(self, swarm_of, swaps):
        """A deputy that sends its contribution where a partial mean is due is refused."""
        reduction = two_levels((1, 2), codec="int8", result_codec="fp16", swaps=swaps)
        swarm = swarm_of(3)
        reduction.open(swarm, [0])
        reduction.start(swarm, [0])
        part = next(i for i, part in enumerate(reduction.parts) if part.deputies and part.owner == 0)
        deputy = reduction.parts[part].deputies[0]
        wire = swarm.wire(0, deputy)
        count = min(reduction.chunk_elements, reduction.parts[part].count)
        body = reduction.encode(np.zeros(count, np.float32)).tobytes()
        codec = reduction.contribution_codec.wire_id
        fields = {"codec": codec, "transfer": 7, "part": part, "count": count, "sender": deputy}
        await send(wire, frame(Kind.CONTRIBUTION, body, **fields))
        await swarm.events[0].until(lambda: swarm.events[0].refused)
        assert swarm.events[0].refused[0][:2] == (7, deputy)
