"""Gradients that the training loop assigns, writes to, or accumulates in several backward passes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from p2pavg.errors import ConfigurationError
from p2pavg.optim.gradients.flat import FlatGradients
from p2pavg.optim.gradients.microbatches import Microbatches
from p2pavg.optim.optimizer import CollaborativeOptimizer
from tests.unit.optim.fake_swarm import FakeSwarm
from tests.unit.optim.test_optimizer import MAKERS, loss_of, net, relative, swarm, train_alone, vector, wrap

__all__ = ["swarm"]  # the fixture

BATCHES = [list(range(4 * number, 4 * number + 4)) for number in range(8)]
EPOCHS = [list(range(16)), list(range(16, 32))]


@pytest.fixture(autouse=True)
def warnings_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


def grads_of(model: nn.Module, ids: list[int]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss_of(model, ids), list(model.parameters())))


def assign(model: nn.Module, ids: list[int]) -> None:
    for param, grad in zip(model.parameters(), grads_of(model, ids), strict=True):
        param.grad = grad


def backward(model: nn.Module, ids: list[int]) -> None:
    loss_of(model, ids).backward()


def by_function(model: nn.Module, ids: list[int]) -> None:
    """torch.func, as per-sample methods use it."""
    params = {name: param.detach() for name, param in model.named_parameters()}

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss_of(lambda x: torch.func.functional_call(model, params, x), ids)  # type: ignore[arg-type]

    grads = torch.func.grad(loss)(params)
    for name, param in model.named_parameters():
        param.grad = grads[name]


@pytest.mark.parametrize("zero", ["opt", "model"])
@pytest.mark.parametrize("options", [{}, {"delay_updates": True}, {"offload_optimizer": True}])
@pytest.mark.parametrize(
    "ways",
    [[assign] * 4, [by_function] * 4, [backward, assign] * 2, [assign, assign, backward, backward]],
    ids=["assigned", "torch.func", "mixed", "assigned first"],
)
def test_assigned_gradients_are_added(
    swarm: FakeSwarm, ways: list[Callable[..., None]], options: dict[str, Any], zero: str
) -> None:
    """p.grad = g after zero_grad() adds to the sums what backward() would, over several epochs."""
    models = [net(), net()]
    for model, how in zip(models, [ways, [backward] * 4], strict=True):
        swarm.joined.clear()
        swarm.rounds = 0
        with wrap(model, **options) as opt:
            for number, ids in enumerate(BATCHES):
                (opt if zero == "opt" else model).zero_grad()
                how[number % 4](model, ids)
                opt.step()
    assert relative(models[0], models[1]) <= (0 if by_function not in ways else 1e-6)


def sums_of(model: nn.Module, dtype: torch.dtype | None = None) -> tuple[FlatGradients, list[torch.Tensor]]:
    flat = FlatGradients(list(model.parameters()), dtype)
    return flat, list(model.parameters())


def test_assigned_half_gradients_are_added_in_float32() -> None:
    """With grad_dtype the assigned bfloat16 gradients add up in float32."""
    model = net().bfloat16()
    flat, params = sums_of(model, torch.float32)
    wanted = [torch.zeros(param.shape) for param in params]
    for _ in range(3):
        for param, total in zip(params, wanted, strict=True):
            param.grad = None
            grad = torch.randn(param.shape)
            param.grad = grad
            total += grad
        flat.tick()
    assert flat.total(1.0) is not None
    for param, total in zip(params, wanted, strict=True):
        assert param.grad is not None
        assert torch.equal(param.grad, total)


def test_sums_of_one_microbatch_may_be_replaced() -> None:
    """Where nothing else is in the sums, p.grad = f(p.grad) after backward() replaces them."""
    model = net()
    flat, params = sums_of(model)
    for _ in range(2):
        backward(model, BATCHES[0])
        wanted = []
        for param in params:
            assert param.grad is not None
            param.grad = param.grad * 0.5
            wanted.append(param.grad.clone())
        flat.tick()
        assert flat.total(1.0) is not None
        for param, value in zip(params, wanted, strict=True):
            assert param.grad is not None
            assert torch.equal(param.grad, value)
        flat.clear()


@pytest.mark.parametrize("which", ["all", "one", "the first"])
@pytest.mark.parametrize("then", ["backward", "boundary"])
def test_sums_of_several_microbatches_may_not_be_replaced(which: str, then: str) -> None:
    """p.grad = f(p.grad) after a later backward() changes what earlier microbatches gave: an error."""
    model = net()
    flat, params = sums_of(model)
    backward(model, BATCHES[0])
    flat.tick()
    backward(model, BATCHES[1])
    changed = params if which == "all" else params[1:2] if which == "one" else params[:1]
    for param in changed:
        assert param.grad is not None
        param.grad = param.grad * 0.5

    def goes_on() -> None:
        flat.tick()
        if then == "backward":
            backward(model, BATCHES[2])
            flat.tick()
        flat.total(1.0)

    with pytest.raises(ConfigurationError, match=r"changed between backward|were assigned"):
        goes_on()


def test_writing_to_sums_without_a_backward_is_refused() -> None:
    """p.grad.copy_(g) is this microbatch's gradient while the sums are empty, and an error afterwards."""
    model = net()
    flat, params = sums_of(model)
    wanted = grads_of(model, BATCHES[0])
    for param, grad in zip(params, wanted, strict=True):
        assert param.grad is not None
        param.grad.copy_(grad)
    flat.tick()
    for param, grad in zip(params, wanted, strict=True):
        assert param.grad is not None
        assert torch.equal(param.grad, grad)
        param.grad.copy_(grad)
    with pytest.raises(ConfigurationError, match="max_grad_norm"):
        flat.tick()


