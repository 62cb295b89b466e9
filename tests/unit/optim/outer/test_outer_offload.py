"""Outer steps whose local steps are taken in host memory: what the model gets is what it gets without."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from p2pavg.errors import ConfigurationError
from p2pavg.optim import preflight
from p2pavg.optim.optimizer import CollaborativeOptimizer
from p2pavg.optim.outer.settings import Outer
from p2pavg.rounds.training import Heal, State, copied
from tests.unit.optim.fake_swarm import FakeSwarm
from tests.unit.optim.outer.test_outer_steps import batch, net, swarm, train, vector

__all__ = ["swarm"]  # the fixture


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each peer has a swarm of its own, and another one when it enters again."""
    monkeypatch.setattr("p2pavg.optim.optimizer.Peer", lambda *args, **options: FakeSwarm(1).peer())


def wrap(model: nn.Module, *, offload: bool = True, **options: Any) -> CollaborativeOptimizer:
    """Four local steps of AdamW an outer step; the fused kernel steps on the CPU with offload and without."""
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    defaults = {"run_id": f"offload {offload}", "compression": "none", "outer": Outer()}
    return CollaborativeOptimizer(inner, **({"offload_optimizer": offload} | defaults | sizes() | options))


def sizes() -> dict[str, Any]:
    return {"target_batch_size": 16, "batch_size_per_step": 4}


@pytest.mark.parametrize(
    "outer",
    [
        Outer(),
        Outer(0.5, 0.0, accumulate=2),
        Outer(fragments=2, overlap=1),
        Outer(overlap=2, keep_local=0.5),
        Outer(density=1 / 64),
    ],
)
def test_offload_moves_the_model_as_no_offload_does(monkeypatch: pytest.MonkeyPatch, outer: Outer) -> None:
    """Parameters after every step(), θ_ref and what is left behind are equal to the bit, clipping too."""
    models, opts = [net(), net()], []
    for model, offload in zip(models, (False, True), strict=True):
        elsewhere = FakeSwarm(1)
        monkeypatch.setattr("p2pavg.optim.optimizer.Peer", elsewhere.peer)
        options = {} if outer.density is None else {"compression": "fp16"}
        opts.append(wrap(model, offload=offload, outer=outer, max_grad_norm=0.5, **options))
    for number in range(12):
        for model, opt in zip(models, opts, strict=True):
            train(model, opt, range(number, number + 1))
            if outer.overlap:
                opt._update.settle()  # the round ends in the same step() of both
        assert torch.equal(vector(models[0]), vector(models[1])), number
    assert opts[0].epoch == opts[1].epoch >= 3
    assert np.array_equal(opts[0]._reference.theta, opts[1]._reference.theta)
    inner = opts[1].inner
    assert all(value.device.type == "cpu" for state in inner.state.values() for value in state.values())
    for opt in opts:
        opt.close()
    assert torch.equal(vector(models[0]), vector(models[1]))
    assert all(a is b for a, b in zip(inner.param_groups[0]["params"], models[1].parameters(), strict=True))


def test_half_parameters_keep_moves_below_their_precision(swarm: FakeSwarm) -> None:
    """A bfloat16 model's masters are float32: Δ holds steps that its parameters round away."""
    model = nn.Linear(4, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    inner = torch.optim.SGD(model.parameters(), lr=1e-4)
    opt = CollaborativeOptimizer(
        inner, "half", 16, 4, compression="none", outer=Outer(1.0, 0.0), offload_optimizer=True
    )
    for _ in range(4):
        model(torch.ones(4, 4, dtype=torch.bfloat16)).mean().backward()
        opt.step()
    assert opt.epoch == 1
    assert np.allclose(opt._reference.theta[:4], 1 - 4e-4, atol=1e-7)
    assert torch.equal(model.weight, torch.ones(1, 4, dtype=torch.bfloat16))
    opt.close()


def test_what_is_written_into_the_model_is_moved(swarm: FakeSwarm) -> None:
    """Values that the training loop writes into parameters count as moves, as they do without offload."""
    model = net()
    opt = wrap(model)
    train(model, opt, range(1))
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    before = vector(model)
    with opt.averaged():
        assert torch.equal(vector(model), vector(net()))
    assert torch.equal(vector(model), before)
    model(batch(1)).square().mean().backward()
    opt.step()
    assert bool((model[0].weight - 0.5).abs().max() <= 0.011)
    opt.close(0)


@pytest.mark.parametrize("offloaded", [(True, True), (True, False), (False, True)])
def test_a_run_goes_on_with_offload_or_without(apart: None, offloaded: tuple[bool, bool]) -> None:
    """A state_dict of either is loaded by either: the same θ_ref, and the same next outer step."""
    model, other = net(), net()
    opt = wrap(model, offload=offloaded[0])
    train(model, opt, range(8))
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    again = wrap(other, offload=offloaded[1], run_id="again")
    other.load_state_dict(saved)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))  # torch goes on with the very tensors
    assert again.epoch == 2
    for trained, by in ((model, opt), (other, again)):
        train(trained, by, range(8, 12))
    assert opt.epoch == again.epoch == 3
    assert torch.equal(vector(model), vector(other))
    for each in (opt, again):
        each.close(0)


