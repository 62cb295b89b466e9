"""Whatever raises inside step(), the next one goes on, and nobody waits for ever. With real peers."""

from __future__ import annotations

import copy
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from p2pavg.errors import ClosedError, ConfigurationError, InternalError, StateError
from p2pavg.optim.optimizer import CollaborativeOptimizer
from p2pavg.optim.updates import behind
from p2pavg.rounds.loop.boundary import Boundary
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.session import Session
from p2pavg.rounds.training import Contribution, Outcome
from tests.unit.optim.test_optimizer import MAKERS, loss_of, net, relative, train_alone, vector

WAYS: dict[str, dict[str, Any]] = {
    "waiting": {},
    "delayed": {"delay_updates": True},
    "offloaded": {"offload_optimizer": True},
}
EPOCHS = [list(range(4 * epoch, 4 * epoch + 4)) for epoch in range(6)]


@pytest.fixture(params=WAYS)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"compression": "none", "initial_peers": [], "listen": "127.0.0.1:0"} | WAYS[request.param]


def wrap(model: nn.Module, options: dict[str, Any], **more: Any) -> CollaborativeOptimizer:
    inner = MAKERS["adamw"](model.parameters())
    return CollaborativeOptimizer(inner, "raises", 4, 4, **options | more)


def step(opt: CollaborativeOptimizer, model: nn.Module, ids: list[int]) -> None:
    loss_of(model, ids).backward()
    opt.step()


class Once:
    """A step hook that raises at its second call, before or after the optimizer stepped."""

    def __init__(self, error: BaseException) -> None:
        self.calls = 0
        self.error = error

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            raise self.error


def raised_by(opt: CollaborativeOptimizer, model: nn.Module, batches: Iterator[list[int]]) -> BaseException:
    """What comes out of the first step() that raises."""
    for ids in batches:
        try:
            step(opt, model, ids)
        except Exception as error:
            return error
    raise AssertionError("nothing was raised")


def test_an_average_that_could_not_be_applied_is_applied_at_the_next_step(options: dict[str, Any]) -> None:
    """A hook that raises before the optimizer changed anything: its average is applied one step() later."""
    model, batches = net(), iter(EPOCHS)
    with wrap(model, options, delay_warmup_epochs=100) as opt:
        opt.inner.register_step_pre_hook(Once(MemoryError("no memory")))
        assert isinstance(raised_by(opt, model, batches), MemoryError)
        assert opt.epoch == 1
        for ids in batches:
            step(opt, model, ids)
        assert opt.epoch == 6
    assert relative(model, one_batch_on_older_parameters()) <= 1e-6


def one_batch_on_older_parameters() -> nn.Module:
    """One process in which the third batch's gradient is computed before the second's step."""
    model = net()
    optimizer = MAKERS["adamw"](model.parameters())
    older = copy.deepcopy(model)
    for number, ids in enumerate(EPOCHS):
        source = older if number == 2 else model
        grads = torch.autograd.grad(loss_of(source, ids), list(source.parameters()))
        older = copy.deepcopy(model)
        for param, grad in zip(model.parameters(), grads, strict=True):
            param.grad = grad
        optimizer.step()
    return model


