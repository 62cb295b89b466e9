"""Lightning in a run that others train too: a newcomer, a killed process, its checkpoint."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.integrations.processes import BATCH, F32, Meeting, bits, net, run
from tests.integrations.tools import QUIET, inner_of, lightning_trainer, tensors

pytestmark = [pytest.mark.swarm, pytest.mark.long, pytest.mark.timeout(400)]

EPOCHS = 24
SAVED, KILLED = 4, 8


def peer(
    rank: int, peers: int, meeting: Meeting, folder: Path, resumes: bool
) -> tuple[F32, int, list[int], list[float]]:
    """Rank 0 trains all the while. Rank 1 dies. Rank 2 comes when that is dead: as its next life with its
    checkpoint, or as a newcomer. What is returned: parameters, `global_step` when training began, and by
    batch the swarm's epoch and the loss.
    """
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.callbacks import ModelCheckpoint

    from p2pavg.lightning import CollaborativeStrategy

    losses: list[float] = []
    epochs: list[int] = []
    ended: list[F32] = []
    began: list[int] = []

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = (self.net(batch[0]) - batch[1]).square().mean()
            losses.append(float(loss.detach()))
            epochs.append(self.trainer.strategy.optimizer.epoch)
            return loss

        def on_train_end(self) -> None:
            ended.append(bits(self))

        def configure_optimizers(self) -> Any:
            inner, schedule = inner_of(self)
            return {"optimizer": inner, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Turns(Callback):
        called = False

        def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
            began.append(trainer.strategy.optimizer.epoch)
            if rank == 0:
                meeting.there(trainer.strategy.optimizer, 1)
            if rank == 2:
                meeting.together()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            assert trainer.global_step == trainer.strategy.optimizer.epoch
            if rank == 0 and trainer.global_step >= KILLED + 2 and not self.called:
                self.called = True
                meeting.together()  # the third may come
                meeting.together()  # it has come
            if rank == 1 and trainer.global_step >= KILLED:
                os._exit(1)

    named = meeting.first(rank)
    if rank == 2:
        meeting.together()
    strategy = CollaborativeStrategy("runs", "step", initial_peers=named, **QUIET)
    keeps = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    trainer = lightning_trainer(
        folder,
        strategy=strategy,
        max_steps=EPOCHS,
        enable_checkpointing=rank == 1,
        callbacks=[Turns(), *([keeps] if rank == 1 else [])],
    )
    loader = DataLoader(tensors(min(rank, 1), 2), batch_size=BATCH, shuffle=True)
    saved = folder / f"step={SAVED}.ckpt" if rank == 2 and resumes else None
    trainer.fit(Module(), loader, ckpt_path=saved, weights_only=False)
    assert trainer.global_step == EPOCHS
    return ended[0], began[0], epochs, losses


@pytest.mark.parametrize("resumes", [True, False])
def test_who_comes_in_the_middle_goes_on_at_the_swarms_epoch(resumes: bool, tmp_path: Path) -> None:
    """One of two in lockstep is killed. Its next process, with the checkpoint of an earlier epoch, or a
    newcomer without one, begins where the other one is by then, and both end with equal bits, on its curve.
    """
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    first, _, third = run(peer, 3, tmp_path, resumes, lost={1}, meets={0, 2})
    assert (tmp_path / f"step={SAVED}.ckpt").exists()
    assert third[1] >= KILLED + 2
    assert min(third[2]) >= KILLED + 2
    assert max(third[2]) == max(first[2]) == EPOCHS - 1
    assert np.array_equal(first[0], third[0])
    assert np.mean(third[3][-4:]) == pytest.approx(np.mean(first[3][-4:]), abs=0.5)
