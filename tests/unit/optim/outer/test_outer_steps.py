"""Outer steps: local steps between rounds over how far each peer moved."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from p2pavg.errors import ConfigurationError
from p2pavg.optim.optimizer import CollaborativeOptimizer
from p2pavg.optim.outer.ahead import prepared
from p2pavg.optim.outer.reference import outer_step
from p2pavg.optim.outer.settings import Outer
from p2pavg.rounds.training import Average, Heal, Inheritance, State, copied
from tests.unit.optim.fake_swarm import FakePeer, FakeSwarm, encoded


@pytest.fixture
def swarm(monkeypatch: pytest.MonkeyPatch) -> FakeSwarm:
    fake = FakeSwarm(1)
    monkeypatch.setattr("p2pavg.optim.optimizer.Peer", fake.peer)
    return fake


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(number: int, size: int = 4) -> torch.Tensor:
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(number))


def wrap(model: nn.Module, **options: Any) -> CollaborativeOptimizer:
    defaults = {"target_batch_size": 16, "batch_size_per_step": 4, "compression": "none", "outer": Outer()}
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return CollaborativeOptimizer(inner, **({"run_id": "outer"} | defaults | options))


def train(model: nn.Module, opt: CollaborativeOptimizer, numbers: range) -> None:
    for number in numbers:
        model(batch(number)).square().mean().backward()
        opt.step()
        opt.zero_grad()


def vector(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def alone(rounds: list[list[list[int]]], settings: Outer) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The algorithm in one process: for each round, for each peer, the batches of its local steps."""
    peers = len(rounds[0])
    models = [net() for _ in range(peers)]
    inners = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    theta = vector(models[0]).numpy().copy()
    velocity = np.zeros_like(theta)
    for each in rounds:
        deltas = []
        for model, inner, numbers in zip(models, inners, each, strict=True):
            nn.utils.vector_to_parameters(torch.from_numpy(theta.copy()), model.parameters())
            for number in numbers:
                inner.zero_grad()
                model(batch(number)).square().mean().backward()
                inner.step()
            deltas.append((len(numbers), theta - vector(model).numpy()))
        total = sum(count for count, _ in deltas)
        mean = np.zeros_like(theta)
        for count, delta in deltas:
            mean += np.float32(count / total) * delta
        outer_step(theta, velocity, mean, settings)
    return torch.from_numpy(theta), [vector(model) for model in models]


@pytest.mark.parametrize("settings", [Outer(), Outer(0.5, 0.0), Outer(0.4, 0.6, nesterov=False)])
def test_one_peer_is_the_algorithm_itself(swarm: FakeSwarm, settings: Outer) -> None:
    """Four local AdamW steps and an outer step, three times, end where a loop written down ends."""
    model = net()
    opt = wrap(model, outer=settings)
    train(model, opt, range(12))
    assert opt.epoch == 3
    expected, _ = alone([[list(range(4 * r, 4 * r + 4))] for r in range(3)], settings)
    assert torch.allclose(vector(model), expected, atol=1e-6)
    assert swarm.joined[0].extra["cosine"] == pytest.approx(1.0, abs=1e-6)
    opt.close()


def test_two_uneven_peers_are_one_process_that_weighs_by_samples(swarm: FakeSwarm) -> None:
    """A peer of three local steps and one of one: θ_ref is that of one process, equal to the bit on both."""
    swarm.members = 2
    models = [net(), net()]
    opts = [wrap(model) for model in models]
    numbers = [[list(range(3)), [50]], [list(range(3, 6)), [51]]]

    def work(rank: int) -> None:
        for epoch, each in enumerate(numbers):
            train(models[rank], opts[rank], range(each[rank][0], each[rank][-1] + 1))
            while opts[rank].epoch == epoch:
                with swarm.condition:
                    swarm.condition.wait(0.01)  # what the other counts
                opts[rank]._update.count(0)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [opt.epoch for opt in opts] == [2, 2]
    expected, _ = alone(numbers, Outer())
    for model in models:
        assert torch.allclose(vector(model), expected, atol=1e-6)
    assert torch.equal(vector(models[0]), vector(models[1]))
    low = [member.extra["theta_sha256_low"] for member in swarm.joined]
    assert low[0] == low[1] > 0
    for opt in opts:
        opt.close()


