"""Coarse codecs, and codecs of somebody else, in training over real links."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from p2pavg import CollaborativeOptimizer, StochasticInt8
from p2pavg.errors import IncompatiblePeerError
from p2pavg.peer.peer import Peer
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.protocol.causes import Cause
from p2pavg.transport import pump_engine
from tests.swarm.test_one_process import together

pytestmark = pytest.mark.swarm

LISTEN = "127.0.0.1:0"
DEADLINE_S = 60.0
EPOCHS = 16
STEP = 1 / 127  # of int8, where the largest value of a block is 1


def constant(largest: float = 1.0, step: float = STEP) -> torch.Tensor:
    """A gradient of which rounding to nearest would send nothing but the largest value of each block."""
    values = torch.linspace(-0.45, 0.45, 3000) * step
    values[::500] = largest
    return values


def float8() -> Any:
    """The class in docs/optimizer.md."""
    page = (Path(__file__).parents[2] / "docs" / "optimizer.md").read_text()
    found = re.search(r"<!-- test: codec -->\n```python\n(.*?)```", page, re.DOTALL)
    assert found
    names: dict[str, Any] = {}
    exec(found[1], names)
    return names["Float8"]()


class Swarm:
    """Two peers that train one vector with one constant gradient, on threads of this process."""

    def __init__(self, run_id: str, compression: Any, step: float = STEP, **options: Any) -> None:
        self.gradient = constant(step=step)
        self.weights = [nn.Parameter(torch.zeros(3000)) for _ in range(2)]
        self.opts: list[CollaborativeOptimizer] = []
        for weight in self.weights:
            self.opts.append(
                CollaborativeOptimizer(
                    torch.optim.SGD([weight], lr=1.0),
                    run_id,
                    32,
                    4,
                    initial_peers=[self.opts[0].peer.address] if self.opts else [],
                    compression=compression,
                    listen=LISTEN,
                    **options,
                )
            )
        self.aborts = 0

    def abort(self) -> None:
        """From now on the first attempt of every second epoch is void, once everybody has begun to encode."""
        for opt in self.opts:
            driver = opt.peer._running().driver
            assert driver is not None
            attempts = driver._performer._attempts
            begin, seen = attempts.begin, set()

            def beginning(action, contribution, driver=driver, begin=begin, seen=seen):  # type: ignore[no-untyped-def]
                answer = begin(action, contribution)
                machine = driver.machine
                if machine.core.proposal is not None and machine.epoch % 2 and machine.epoch not in seen:
                    seen.add(machine.epoch)
                    self.aborts += 1
                    machine.leading.abort(Cause.COMPLAINT, (), "made to fail")
                    driver.feed(ev.Tick())
                return answer

            attempts.begin = beginning  # type: ignore[method-assign]

    def train(self, rank: int, epochs: int = EPOCHS) -> None:
        """Until `epochs` are applied; with peers of different speed, weights change."""
        weight, opt, gradient = self.weights[rank], self.opts[rank], self.gradient
        until = time.monotonic() + DEADLINE_S
        while opt.epoch < epochs and time.monotonic() < until:
            (weight * gradient).sum().backward()
            opt.step()
            time.sleep(0.001 * (1 + rank))
        assert opt.epoch == epochs

    def run(self, epochs: int = EPOCHS) -> torch.Tensor:
        """What the vector became, equal to the bit on both."""
        together([lambda rank=rank: self.train(rank, epochs) for rank in range(2)])
        for opt in self.opts:
            opt.close(0.0)
        assert torch.equal(self.weights[0], self.weights[1])
        return self.weights[0].detach()


@pytest.mark.parametrize("engine", ["pump", "python"])
@pytest.mark.parametrize(("codec", "levels"), [("int8", 127), ("int4", 7)])
def test_coarse_codecs_lose_nothing_over_epochs(
    codec: str, levels: int, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients under half a step, which the codec alone would never send, all arrive, though every second
    epoch an attempt is aborted: after 16 epochs the parameters are off by about one step, not by seven.
    """
    if engine == "python":
        monkeypatch.setattr(pump_engine, "available", lambda: False)
    elif not pump_engine.available():
        pytest.skip("needs the native module")
    step = 1 / levels
    swarm = Swarm(f"feedback-{engine}-{codec}", codec, step)
    assert {opt.peer.engine_name for opt in swarm.opts} == {engine}
    swarm.abort()
    found = swarm.run()
    small = constant(0.0, step)
    assert swarm.aborts >= EPOCHS // 3
    assert float(EPOCHS * small.abs().max()) > 7 * step
    assert float((found + EPOCHS * small)[swarm.gradient != 1.0].abs().max()) < (
        1.5 * step
    )  # results of int4 travel as int8