def test_half_changed_parameters_make_a_peer_enter_again(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A hook that raises when parameters have changed: step() raises it once, and training goes on. The batch
    that ends then was computed on those parameters: it counts in no average, and a report names it, with what
    else was accumulated behind a delayed update.
    """
    model, batches = net(), iter(EPOCHS * 2)
    reports: list[Any] = []
    with wrap(model, options, on_round=reports.append) as opt:
        opt.inner.register_step_post_hook(Once(RuntimeError("after the change")))
        peer = opt.peer
        assert "after the change" in str(raised_by(opt, model, batches))
        for ids in batches:
            step(opt, model, ids)
        assert opt.peer is not peer
        assert opt.epoch >= 3
    assert torch.isfinite(vector(model)).all()
    behind_it = 4 if "delay_updates" in options else 0
    assert [report.samples_discarded for report in reports if report.samples_discarded] == [4 + behind_it]
    assert not [record for record in caplog.records if "without a backward()" in record.message]


@pytest.mark.parametrize(
    ("why", "when"),
    [
        ("half changed", "before it left"),
        ("half changed", "before it entered"),
        ("half changed", "when it had entered"),
        ("a checkpoint", "before it entered"),
    ],
)
def test_an_interrupt_while_a_peer_enters_again(
    options: dict[str, Any], when: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between leaving and entering: the next step() enters, and training goes on."""
    model, batches = net(), iter(EPOCHS * 3)
    leave, join, struck = CollaborativeOptimizer._leave, CollaborativeOptimizer._join, []

    def strike() -> None:
        if not struck:
            struck.append(1)
            raise KeyboardInterrupt

    def leaves(opt: CollaborativeOptimizer) -> None:
        if when == "before it left":
            strike()
        leave(opt)

    def joins(opt: CollaborativeOptimizer, *arguments: Any) -> None:
        if when == "before it entered":
            strike()
        join(opt, *arguments)
        strike()

    def enters(opt: CollaborativeOptimizer) -> None:
        if why == "half changed":
            step(opt, model, next(batches))
        else:
            opt.load_state_dict(copy.deepcopy(opt.state_dict()) | {"p2pavg": None})

    with wrap(model, options) as opt:
        if why == "half changed":
            opt.inner.register_step_post_hook(Once(RuntimeError("after the change")))
            raised_by(opt, model, batches)
        else:
            for _ in range(3):
                step(opt, model, next(batches))
        monkeypatch.setattr(CollaborativeOptimizer, "_leave", leaves)
        monkeypatch.setattr(CollaborativeOptimizer, "_join", joins)
        with pytest.raises(KeyboardInterrupt):
            enters(opt)
        epoch = opt.epoch
        for ids in batches:
            step(opt, model, ids)
        assert struck
        assert opt.epoch >= epoch + 3
    assert torch.isfinite(vector(model)).all()


@pytest.mark.parametrize("then", ["the next step()", "the call again"])
def test_an_interrupt_while_a_checkpoint_is_loaded(
    then: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C when a peer has left, and the checkpoint is not loaded yet: the next step() loads it, or another
    call does, and training goes on.
    """
    model, batches = net(), iter(EPOCHS * 2)
    leave = CollaborativeOptimizer._leave

    def leaves(opt: CollaborativeOptimizer) -> None:
        leave(opt)
        monkeypatch.undo()
        raise KeyboardInterrupt

    with wrap(model, options) as opt:
        step(opt, model, next(batches))
        saved = copy.deepcopy(opt.state_dict()) | {"p2pavg": None}
        saved["param_groups"][0]["lr"] = 0.0123
        monkeypatch.setattr(CollaborativeOptimizer, "_leave", leaves)
        with pytest.raises(KeyboardInterrupt):
            opt.load_state_dict(saved)
        if then == "the call again":
            opt.load_state_dict(saved)
        for ids in batches:
            step(opt, model, ids)
        assert opt.param_groups[0]["lr"] == 0.0123
        assert opt.epoch >= 3
    assert torch.isfinite(vector(model)).all()


def test_a_checkpoint_revives_a_peer_that_has_failed(options: dict[str, Any]) -> None:
    """Where the peer is closed under its optimizer, loading a checkpoint enters the run again."""
    model, batches = net(), iter(EPOCHS * 2)
    with wrap(model, options) as opt:
        for _ in range(2):
            step(opt, model, next(batches))
        saved = copy.deepcopy(opt.state_dict()) | {"p2pavg": None}
        opt.peer.close()
        assert isinstance(raised_by(opt, model, batches), ClosedError)
        opt.load_state_dict(saved)
        for ids in batches:
            step(opt, model, ids)
        assert opt.epoch >= 3
    assert torch.isfinite(vector(model)).all()


def test_a_checkpoint_that_does_not_load_raises_once(options: dict[str, Any]) -> None:
    """A checkpoint with one parameter too few is refused, and the run goes on where it stood."""
    model, batches = net(), iter(EPOCHS * 2)
    with wrap(model, options) as opt:
        for _ in range(3):
            step(opt, model, next(batches))
        epoch, saved = opt.epoch, copy.deepcopy(opt.state_dict()) | {"p2pavg": None}
        saved["param_groups"][0]["params"].pop()
        with pytest.raises(StateError, match=r"its groups have \d+ parameters, here \d+\)"):
            opt.load_state_dict(saved)
        for ids in batches:
            step(opt, model, ids)
        assert opt.epoch >= epoch + 3
    assert torch.isfinite(vector(model)).all()


def test_a_batch_interrupted_before_its_step_is_discarded(options: dict[str, Any]) -> None:
    """Ctrl-C between backward() and step(), and the cell again: step() names discard(), which helps."""
    model = net()
    with wrap(model, options) as opt:
        loss_of(model, EPOCHS[0]).backward()
        for _ in range(2):
            with pytest.raises(
                ConfigurationError, match=r"interrupted before its step\(\), call opt.discard"
            ):
                step(opt, model, EPOCHS[1])
        opt.discard()
        for ids in EPOCHS[2:]:
            step(opt, model, ids)
        assert opt.epoch >= 3


def test_closing_after_an_interrupt_between_leaving_and_entering(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """close() is quiet, though a gradient waits that can be handed to nobody."""
    model, batches = net(), iter(EPOCHS)
    opt = wrap(model, options)
    opt.inner.register_step_post_hook(Once(RuntimeError("after the change")))
    raised_by(opt, model, batches)

    def joins(opt: CollaborativeOptimizer, *arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CollaborativeOptimizer, "_join", joins)
    with pytest.raises(KeyboardInterrupt):
        step(opt, model, next(batches))
    loss_of(model, EPOCHS[0]).backward()
    opt.close()


def test_inference_mode_is_refused_with_what_to_do(options: dict[str, Any]) -> None:
    """step() inside torch.inference_mode() names it, and the same samples are averaged by the next step()."""
    model = net()
    with wrap(model, options) as opt:
        loss_of(model, EPOCHS[0]).backward()
        with torch.inference_mode(), pytest.raises(ConfigurationError, match="no_grad"):
            opt.step()
        for ids in EPOCHS[1:]:
            step(opt, model, ids)
        assert opt.epoch >= 2
    assert torch.isfinite(vector(model)).all()


def test_a_scheduler_past_its_end_raises_and_the_next_epoch_comes(options: dict[str, Any]) -> None:
    """OneCycleLR past its last step raises its error at each epoch's end; the epochs go on."""
    model = net()
    inner = MAKERS["sgd"](model.parameters())
    schedule = OneCycleLR(inner, 0.1, total_steps=2)
    with CollaborativeOptimizer(inner, "raises", 4, 4, scheduler=schedule, **options) as opt:
        failures = 0
        for ids in EPOCHS:
            try:
                step(opt, model, ids)
            except ValueError:
                failures += 1
        assert failures >= 1
        assert opt.epoch >= 3


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C raises, where a shell started the tests in its background, too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_while_parameters_change_comes_when_they_are_whole(options: dict[str, Any]) -> None:
    """Ctrl-C inside the optimizer's step is raised at the end of step(): the run ends as without it. When the
    optimizer steps on another thread, step() is left at once, and the next one follows what came of it.
    """
    model, batches = net(), iter(EPOCHS)
    with wrap(model, options) as opt:
        calls: list[int] = []

        def strike(*_: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGINT)

        opt.inner.register_step_pre_hook(strike)
        caught = 0
        for ids in batches:
            try:
                step(opt, model, ids)
            except KeyboardInterrupt:
                caught += 1
        assert caught == 1
    assert opt.epoch >= 4
    if len(options) == 3:
        assert relative(model, train_alone(EPOCHS, MAKERS["adamw"], scheduled=False)) <= 1e-6


@pytest.mark.parametrize("when", ["before the round is asked for", "while it is under way", "at its end"])
def test_an_interrupt_while_step_waits(
    options: dict[str, Any], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at any moment of the wait for the others: the next step() goes on, with every sample counted."""
    outcome, post = Session._outcome, Session._post
    struck: list[str] = []
    waited: list[int] = []
    reports: list[Any] = []

    def strike(method: str) -> None:
        if method == "arrived" and not struck:
            struck.append("".join(traceback.format_stack()))
            raise KeyboardInterrupt

    def waits(session: Session, answer: Future[Outcome], timeout: float | None) -> Outcome:
        if when == "at its end":
            answer.result(30)
        if session.epoch == 2:
            strike("arrived")
        return outcome(session, answer, timeout)

    def posts(session: Session, call: Any, *arguments: Any) -> None:
        if session.epoch == 2:
            strike(call.__name__)
        post(session, call, *arguments)

    def jobs_end(jobs: Any) -> Any:
        if jobs != [opt._update._job]:  # type: ignore[attr-defined]  # another optimizer's
            return waits_for(jobs)
        if when == "at its end":
            waits_for(jobs)
        waited.append(1)
        if len(waited) == 3:
            struck.append("".join(traceback.format_stack()))
            raise KeyboardInterrupt
        return waits_for(jobs)

    waits_for = behind.wait
    model, caught = net(), 0
    with wrap(model, options, on_round=reports.append) as opt:
        if len(options) > 3:
            monkeypatch.setattr(behind, "wait", jobs_end)
        elif when == "before the round is asked for":
            monkeypatch.setattr(Session, "_post", posts)
        else:
            monkeypatch.setattr(Session, "_outcome", waits)
        for ids in EPOCHS:
            try:
                step(opt, model, ids)
            except KeyboardInterrupt:
                caught += 1
    counted = opt._training.samples()
    assert (len(struck), caught) == (1, 1), struck
    assert sum(report.samples for report in reports) + counted == 24
    assert not any(report.samples_discarded for report in reports)


def broken_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(machine: Machine, event: Any, now: float) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Machine, "handle", handle)


def broken_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    def local(boundary: Boundary, *, at_boundary: bool) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Boundary, "local", local)


def broken_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(jobs: Any, action: Any, contribution: Contribution | None) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("p2pavg.rounds.loop.attempts.Attempts.begin", begin)


@pytest.mark.parametrize("how", [broken_machine, broken_arrival, broken_begin])
def test_an_unexpected_error_on_the_loop_ends_the_session(
    options: dict[str, Any], how: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails on the loop thread, every waiting and later step() raises it, with what to do."""
    model = net()
    with wrap(model, options) as opt:
        step(opt, model, EPOCHS[0])
        how(monkeypatch)
        for _ in range(2):
            error = raised_by(opt, model, iter(EPOCHS[1:]))
            assert isinstance(error, InternalError)
            assert isinstance(error.__cause__, ZeroDivisionError)
            assert "close() this optimizer" in str(error)


def test_the_default_dtype_is_used_nowhere(options: dict[str, Any]) -> None:
    """With torch.set_default_dtype(torch.float64) a float32 model trains to the bits that it had without."""
    models = []
    for dtype in (torch.float32, torch.float64):
        model = net()
        torch.set_default_dtype(dtype)
        try:
            with wrap(model, options, grad_dtype=torch.float32) as opt:
                for ids in EPOCHS:
                    x = loss_of(model.float(), ids) if dtype is torch.float32 else _loss(model, ids)
                    x.backward()
                    opt.step()
        finally:
            torch.set_default_dtype(torch.float32)
        models.append(model)
    assert torch.equal(vector(models[0]), vector(models[1]))


def _loss(model: nn.Module, ids: list[int]) -> torch.Tensor:
    torch.set_default_dtype(torch.float32)
    loss = loss_of(model, ids)
    torch.set_default_dtype(torch.float64)
    return loss


def test_a_wait_that_is_called_off_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM on the way into the wait: step() ends, and so does the next one."""
    post = Session._post

    def called_off_first(session: Session, method: Callable[..., Any], *arguments: Any) -> None:
        if method.__name__ == "arrived" and not session.called_off.is_set():
            session.call_off()
        post(session, method, *arguments)

    model = net()
    opt = wrap(model, {"compression": "none", "initial_peers": [], "listen": "127.0.0.1:0"})
    monkeypatch.setattr(Session, "_post", called_off_first)
    for ids in ([1, 2, 3, 4], [5, 6, 7, 8]):
        step(opt, model, ids)
    opt.close()