def test_a_late_peer_keeps_its_steps(swarm: FakeSwarm) -> None:
    """With weight 0 a peer gets the swarm's step, with all that it moved on top, and hands that in next."""
    swarm.members = 2
    models = [net(), net()]
    opts = [wrap(model, target_batch_size=12) for model in models]
    swarm.late = {1}
    train(models[1], opts[1], range(10, 11))
    moved = vector(net()) - vector(models[1])
    train(models[0], opts[0], range(2))
    opts[1]._update.count(0)
    assert opts[1].epoch == 1
    expected, _ = alone([[[0, 1]]], Outer())
    assert torch.allclose(vector(models[1]), expected - moved, atol=1e-6)
    assert opts[1]._training.samples() == 4
    for opt in opts:
        opt.close()


def test_a_round_that_comes_to_nothing_leaves_everything(swarm: FakeSwarm) -> None:
    """What was moved is handed in again, with what came on top, when the swarm goes on computing."""
    swarm.members = 2
    model, other = net(), net()
    opt, opt2 = wrap(model, target_batch_size=4), wrap(other, target_batch_size=4)
    handed: list[np.ndarray] = []
    real = opt._training.arrive

    def arrive(contribution: Any) -> Any:
        if contribution.gradient is not None:
            handed.append(contribution.gradient.copy())
        from p2pavg.rounds.training import KeepGoing

        return KeepGoing() if len(handed) < 3 else real(contribution)

    opt._training.arrive = arrive  # type: ignore[method-assign]
    opt._update._arrive = arrive  # type: ignore[attr-defined]
    train(model, opt, range(2))
    start = vector(net())
    assert len(handed) == 2
    assert np.abs(handed[1]).sum() > np.abs(handed[0]).sum()
    assert not torch.equal(vector(model), start)
    assert opt.epoch == 0
    opt.close(0)
    opt2.close(0)


def test_a_departing_peer_hands_over_what_it_moved(swarm: FakeSwarm) -> None:
    """A receiver's contribution is the mean of both peers' moves by samples; its own model does not move."""
    model = net()
    opt = wrap(model)
    train(model, opt, range(1))
    before = vector(model)
    numel = opt._flat.layout.numel
    given = np.full(numel, 0.25, np.float32)
    given[opt._flat.layout.total :] = 0
    training = swarm.joined[0]
    training.inherited = lambda samples: setattr(training, "counted", training.counted + samples)  # type: ignore
    opt._update._take(Inheritance(12, encoded(given, "none")))  # type: ignore[attr-defined]
    assert torch.equal(vector(model), before)
    contribution = opt._update._contribution(opt._update._keep())  # type: ignore[attr-defined]
    assert contribution.samples == 16
    own = np.zeros(numel, np.float32)
    opt._reference.displacement(own)
    assert np.allclose(contribution.gradient, (4 * own + 12 * given) / 16, atol=1e-7)
    opt.close(0)


def test_what_a_departing_peer_moved_is_averaged_once(swarm: FakeSwarm) -> None:
    """A receiver that made no step of its own hands it in, too, and never again once it is averaged."""
    model = net()
    opt = wrap(model)
    given = np.zeros(opt._flat.layout.numel, np.float32)
    given[: opt._flat.layout.total] = 0.25
    training = swarm.joined[0]
    training.inherited = lambda samples: setattr(training, "counted", training.counted + samples)  # type: ignore
    update = opt._update
    update._take(Inheritance(16, encoded(given, "none")))  # type: ignore[attr-defined]
    kept = update._keep()  # type: ignore[attr-defined]
    average = Average(0, 16, 1, False, encoded(update._contribution(kept).gradient, "none"), b"")  # type: ignore
    update._take(average)  # type: ignore[attr-defined]
    assert (update._inherited, update._inherited_samples) == (None, 0)  # type: ignore[attr-defined]
    opt.close(0)


