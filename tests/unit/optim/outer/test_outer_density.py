"""Outer steps of which a share is sent: the rest stays in this peer's parameters."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from p2pavg import codecs
from p2pavg.allreduce.encoded import EncodedResult, Layout
from p2pavg.errors import ConfigurationError
from p2pavg.optim.optimizer import CollaborativeOptimizer
from p2pavg.optim.outer.settings import Outer
from p2pavg.plan.part import Part
from p2pavg.rounds.state import snapshot
from p2pavg.rounds.training import Average
from tests.unit.optim.fake_swarm import FakeSwarm, encoded
from tests.unit.optim.outer.test_outer_steps import batch, train, vector

CHUNK = 1 << 16
DENSITY = 1 / 16
CODEC = codecs.sparse_of(DENSITY)


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 40)


def sent(values: np.ndarray) -> np.ndarray:
    """What others get of a contribution."""
    data, out = np.empty(CODEC.encoded_size(len(values)), np.uint8), np.empty_like(values)
    assert CODEC.encode(values, data, 1.0)
    CODEC.decode(data, out)
    return out


class Gathering(FakeSwarm):
    """One real peer of two, beside one that moved as `other` says."""

    def __init__(self) -> None:
        super().__init__(1)
        self.mine: list[np.ndarray] = []
        self.other: np.ndarray | None = None
        self.exact = False

    def average(self) -> None:
        gradient = self.waiting[0].gradient
        assert isinstance(gradient, np.ndarray)
        mine, n = gradient.copy(), len(gradient)
        self.mine.append(mine)
        if self.exact:
            result = encoded(mine, "none")
        else:
            parts = Part(0, 0, n), Part(1, 0, n)
            data = np.empty(2 * CODEC.encoded_size(n), np.uint8)
            other = np.zeros(n, np.float32) if self.other is None else self.other
            for place, values in enumerate((mine, other)):
                size = len(data) // 2
                assert CODEC.encode(values, data[place * size : (place + 1) * size], 1.0)
            result = EncodedResult(Layout(parts, CHUNK, CODEC, (0.75, 0.25)), data)
        member = self.joined[0]
        member.outcomes.append(Average(self.rounds, 16, 2, False, result, b"", rank=0))
        member.counted -= self.waiting[0].samples
        self.waiting.clear()
        self.rounds += 1
        self.condition.notify_all()


@pytest.fixture
def swarm(monkeypatch: pytest.MonkeyPatch) -> Gathering:
    fake = Gathering()
    monkeypatch.setattr("p2pavg.optim.optimizer.Peer", fake.peer)
    return fake


def wrap(model: nn.Module, folder: Path | None = None, **options: Any) -> CollaborativeOptimizer:
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return CollaborativeOptimizer(
        inner,
        run_id="density",
        target_batch_size=16,
        batch_size_per_step=4,
        outer=Outer(density=DENSITY, **options),
        checkpoint_dir=folder,
    )


def flat(views: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([view.flatten() for view in views])


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("overlap", [0, 2])
def test_what_is_not_sent_stays_on_top(swarm: Gathering, overlap: int, fragments: int) -> None:
    """θ_ref moves by what both sent; this peer goes on from there with the rest of its own move, which is in
    the next contribution by itself.
    """
    model = net()
    opt = wrap(model, overlap=overlap, fragments=fragments)
    for epoch in range(3 * fragments):
        reference = opt._reference
        due = reference.fragments.due(epoch)
        before = reference.theta[due.start : due.stop].copy()
        while len(swarm.mine) == epoch:
            train(model, opt, range(1))
        mine = swarm.mine[epoch]
        swarm.other = np.roll(mine, 7)
        if opt._update._job is not None:
            opt._update.settle()
        size = due.stop - due.start
        step = 0.75 * sent(mine)
        if epoch:
            step = step + 0.25 * sent(np.roll(swarm.mine[epoch - 1], 7))
        after = reference.theta[due.start : due.stop]
        np.testing.assert_allclose(after, before - reference._settings.lr * step[:size], atol=1e-6)
        local = flat([model_param.detach() for model_param in (reference.params[i] for i in due.params)])
        kept = flat(reference.views(after - (mine - sent(mine))[:size], due))
        if overlap == 0:
            torch.testing.assert_close(local, kept, atol=1e-6, rtol=0)
    opt.close()


def test_alone_all_of_it_is_taken(swarm: Gathering) -> None:
    """A peer alone with a density trains as without outer steps: its own moves are taken as they are."""
    swarm.exact = True
    model, plain = net(), net()
    opt, inner = wrap(model), torch.optim.AdamW(plain.parameters(), lr=1e-2)
    train(model, opt, range(12))
    for number in range(12):
        inner.zero_grad()
        plain(batch(number)).square().mean().backward()
        inner.step()
    assert opt.epoch == 3
    torch.testing.assert_close(vector(model), vector(plain), atol=1e-6, rtol=0)
    opt.close()


def test_what_is_not_sent_cannot_be_mixed_away() -> None:
    """keep_local would take a share of it at every round."""
    with pytest.raises(ConfigurationError, match="keep_local"):
        Outer(density=DENSITY, overlap=2, keep_local=0.5)


@pytest.mark.parametrize("shown", [False, True])
def test_a_state_dict_holds_what_was_not_sent(swarm: Gathering, shown: bool) -> None:
    """A peer that loads it goes on where the other stood, with the rest of its moves, though the state was
    saved while the model showed θ_ref.
    """
    model, other = net(), net()
    opt = wrap(model)
    train(model, opt, range(8))
    rest = opt._reference.theta.copy()
    own = vector(model)
    with opt.averaged() if shown else nullcontext():
        saved = {key: value.clone() for key, value in model.state_dict().items()}
        state = opt.state_dict()
    opt.close(0)
    again = wrap(other)
    other.load_state_dict(saved)
    again.load_state_dict(state)
    assert again.epoch == 2
    assert np.array_equal(again._reference.theta, rest)
    torch.testing.assert_close(vector(other), own, atol=1e-6, rtol=0)
    assert not torch.equal(own, flat(again._reference.views(rest)))
    again.discard()
    assert torch.equal(vector(other), flat(again._reference.views(rest)))
    again.close(0)


def test_a_file_holds_what_was_not_sent(swarm: Gathering, tmp_path: Path) -> None:
    """A peer that begins with a file of checkpoint_dir goes on with the rest of its writer's moves; what
    peers give each other holds nothing of it.
    """
    model, other = net(), net()
    opt = wrap(model, tmp_path)
    train(model, opt, range(8))
    own = vector(model)
    live = SimpleNamespace(standing=(2, bytes(32)), reading=lambda: nullcontext(lambda: True))
    assert opt._saving is not None
    opt._saving.checkpoints.save(*snapshot.take(opt._saving.source, live, snapshot.Work()), [])
    between = snapshot.take(opt._state, live, snapshot.Work())[1]
    again = wrap(other, tmp_path)
    assert again.epoch == 2
    assert np.array_equal(again._reference.theta, opt._reference.theta)
    torch.testing.assert_close(vector(other), own, atol=1e-6, rtol=0)
    assert not torch.equal(own, flat(opt._reference.views(opt._reference.theta)))
    assert len(between) < snapshot.take(opt._filed, live, snapshot.Work())[1].nbytes
    for each in (opt, again):
        each.close(0)
