from __future__ import annotations

import shutil
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR

from p2pavg import CollaborativeOptimizer
from p2pavg.errors import StateError
from tests.swarm.trainers import Trainers

pytestmark = pytest.mark.swarm
MILESTONES = (20, 60)


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def loss_of(model: nn.Module) -> torch.Tensor:
    """The same batch for everybody and ever: an epoch's average does not depend on who brought how much."""
    torch.manual_seed(5)
    inputs = torch.randn(8, 8)
    return (model(inputs) - inputs.sum(dim=1, keepdim=True).sin()).square().mean()


def built(model: nn.Module) -> tuple[torch.optim.Optimizer, MultiStepLR]:
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    return inner, MultiStepLR(inner, list(MILESTONES))


def undisturbed(epochs: int) -> list[float]:
    """The loss before each epoch's step, of one process."""
    model = net()
    inner, scheduler = built(model)
    losses = []
    for _ in range(epochs):
        loss = loss_of(model)
        losses.append(loss.item())
        inner.zero_grad()
        loss.backward()
        inner.step()
        scheduler.step()
    return losses


@dataclass
class Plan:
    run_id: str
    directory: str | None
    every: int
    initial_peers: tuple[str, ...] = ()
    delay: bool = False


def build(plan: Plan, model: nn.Module, **more: Any) -> CollaborativeOptimizer:
    inner, scheduler = built(model)
    return CollaborativeOptimizer(
        inner,
        plan.run_id,
        64,
        8,
        initial_peers=plan.initial_peers,
        scheduler=scheduler,
        compression="none",
        listen="127.0.0.1:0",
        checkpoint_dir=plan.directory,
        checkpoint_epochs=plan.every if plan.directory else None,
        delay_updates=plan.delay,
        **more,
    )


def run(plan: Plan, pipe: Connection) -> None:
    """Train until killed; tell the loss before each epoch's step."""
    torch.set_num_threads(1)
    model = net()
    opt = build(plan, model)
    pipe.send(opt.peer.address)
    told = -1
    while True:
        loss = loss_of(model)
        if opt.epoch != told:
            told = opt.epoch
            pipe.send((told, loss.item()))
        loss.backward()
        opt.step()
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("restarts", [3, pytest.param(20, marks=pytest.mark.long)])
def test_a_run_goes_on_after_everybody_was_killed(tmp_path: Path, restarts: int) -> None:
    """Again and again all peers are killed and started anew, with checkpoints of different epochs: it goes on
    from the newest, and the loss at every epoch is that of an undisturbed run.
    """
    told: list[tuple[int, int, float]] = []
    began: list[int] = []
    for attempt in range(restarts):
        with Trainers() as trainers:
            plan = Plan("killed", str(tmp_path / "a"), 3)
            address = trainers.launch(run, plan)
            trainers.launch(run, Plan("killed", str(tmp_path / "b"), 7, (address,)))
            first = {rank: trainers.receive(rank) for rank in (0, 1)}
            began.append(max(epoch for epoch, _ in first.values()))
            seen = list(first.values())
            while min(epoch for epoch, _ in seen[-2:]) < began[-1] + 9:
                seen += [trainers.receive(rank) for rank in (0, 1)]
        told += [(attempt, epoch, loss) for epoch, loss in seen]
    expected = undisturbed(1 + max(epoch for _, epoch, _ in told))
    for attempt, epoch, loss in told:
        assert loss == pytest.approx(expected[epoch], rel=1e-3), f"epoch {epoch} after restart {attempt}"
    assert all(later >= before + 6 for before, later in pairwise(began))
    assert began[-1] > MILESTONES[0]


@pytest.mark.parametrize("delay", [False, True], ids=["waiting", "delayed"])
@pytest.mark.parametrize("how", ["torch", "distributed"])
def test_a_state_dict_restores_a_run_that_nobody_lives_in(tmp_path: Path, how: str, delay: bool) -> None:
    """Saved with torch.save or torch.distributed.checkpoint and loaded anew, a run stands at the same epoch
    and lineage, with the same optimizer, scheduler and extras, and steps to the bits of the one that went on.
    """

    class Position:
        batch = 0

        def state_dict(self) -> dict[str, Any]:
            return {"batch": self.batch}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.batch = state["batch"]

    def train(opt: CollaborativeOptimizer, model: nn.Module, epochs: int) -> None:
        while opt.epoch < epochs:
            loss_of(model).backward()
            opt.step()
            position.batch += 1

    plan = Plan(f"dict-{how}-{delay}", None, 1, (), delay)
    position, model = Position(), net()
    with build(plan, model, extras={"position": position}) as opt:
        train(opt, model, 30)
        state = {"model": model.state_dict(), "opt": opt.state_dict()}
        epoch, lineage, batch = opt.epoch, opt._training.standing[1], position.batch
        if how == "torch":
            torch.save(state, tmp_path / "state.pt")
        else:
            from torch.distributed import checkpoint
            from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

            checkpoint.save(state, checkpoint_id=str(tmp_path / "dcp"))
            dcp_to_torch_save(str(tmp_path / "dcp"), str(tmp_path / "state.pt"))
        if not delay:
            train(opt, model, 40)
        went_on = [param.detach().clone() for param in model.parameters()]

    position, model = Position(), net()
    with build(plan, model, extras={"position": position}) as opt:
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        assert (opt.epoch, opt._training.standing[1], position.batch) == (epoch, lineage, batch)
        if not delay:
            train(opt, model, 40)
        for param, expected in zip(model.parameters(), went_on, strict=True):
            assert torch.equal(param, expected)
        train(opt, model, 45)
        other = nn.Linear(3, 1)
        with (
            build(Plan("other", None, 1), other) as different,
            pytest.raises(StateError, match="another model"),
        ):
            different.load_state_dict(state["opt"])


def test_checkpoints_are_written_beside_the_training(tmp_path: Path, caplog: Any) -> None:
    """Every two epochs, the last kept; a directory that vanishes gives one line, and training goes on."""
    model = net()
    with build(Plan("beside", str(tmp_path / "c"), 2), model) as opt:
        files: set[str] = set()

        def train(epoch: int) -> None:
            while opt.epoch < epoch:
                loss_of(model).backward()
                opt.step()

        deadline = time.monotonic() + 60
        while len(files) < 4 and time.monotonic() < deadline:
            train(opt.epoch + 1)
            files |= {path.name for path in (tmp_path / "c").glob("*.p2pavg")}
        assert len(files) >= 4
        assert all(int(name.split("-")[-2]) > 0 for name in files)
        opt.peer._thread.run(opt.peer._running().driver.states.saved())  # the next is due after another step
        shutil.rmtree(tmp_path / "c")
        (tmp_path / "c").write_text("in the way")
        before = opt.epoch
        while "no checkpoint can be written" not in caplog.text and time.monotonic() < deadline:
            train(opt.epoch + 1)
        train(opt.epoch + 10)
        assert opt.epoch > before + 10
    assert caplog.text.count("no checkpoint can be written") == 1
    for thread in threading.enumerate():
        if thread.name.startswith("p2pavg"):
            thread.join(30)  # one that was writing ends when it notices
            assert not thread.is_alive(), thread.name
    assert np.isfinite(loss_of(model).item())