def test_chance_can_be_chosen() -> None:
    """StochasticInt8 trains, beside a peer that rounds to nearest: small gradients arrive on the average."""
    swarm = Swarm("chance", StochasticInt8(3))
    found = swarm.run()
    small = constant() != 1.0
    wanted = -EPOCHS * constant(0.0)
    error = (found - wanted)[small]
    assert float(error.square().mean().sqrt()) < 0.5 * STEP * EPOCHS**0.5
    assert abs(float(error.mean())) < 0.1 * STEP
    assert float((found[small] * constant()[small].sign()).mean()) < -STEP  # to nearest it were 0


def test_a_codec_of_ones_own_trains(caplog: pytest.LogCaptureFixture) -> None:
    """The codec in docs/optimizer.md trains two peers to equal bits and to the right parameters; one line
    says that the Python engine serves it; a peer with another codec is refused, with both names.
    """
    with caplog.at_level(logging.INFO, "p2pavg.peer.peer"):
        swarm = Swarm("own", float8())
        with pytest.raises(
            IncompatiblePeerError, match=r"compression is \S.* at peer \w+ and \S.* at peer"
        ) as refused:
            CollaborativeOptimizer(
                torch.optim.SGD([nn.Parameter(torch.zeros(3000))], lr=1.0),
                "own",
                32,
                4,
                initial_peers=[swarm.opts[0].peer.address],
                compression="fp16",
                listen=LISTEN,
            )
    assert "float8 (wire id 64)" in str(refused.value)
    assert "compression is fp16" in str(refused.value) or "and fp16" in str(refused.value)
    assert {opt.peer.engine_name for opt in swarm.opts} == {"python"}
    if pump_engine.available():
        told = [record for record in caplog.records if "does not know the codec 'float8'" in record.message]
        assert len(told) == 2  # one line for each peer
    found = swarm.run(8)
    assert float((found + 8 * constant()).abs().max()) < 1 / 16  # a step of float8 just under 1


async def test_a_codec_of_ones_own_averages() -> None:
    """Peer takes one too, and keeps nothing: the same tensors average to the same values again."""
    async with (
        Peer("own-mean", listen=LISTEN, compression=float8()) as one,
        Peer("own-mean", listen=LISTEN, compression=float8(), initial_peers=[one.address]) as two,
    ):
        seen = []
        for _ in range(2):
            values = [np.linspace(-1, 1, 5000, dtype=np.float32), np.linspace(-2, 2, 5000, dtype=np.float32)]
            await asyncio.gather(
                *(peer.all_reduce(v, group_size=2) for peer, v in zip((one, two), values, strict=True))
            )
            assert np.array_equal(*values)
            assert np.abs(values[0] - np.linspace(-1.5, 1.5, 5000)).max() < 0.1
            seen.append(values[0])
        assert np.array_equal(*seen)


def test_who_heals_owes_nothing() -> None:
    """A peer that was away while the others went on loads their state, and owes nothing from before."""
    swarm = Swarm("heals", "int8")
    opt, weight = swarm.opts[1], swarm.weights[1]
    driver = opt.peer._running().driver
    assert driver is not None
    (residual,), forget = driver._jobs._residuals, driver._jobs.healed
    owed: list[tuple[bool, bool]] = []

    def forgetting() -> None:
        before = bool(residual._committed.any())
        forget()
        owed.append((before, bool(residual._committed.any())))

    driver._jobs.healed = forgetting  # type: ignore[method-assign]
    away = threading.Event()

    def stays() -> None:
        swarm.train(0, 9)
        away.set()
        swarm.train(0, 14)

    def goes() -> None:
        swarm.train(1, 4)
        assert away.wait(DEADLINE_S)
        while not owed and opt.epoch < 14:
            (weight * constant()).sum().backward()
            opt.step()

    together([stays, goes])
    for one in swarm.opts:
        one.close(0.0)
    assert owed == [(True, False)]