def test_healing_goes_on_from_the_swarms_state(swarm: FakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded state brings θ_ref, its velocity and a copy of the inner state; own steps are gone."""
    donor, model = net(), net()
    opt = wrap(donor, run_id="a")
    train(donor, opt, range(8))
    meta, buffers = copied(opt._state.snapshot())
    theta, velocity = opt._reference.theta.copy(), opt._reference.velocity.copy()
    train(donor, opt, range(8, 9))
    elsewhere = FakeSwarm(1)
    monkeypatch.setattr("p2pavg.optim.optimizer.Peer", elsewhere.peer)
    newcomer = wrap(model, run_id="b")
    train(model, newcomer, range(3))
    elsewhere.joined[0].seen.append(Heal(State(2, b"x", meta, buffers)))
    newcomer._update._take(elsewhere.joined[0].seen[-1])  # type: ignore[attr-defined]
    assert np.array_equal(newcomer._reference.theta, theta)
    assert np.array_equal(newcomer._reference.velocity, velocity)
    assert not torch.equal(vector(donor), vector(model))
    with opt.averaged():
        assert torch.equal(vector(donor), vector(model))
    step = next(iter(newcomer.inner.state.values()))["step"]
    assert float(step) == 8
    for each in (opt, newcomer):
        each.close(0)


@pytest.mark.parametrize("offload", [False, True])
def test_non_finite_moves_never_leave_a_peer(swarm: FakeSwarm, offload: bool) -> None:
    """A peer whose parameters became NaN drops its samples, by name, and goes on from the swarm's."""
    model = net()
    opt = wrap(model, offload_optimizer=offload)
    train(model, opt, range(3))
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    train(model, opt, range(3, 4))
    assert swarm.discarded == [(16, "the parameters of this peer became non-finite")]
    assert torch.equal(vector(model), vector(net()))
    train(model, opt, range(4, 8))
    assert opt.epoch == 1
    assert bool(torch.isfinite(vector(model)).all())
    opt.close(0)


@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_what_is_moved_behind_a_round_stays_on_top(swarm: FakeSwarm, keep: float) -> None:
    """With overlap, θ_local is the new θ_ref plus the kept share of the steps since the contribution left."""
    model = net()
    opt = wrap(model, outer=Outer(overlap=2, keep_local=keep))
    train(model, opt, range(4))  # handed in; the round runs behind
    left = vector(model)
    arrived = opt._update._job  # type: ignore[attr-defined]
    assert arrived is not None
    arrived.result(30)
    model(batch(4)).square().mean().backward()
    opt._flat.tick()
    since = vector(model) - left
    opt._update.count(4)
    expected, _ = alone([[[0, 1, 2, 3]]], Outer())
    assert opt.epoch == 1
    assert torch.allclose(vector(model), expected + keep * since, atol=1e-6)
    assert opt._training.samples() == 4
    opt.close(0)


def test_local_steps_go_on_while_an_outer_step_is_prepared(
    swarm: FakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With overlap the result is decoded, and the outer step taken and hashed, on another thread."""
    stepped: list[str] = []

    def noted(*args: Any) -> None:
        stepped.append(threading.current_thread().name)
        outer_step(*args)

    monkeypatch.setattr("p2pavg.optim.outer.reference.outer_step", noted)
    model = net()
    opt = wrap(model, outer=Outer(overlap=2))
    train(model, opt, range(12))
    assert opt.epoch >= 2
    assert all(name.startswith("p2pavg-outer") for name in stepped), stepped
    opt.close(0)


def test_an_average_is_taken_after_an_interrupt_of_the_wait_for_it(
    swarm: FakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a round behind local steps is waited for: the next call takes what came."""
    waited: list[object] = []

    def interrupted(jobs: list[Any]) -> None:
        waited.append(jobs)
        if len(waited) == 1:
            raise KeyboardInterrupt
        wait(jobs)

    monkeypatch.setattr("p2pavg.optim.outer.update.wait", interrupted)
    model = net()
    opt = wrap(model, outer=Outer(overlap=2))
    train(model, opt, range(4))
    with pytest.raises(KeyboardInterrupt):
        opt._update.settle()
    assert opt.epoch == 0
    opt._update.settle()
    assert opt.epoch == 1
    opt.close(0)


def test_an_average_that_could_not_be_prepared_is_taken_all_the_same(
    swarm: FakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What raises beside local steps is tried again on the training thread: no average is lost."""
    failures = [MemoryError("no room for the average")]

    def failing(*args: Any) -> Any:
        if failures and threading.current_thread() is not threading.main_thread():
            raise failures.pop()
        return prepared(*args)

    monkeypatch.setattr("p2pavg.optim.outer.update.prepared", failing)
    model = net()
    opt = wrap(model, outer=Outer(overlap=2, keep_local=0.0))
    train(model, opt, range(4))
    opt._update.settle()
    assert not failures
    assert opt.epoch == 1
    expected, _ = alone([[[0, 1, 2, 3]]], Outer())
    assert torch.allclose(vector(model), expected, atol=1e-6)
    opt.close(0)


def test_local_steps_may_take_several_microbatches(swarm: FakeSwarm) -> None:
    """accumulate=2 steps on the mean of two gradients, and zero_grad() between them loses nothing."""
    one, two = net(), net()
    opt = wrap(two, outer=Outer(accumulate=2), max_grad_norm=0.1)
    inner = torch.optim.AdamW(one.parameters(), lr=1e-2)
    (sum(one(batch(i)).square().mean() for i in (0, 1)) / 2).backward()
    nn.utils.clip_grad_norm_(one.parameters(), 0.1)
    inner.step()
    train(two, opt, range(2))
    assert torch.allclose(vector(one), vector(two), atol=1e-6)
    assert all(param.grad is None for param in two.parameters())
    opt.close(0)


@pytest.mark.parametrize(("schedule", "steps"), [("inner", 8), ("outer", 2)])
def test_a_scheduler_counts_what_it_is_told_to_count(swarm: FakeSwarm, schedule: str, steps: int) -> None:
    """Eight local steps and two outer ones step the scheduler eight times, or twice."""
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = LambdaLR(inner, lambda count: 0.5**count)
    opt = CollaborativeOptimizer(
        inner, "s", 16, 4, compression="none", scheduler=scheduler, outer=Outer(schedule=schedule)
    )
    train(model, opt, range(8))
    assert scheduler.last_epoch == steps
    opt.close(0)


def test_a_run_goes_on_from_its_state_dict(swarm: FakeSwarm) -> None:
    """state_dict() holds θ_ref and velocity: a run built anew takes the same next outer step."""
    model = net()
    opt = wrap(model)
    train(model, opt, range(6))
    with opt.averaged():
        saved = {key: value.clone() for key, value in model.state_dict().items()}
    state = opt.state_dict()
    other = net()
    again = wrap(other, run_id="again")
    other.load_state_dict(saved)
    again.load_state_dict(state)
    assert again.epoch == 1
    assert np.array_equal(again._reference.theta, opt._reference.theta)
    assert np.array_equal(again._reference.velocity, opt._reference.velocity)
    with opt.averaged():
        assert torch.equal(vector(other), vector(model))
    for each in (opt, again):
        each.close(0)


def test_discard_drops_what_was_moved(swarm: FakeSwarm) -> None:
    """discard() puts the swarm's parameters back and names the samples."""
    model = net()
    opt = wrap(model)
    train(model, opt, range(2))
    opt.discard()
    assert torch.equal(vector(model), vector(net()))
    assert swarm.discarded == [(8, "discard() was called")]
    opt.close(0)


def test_discard_drops_what_was_inherited_too(swarm: FakeSwarm) -> None:
    """After discard() a contribution holds this peer's own later moves and samples, and no departing
    peer's.
    """
    model = net()
    opt = wrap(model)
    given = np.full(opt._flat.layout.numel, 0.25, np.float32)
    training = swarm.joined[0]
    training.inherited = lambda samples: setattr(training, "counted", training.counted + samples)  # type: ignore
    opt._update._take(Inheritance(8, encoded(given, "none")))  # type: ignore[attr-defined]
    opt.discard()
    train(model, opt, range(1))
    contribution = opt._update._contribution(opt._update._keep())  # type: ignore[attr-defined]
    own = np.zeros_like(given)
    opt._reference.displacement(own)
    assert contribution.samples == 4
    assert np.array_equal(contribution.gradient, own)
    opt.close(0)


def test_closing_leaves_the_swarms_parameters(swarm: FakeSwarm) -> None:
    """After close() the model holds θ_ref, as on every other peer."""
    model = net()
    opt = wrap(model)
    train(model, opt, range(5))
    theta = [view.clone() for view in opt._reference.views(opt._reference.theta)]
    opt.close()
    assert all(torch.equal(a, b) for a, b in zip(theta, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"delay_updates": True}, "Outer\\(overlap=\\)"),
        ({"resync_epochs": 3}, "resync_epochs"),
        ({"grad_dtype": torch.float32}, "grad_dtype"),
        ({"outer": "adam"}, "diloco"),
        ({"outer": "sparse", "compression": "int8"}, "is a codec of its own; leave compression='int8' out"),
        ({"outer": "sparse", "compression": "fp16", "plan": "two-level"}, "has a plan of its own"),
        ({"outer": Outer(fragments=5)}, "more than the 4 tensors"),
        ({"outer": Outer(sync_every=3)}, "leave target_batch_size=16 out"),
        (
            {"outer": Outer(sync_every=3), "target_batch_size": None, "batch_size_per_step": None},
            "needs batch_size",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(swarm: FakeSwarm, options: dict[str, Any], said: str) -> None:
    """Each impossible combination is one sentence with the way out."""
    with pytest.raises(ConfigurationError, match=said):
        wrap(net(), **options)


def test_a_density_goes_without_momentum() -> None:
    """Outer(density=) has outer steps of its own; momentum beside it, and a share of no codec, are
    refused.
    """
    assert (Outer(density=1 / 64).lr, Outer(density=1 / 64).momentum) == (1.5, 0.0)
    assert (Outer().lr, Outer().momentum) == (0.7, 0.9)
    assert "density=1/64" in Outer(density=1 / 64).terms()
    with pytest.raises(ConfigurationError, match="takes no momentum"):
        Outer(density=1 / 64, momentum=0.9)
    with pytest.raises(ConfigurationError, match="A density is one of"):
        Outer(density=0.5)


def test_a_density_averages_no_buffers(swarm: FakeSwarm) -> None:
    """A model whose BatchNorm statistics would have to be averaged is refused, with what to use instead."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    with pytest.raises(ConfigurationError, match="LayerNorm"):
        wrap(model, outer="sparse", compression="fp16")


def test_local_steps_between_averages_can_be_said(swarm: FakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sync_every the samples of an epoch are those of the peers that are linked, at every epoch."""
    linked, aimed = [0, 0, 2], []

    class Peer(FakePeer):
        def wait_for_peers(self, count: int) -> int:
            return linked[len(aimed)]

        def set_target(self, samples: int) -> None:
            aimed.append(samples)

    monkeypatch.setattr("p2pavg.optim.optimizer.Peer", lambda *args, **options: Peer(swarm))
    model = net()
    opt = wrap(model, outer=Outer(sync_every=3), target_batch_size=None)
    assert swarm.joined[0].spec.target_batch_size == 12
    assert swarm.joined[0].spec.terms["target_batch_size"] == "3 steps of 4 a peer"
    train(model, opt, range(6))
    assert opt.epoch == 2
    assert aimed == [12, 12, 36]
    opt.close(0)


def test_a_scaler_and_several_microbatches_a_step_are_refused(swarm: FakeSwarm) -> None:
    """Unscaled at every microbatch, the gradients of earlier ones would be divided by the scale again."""
    model = net()
    opt = wrap(model, outer=Outer(accumulate=2))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(0)).square().mean()).backward()
    with pytest.raises(ConfigurationError, match="a GradScaler and Outer"):
        scaler.step(opt)
    opt.close(0)


def test_equal_numbers_are_equal_terms() -> None:
    """A peer that says momentum=0 goes with one that says 0.0."""
    assert Outer(lr=1, momentum=0).terms() == Outer(lr=1.0, momentum=0.0).terms()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_parameters_that_cannot_be_averaged_are_refused(swarm: FakeSwarm) -> None:
    """A complex one would lose its imaginary part, and one that is listed twice would move twice."""
    model = net()
    model.register_parameter("turns", nn.Parameter(torch.ones(3, dtype=torch.complex64)))
    with pytest.raises(ConfigurationError, match="complex64 cannot be averaged"):
        wrap(model)
    weight = nn.Parameter(torch.ones(3))
    inner = torch.optim.SGD([weight, weight], lr=0.1)
    with pytest.raises(ConfigurationError, match="occurs twice"):
        CollaborativeOptimizer(inner, "outer", 16, 4, outer=Outer())


@pytest.mark.parametrize("raising", ["the optimizer", "the scheduler"])
def test_no_gradient_steps_twice(swarm: FakeSwarm, raising: str) -> None:
    """What the inner optimizer or the scheduler raises comes out of step() once, and the gradient goes with
    it, though the loop does not clear it.
    """
    model, failures = net(), [RuntimeError("once")]

    def fail(*_: object) -> float:
        if failures and failing:
            raise failures.pop()
        return 1.0

    failing = False
    opt = wrap(model)
    opt._flat._scheduler = LambdaLR(opt.inner, fail)
    failing = True
    if raising == "the optimizer":
        opt._flat._scheduler = None
        opt.inner.register_step_pre_hook(fail)  # type: ignore[arg-type]
    model(batch(0)).square().mean().backward()
    with pytest.raises(RuntimeError, match="once"):
        opt.step()
    assert all(param.grad is None for param in model.parameters())
    opt.close(0)