def test_a_gradient_cleared_before_its_step_is_refused() -> None:
    """model.zero_grad() between backward() and step() cannot take the gradient out of the sums: an error."""
    model = net()
    flat, _ = sums_of(model)
    backward(model, BATCHES[0])
    flat.tick()
    model.zero_grad()
    backward(model, BATCHES[1])
    model.zero_grad()
    with pytest.raises(ConfigurationError, match=r"discard\(\)"):
        flat.tick()


def test_a_step_without_a_gradient_is_told_once(swarm: FakeSwarm, caplog: pytest.LogCaptureFixture) -> None:
    """Samples of a step() without backward() would thin the average: one warning. A gradient that was
    assigned or written by hand is no such case.
    """
    model = net()
    opt = wrap(model)
    with caplog.at_level(logging.WARNING, "p2pavg.optim"):
        for by_hand in (False, True):
            for param in model.parameters():
                if by_hand:
                    param.grad = torch.ones_like(param)
                else:
                    assert param.grad is not None
                    param.grad.add_(1.0)
            opt.step()
        backward(model, BATCHES[0])
        opt.step()
        assert "without a backward()" not in caplog.text
        for _ in range(3):
            opt.step()
    assert caplog.text.count("without a backward()") == 1


def test_a_discarded_assignment_stays_away(swarm: FakeSwarm) -> None:
    """discard() drops an assigned gradient too: the next microbatch is alone in the sums."""
    model = net()
    opt = wrap(model)
    assign(model, BATCHES[0])
    opt.discard()
    backward(model, BATCHES[1])
    opt.step()
    for param, grad in zip(model.parameters(), grads_of(model, BATCHES[1]), strict=True):
        assert param.grad is not None
        assert torch.equal(param.grad, grad)


def clip(norm: float) -> Callable[[nn.Module], None]:
    return lambda model: nn.utils.clip_grad_norm_(model.parameters(), norm)


def by_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def masked(model: nn.Module) -> None:
    param = next(model.parameters())
    assert param.grad is not None
    param.grad[0] = 0


