"""Fragments: tensors in bins, each with outer steps of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from p2pavg.errors import ConfigurationError
from p2pavg.optim.outer.fragments import bins, fragments_of
from p2pavg.optim.outer.reference import outer_step
from p2pavg.optim.outer.settings import Outer
from p2pavg.rounds.training import Inheritance
from tests.unit.optim.fake_swarm import FakeSwarm, encoded
from tests.unit.optim.outer.test_outer_steps import batch, net, train, wrap


@pytest.fixture
def swarm(monkeypatch: pytest.MonkeyPatch) -> FakeSwarm:
    fake = FakeSwarm(1)
    monkeypatch.setattr("p2pavg.optim.optimizer.Peer", fake.peer)
    return fake


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=60), st.integers(1, 8))
def test_every_tensor_is_whole_in_one_bin(sizes: list[int], count: int) -> None:
    """No bin is emptier than the fullest one by more than its smallest tensor, so their sizes are about
    equal; parts of θ_ref do not overlap, and the round's vector holds the largest fragment.
    """
    count = min(count, len(sizes))
    chosen = bins(sizes, count)
    assert sorted(index for one in chosen for index in one) == list(range(len(sizes)))
    filled = [sum(-(-sizes[index] // 32) * 32 for index in one) for one in chosen]
    for one, total in zip(chosen, filled, strict=True):
        if one:
            least = min(-(-sizes[index] // 32) * 32 for index in one)
            assert total - least <= min(filled)
    fragments = fragments_of(sizes, count, 7)
    taken = np.zeros(fragments.total, int)
    for offset, size in zip(fragments.offsets, sizes, strict=True):
        taken[offset : offset + size] += 1
    assert (taken <= 1).all()
    assert [fragment.stop - fragment.start for fragment in fragments.each] == filled
    assert fragments.extra >= max(filled) + 4096
    assert [fragments.due(epoch) for epoch in range(count)] == list(fragments.each)


def test_more_fragments_than_tensors_are_refused(swarm: FakeSwarm) -> None:
    """Tensors stay whole: the sentence says how many there are."""
    with pytest.raises(ConfigurationError, match="more than the 4 tensors"):
        wrap(net(), outer=Outer(fragments=5))


@pytest.mark.parametrize("overlap", [0, 1])
def test_one_peer_in_two_fragments_is_a_loop_written_down(swarm: FakeSwarm, overlap: int) -> None:
    """Every two local steps the next fragment takes its outer step, and the other one's parameters go on
    from where they are.
    """
    settings = Outer(0.6, 0.5, fragments=2, overlap=overlap)
    model = net()
    opt = wrap(model, outer=settings, target_batch_size=16)  # two steps of 4 for each of two fragments
    expected = net()
    inner = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    params = list(expected.parameters())
    theta = [param.detach().clone().numpy().reshape(-1) for param in params]
    velocity = [np.zeros_like(value) for value in theta]
    handed: list[np.ndarray] | None = None
    turn = 0
    chosen = bins([param.numel() for param in params], 2)

    def merge() -> None:
        nonlocal turn, handed
        assert handed is not None
        for index, delta in zip(chosen[turn % 2], handed, strict=True):
            local = params[index].detach().numpy().reshape(-1)
            since = (theta[index] - local) - delta
            outer_step(theta[index], velocity[index], delta, settings)
            local[:] = theta[index] - since
        turn, handed = turn + 1, None

    for number in range(8):
        train(model, opt, range(number, number + 1))
        job = opt._update._job  # type: ignore[attr-defined]
        if job is not None:
            job.result(30)
        inner.zero_grad()
        expected(batch(number)).square().mean().backward()
        inner.step()
        if handed is not None:
            merge()
        elif number % 2:
            handed = [theta[i] - params[i].detach().numpy().reshape(-1) for i in chosen[turn % 2]]
            if not overlap:
                merge()
    assert turn == opt.epoch >= 3
    for mine, wanted in zip(model.parameters(), params, strict=True):
        assert torch.allclose(mine, wanted, atol=1e-6)
    opt.close(0)


def test_a_run_in_fragments_goes_on_from_its_state_dict(swarm: FakeSwarm) -> None:
    """θ_ref and velocity come back; a run with another number of fragments does not take them."""
    one, two = net(), net()
    opt = wrap(one, outer=Outer(fragments=2))
    train(one, opt, range(6))
    state = opt.state_dict()
    opt.close()
    other = wrap(two, outer=Outer(fragments=2))
    other.load_state_dict(state)
    assert other.epoch == opt.epoch
    for mine, wanted in zip(two.parameters(), one.parameters(), strict=True):
        assert torch.equal(mine, wanted)
    other.close(0)
    third = wrap(nn.Sequential(*net()), outer=Outer())
    with pytest.raises(Exception, match="velocity"):
        third.load_state_dict(state)
    third.close(0)


def test_an_inherited_move_counts_in_its_own_fragment_alone(swarm: FakeSwarm) -> None:
    """Once the turn of the departing peer's fragment is over, its samples count as if they had moved
    nothing.
    """
    model = net()
    opt = wrap(model, outer=Outer(fragments=2), target_batch_size=64)
    train(model, opt, range(1))
    fragments, update, training = opt._flat.layout, opt._update, swarm.joined[0]
    training.inherited = lambda samples: setattr(training, "counted", training.counted + samples)  # type: ignore
    given = np.zeros(fragments.numel, np.float32)
    given[: fragments.each[0].stop] = 0.25
    update._take(Inheritance(12, encoded(given, "none")))  # type: ignore[attr-defined]
    own = np.zeros(fragments.numel, np.float32)
    opt._reference.displacement(own, fragments.each[0])
    counted = update._contribution(update._keep())  # type: ignore[attr-defined]
    assert np.allclose(counted.gradient, (4 * own + 12 * given) / 16, atol=1e-7)
    training.epoch = 1  # the other fragment's turn
    own[:] = 0
    opt._reference.displacement(own, fragments.each[1])
    late = update._contribution(update._keep())  # type: ignore[attr-defined]
    assert late.samples == 16
    assert np.allclose(late.gradient, 4 * own / 16, atol=1e-7)
    opt.close(0)