def test_a_newcomer_with_offload_takes_the_swarms_state(
    swarm: FakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a donor without offload gives lands in the masters, in the model and in the inner state."""
    donor, model = net(), net()
    opt = wrap(donor, offload=False)
    train(donor, opt, range(8))
    meta, buffers = copied(opt._state.snapshot())
    elsewhere = FakeSwarm(1)
    monkeypatch.setattr("p2pavg.optim.optimizer.Peer", elsewhere.peer)
    newcomer = wrap(model)
    train(model, newcomer, range(3))
    elsewhere.joined[0].seen.append(Heal(State(2, b"x", meta, buffers)))
    newcomer._update._take(elsewhere.joined[0].seen[-1])  # type: ignore[attr-defined]
    assert torch.equal(vector(model), vector(donor))
    assert all(float(state["step"]) == 8 for state in newcomer.inner.state.values())
    for trained, by in ((donor, opt), (model, newcomer)):
        train(trained, by, range(8, 11))
    assert torch.equal(vector(model), vector(donor))
    for each in (opt, newcomer):
        each.close(0)


def test_checkpoints_of_a_folder_are_gone_on_from(apart: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The masters begin at the newest checkpoint's θ_ref, and the model shows them."""
    model, other = net(), net()
    opt = wrap(model)
    train(model, opt, range(8))
    meta, buffers = copied(opt._state.snapshot())

    def load(again: CollaborativeOptimizer) -> None:
        again._state.load(meta, buffers)
        again._buffers.restore()
        again._flat.clear()

    monkeypatch.setattr(CollaborativeOptimizer, "_load_checkpoint", load)
    again = wrap(other, run_id="again")
    assert torch.equal(vector(model), vector(other))
    assert np.array_equal(opt._reference.theta, again._reference.theta)
    for trained, by in ((model, opt), (other, again)):
        train(trained, by, range(8, 11))
    assert torch.equal(vector(model), vector(other))
    for each in (opt, again):
        each.close(0)


def test_replaced_parameters_are_followed(swarm: FakeSwarm) -> None:
    """After load_state_dict(assign=True) local steps are on the new tensors."""
    model = net()
    opt = wrap(model)
    train(model, opt, range(1))
    values = {key: value.clone() for key, value in net().state_dict().items()}
    model.load_state_dict(values, assign=True)
    train(model, opt, range(1, 2))
    assert not torch.equal(vector(model), vector(net()))
    assert all(a is b for a, b in zip(opt._flat.params, model.parameters(), strict=True))
    opt.close(0)


def test_what_does_not_fit_is_told_before_anything_is_built(
    swarm: FakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forecast counts the vectors of outer steps."""
    monkeypatch.setattr(preflight, "host_available", lambda: 10)
    with pytest.raises(ConfigurationError, match=r"outer steps 0\.00"):
        wrap(net())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outer", [Outer(), Outer(fragments=2, overlap=1)])
def test_offload_of_a_model_on_a_device(swarm: FakeSwarm, outer: Outer, dtype: torch.dtype) -> None:
    """Gradients come to the host and parameters go back: the model moves as it does without offload, and
    the optimizer takes no memory there.
    """
    models = [net().cuda().to(dtype), net().cuda().to(dtype)]
    found = []
    for model, offload in zip(models, (False, True), strict=True):
        swarm.joined.clear()
        opt = wrap(model, offload=offload, outer=outer, run_id=f"device {offload}", max_grad_norm=0.5)
        for number in range(12):
            model(batch(number).cuda().to(dtype)).float().square().mean().backward()
            opt.step()
            opt.zero_grad()
        opt._update.settle()
        assert opt.epoch >= 3
        found.append({value.device.type for state in opt.inner.state.values() for value in state.values()})
        opt.close()
    assert found[1] == {"cpu"}
    assert all(param.is_cuda for param in models[1].parameters())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    apart = (vector(models[0]).float() - vector(models[1]).float()).norm() / vector(models[0]).float().norm()
    assert float(apart) <= tolerance