def through_data(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad.data.mul_(0.5)


@pytest.mark.parametrize("first", [1, 3, 7])
@pytest.mark.parametrize(
    "change", [clip(0.1), by_value, masked, through_data], ids=["norm", "value", "mask", ".data"]
)
def test_changing_sums_is_an_error_that_names_the_fix(
    swarm: FakeSwarm, change: Callable[[nn.Module], None], first: int
) -> None:
    """The first clipping, or other change, of sums of microbatches raises at the step() that follows it."""
    model = net()
    opt = wrap(model, target_batch_size=10**6)
    for number, ids in enumerate(BATCHES):
        backward(model, ids)
        if number == first:
            break
        opt.step()
    change(model)
    with pytest.raises(ConfigurationError, match=r"max_grad_norm=.*discard\(\)"):
        opt.step()
    opt.discard()
    backward(model, BATCHES[0])
    opt.step()


def test_a_change_of_a_large_model_is_found_by_samples(swarm: FakeSwarm) -> None:
    """Clipping is found in each parameter, where only some elements are remembered."""
    model = nn.Sequential(*[nn.Linear(40, 40) for _ in range(10)])
    opt = wrap(model, target_batch_size=10**6)
    for param in model.parameters():
        for _ in range(2):
            model(torch.ones(4, 40)).sum().backward()
            opt.step()
        model(torch.ones(4, 40)).sum().backward()
        assert param.grad is not None
        param.grad.mul_(0.5)
        opt._flat._edits.watching[0] = False  # as at the first change
        with pytest.raises(ConfigurationError, match="max_grad_norm="):
            opt.step()
        opt.discard()


def test_passes_over_other_parts_of_a_model_are_no_change(
    swarm: FakeSwarm, caplog: pytest.LogCaptureFixture
) -> None:
    """Several backward passes of a step, over the same parameters or others, draw no error and no warning."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    opt = wrap(model, target_batch_size=64)
    for number in range(8):
        for part in [model[0], model[1], model, model[0]][: number % 4 + 1]:
            part(torch.randn(4, 4)).square().mean().backward()
        opt.step(batch_size=4)
    assert not caplog.records


@pytest.mark.parametrize("change", [clip(float("inf")), clip(1e9)], ids=["infinite", "above the norm"])
def test_a_factor_of_one_is_no_clipping(
    swarm: FakeSwarm, change: Callable[[nn.Module], None], caplog: pytest.LogCaptureFixture
) -> None:
    """clip_grad_norm_ that leaves the values as they are, as frameworks call it for a log, is let through."""
    model = net()
    opt = wrap(model)
    for ids in BATCHES:
        backward(model, ids)
        change(model)
        opt.step()
        opt.zero_grad()
    assert opt.epoch == 2
    assert not caplog.records
    assert relative(model, train_alone(EPOCHS, MAKERS["sgd"], scheduled=False)) <= 1e-6


def test_clipping_one_microbatch_alone_is_warned_about_once(
    swarm: FakeSwarm, caplog: pytest.LogCaptureFixture
) -> None:
    """Where each epoch is one microbatch, clipping it is well defined, though not what one process does."""
    model = net()
    opt = wrap(model, target_batch_size=4)
    for ids in BATCHES:
        backward(model, ids)
        clip(0.1)(model)
        opt.step()
        assert len(caplog.records) == 1  # at the first already
    assert opt.epoch == 8
    assert [record.getMessage().count("max_grad_norm=") for record in caplog.records] == [1]


def test_a_data_parallel_wrapper_that_was_left_in(
    swarm: FakeSwarm, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """DistributedDataParallel of one process writes the same values back: no warning, the same training."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = net()
        wrapped = nn.parallel.DistributedDataParallel(model)
        opt = wrap(wrapped)
        for ids in BATCHES:
            backward(wrapped, ids)
            opt.step()
            opt.zero_grad()
        assert opt.epoch == 2
        bucketed = nn.parallel.DistributedDataParallel(net(), gradient_as_bucket_view=True)
        with pytest.raises(ConfigurationError, match="gradient_as_bucket_view"):
            wrap(bucketed)
    finally:
        torch.distributed.destroy_process_group()
    assert not caplog.records
    assert relative(model, train_alone(EPOCHS, MAKERS["sgd"], scheduled=False)) <= 1e-6


def test_several_backward_passes_of_one_step_are_refused(swarm: FakeSwarm) -> None:
    """Four backward() and one step(): the error says what batch_size_per_step means, and nothing is lost."""
    model = net()
    opt = wrap(model)
    for ids in BATCHES[:4]:
        (loss_of(model, ids) / 4).backward()
    with pytest.raises(
        ConfigurationError, match=r"4 backward\(\) passes.*batch_size_per_step=.*batch_size=n"
    ):
        opt.step()
    opt.step(batch_size=16)
    assert opt.epoch == 1
    alone = train_alone([EPOCHS[0]], MAKERS["sgd"], scheduled=False)
    assert relative(model, alone) <= 1e-6


def test_accumulation_that_is_told(swarm: FakeSwarm) -> None:
    """A loop that accumulates by itself and tells step(batch_size=n) trains like one batch, and scale_loss()
    counts each pass.
    """
    alone = train_alone(EPOCHS, MAKERS["sgd"], scheduled=False)
    for told in (True, False):
        model = net()
        swarm.joined.clear()
        swarm.rounds = 0
        opt = wrap(model, batch_size_per_step=None if told else 4)
        for number, ids in enumerate(BATCHES):
            if told:
                (loss_of(model, ids) / 2).backward()
            else:
                opt.scale_loss(loss_of(model, ids), 4).backward()
            if number % 2:
                opt.step(batch_size=8) if told else opt.step()
        assert opt.epoch == 2
        assert relative(model, alone) <= 1e-6


def test_several_losses_of_one_batch(swarm: FakeSwarm) -> None:
    """Two losses of the same batch, backward() each: step(batch_size=n) counts the batch once."""
    model, twin = net(), net()
    opt = wrap(model, target_batch_size=4)
    optimizer = MAKERS["sgd"](twin.parameters())
    for ids in BATCHES[:3]:
        for one in (model, twin):
            loss_of(one, ids).backward()
            (0.5 * loss_of(one, ids)).backward()
        opt.step(batch_size=4)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(vector(model), vector(twin))


def test_passes_are_counted_by_the_parameters_reached() -> None:
    """A parameter reached k times in a microbatch tells k passes; the next microbatch begins with one."""
    model = net()
    flat, _ = sums_of(model)
    assert flat.passes == 1
    for expected in (1, 2, 3):
        backward(model, BATCHES[0])
        assert flat.passes == expected
    flat.tick()
    assert flat.passes == 1
    parts = Microbatches(64, 4, "mean")
    assert parts.take(None, 1) == 4
    with pytest.raises(ConfigurationError, match="uneven"):
        parts.take(8, 2)


@pytest.mark.parametrize("options", [{}, {"delay_updates": True}])
def test_a_gradient_that_overflows_when_weighted_is_dropped(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """1e38 is finite, but no term of a weighted sum: the samples are named, and the next epoch comes."""
    model = net()
    reports: list[Any] = []
    with CollaborativeOptimizer(
        MAKERS["sgd"](model.parameters()),
        "overflow",
        8,
        4,
        initial_peers=[],
        listen="127.0.0.1:0",
        on_round=reports.append,
        **options,
    ) as opt:
        for ids in BATCHES[:2]:
            (loss_of(model, ids) * 1e38).backward()
            opt.step()
        for ids in BATCHES * 2:
            backward(model, ids)
            opt.step()
        assert opt.epoch >= 2
    told = [r.getMessage() for r in caplog.records if "too large to be averaged" in r.getMessage()]
    assert len(told) == 1
    assert sum(report.samples_discarded for report in reports) >= 8
    assert torch.isfinite(vector(model)).all()


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("transformers.trainer", r"\*\*trainer_kwargs\(opt, args\)"),
        ("lightning.pytorch.trainer.call", "strategy=CollaborativeStrategy"),
        ("pytorch_lightning.loops.loop", "strategy=CollaborativeStrategy"),
        ("accelerate.optimizer", "set opt.samples_per_step once"),
        ("own", r"call step\(\) after every backward\(\)"),
    ],
)
def test_a_tool_without_its_adapter_is_told_of_it(module: str, words: str) -> None:
    """Where a tool's loop calls step(), the error of several passes names what p2pavg has for that tool."""
    counting = Microbatches(64, 8, "mean")
    tool: dict[str, Any] = {"__name__": module}
    exec("def call(step): step()", tool)
    with pytest.raises(ConfigurationError, match=f"^4 backward.*{words}"):
        tool["call"](lambda: counting.take(None, passes=4))


def test_a_first_step_of_another_size_names_what_differs() -> None:
    """step(batch_size=64) beside batch_size_per_step=32 says so; after a step it names the steps."""
    counting = Microbatches(256, 32, "mean")
    with pytest.raises(ConfigurationError, match=r"^batch_size_per_step=32, but step\(batch_size=64\): pass"):
        counting.take(64)
    assert counting.take(32) == 32
    with pytest.raises(ConfigurationError, match=r"^step\(batch_size=64\) after steps of 32"):
        counting.take(64)
    counting = Microbatches(256, 32, "mean")
    counting.per_step = 128
    with pytest.raises(ConfigurationError, match=r"^opt.samples_per_step=128, but step\(batch_size=64\)"):
        counting.take(64)
