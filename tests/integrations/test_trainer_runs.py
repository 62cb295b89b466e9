"""Trainer in a run that others train too: a newcomer, a killed process, its checkpoint."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pavg import CollaborativeOptimizer
from tests.integrations.processes import F32, Meeting, bits, run
from tests.integrations.tools import QUIET, ForTrainer, inner_of, rows, trainer_args

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(200)]

EPOCHS = 24
KILLED = 8


def peer(
    rank: int, peers: int, meeting: Meeting, folder: Path, resumes: bool
) -> tuple[F32, list[int], list[float]]:
    """Rank 0 trains all the while. Rank 1 dies. Rank 2 comes when that is dead: as its next life with its
    checkpoint, or as a newcomer. What is returned: parameters, the epochs that were logged, and their losses.
    """
    from transformers import Trainer, TrainerCallback

    from p2pavg.hf import trainer_kwargs

    named = meeting.first(rank)

    class Turns(TrainerCallback):
        called = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if rank == 2:
                meeting.together()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if rank == 0 and state.global_step >= KILLED + 2 and not self.called:
                self.called = True
                meeting.together()  # the third may come
                meeting.together()  # it has come
            if rank == 1 and state.global_step >= KILLED:
                os._exit(1)

    if rank == 2:
        meeting.together()
    model = ForTrainer()
    inner, _ = inner_of(model)
    with CollaborativeOptimizer(inner, "runs", 8, initial_peers=named, max_grad_norm=0.5, **QUIET) as opt:
        if rank == 0:
            meeting.there(opt, 1)
        args = trainer_args(
            folder / str(min(rank, 1)),
            max_steps=EPOCHS,
            save_strategy="steps",
            save_steps=4,
            lr_scheduler_type="constant",
        )
        kwargs = trainer_kwargs(opt, args)
        trainer = Trainer(
            model, train_dataset=rows(rank, peers), **kwargs | {"callbacks": [*kwargs["callbacks"], Turns()]}
        )
        trainer.train(resume_from_checkpoint=rank == 2 and resumes)
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert trainer.state.global_step == opt.epoch
        return bits(model), [e["step"] for e in logs], [e["loss"] for e in logs]


@pytest.mark.parametrize("resumes", [True, pytest.param(False, marks=pytest.mark.long)])
def test_who_comes_in_the_middle_goes_on_at_the_swarms_epoch(resumes: bool, tmp_path: Path) -> None:
    """One of two Trainers is killed. Its next process, with the checkpoint of an earlier epoch, or a newcomer
    without one, joins where the other one is by then; both end at the last epoch, on one curve.
    """
    for name in ("transformers", "accelerate"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    first, _, third = run(peer, 3, tmp_path, resumes, lost={1}, meets={0, 2})
    saved = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert "checkpoint-4" in saved
    _, steps, losses = first
    _, later, theirs = third
    assert steps[-1] == EPOCHS
    assert min(step for step in later if step > KILLED) > KILLED + 2  # where the other one was
    assert later[-1] == EPOCHS
    fresh = [loss for step, loss in zip(later, theirs, strict=True) if step > KILLED]
    assert fresh[0] == pytest.approx(fresh[1], rel=0.5)  # of one step, not of all before it joined
    assert np.mean(theirs[-3:]) == pytest.approx(np.mean(losses[-3:]), abs=0.5)
