"""A loop with Accelerate in a run that others train too: save_state(), a killed process, load_state()."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from p2pavg import CollaborativeOptimizer
from tests.integrations.processes import BATCH, F32, Meeting, bits, net, run
from tests.integrations.tools import QUIET, inner_of, tensors

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(200)]

EPOCHS = 24
SAVED, KILLED = 4, 8


def peer(rank: int, peers: int, meeting: Meeting, folder: Path) -> tuple[F32, int, list[int]]:
    """Rank 0 trains all the while. Rank 1 saves, and dies later. Rank 2 is its next life. What is returned:
    the parameters, the epoch at which its loop began, and the attempts that each epoch took.
    """
    from accelerate import Accelerator

    named = meeting.first(rank)
    if rank == 2:
        meeting.together()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net()
    inner, schedule = inner_of(model)
    attempts: list[int] = []
    opt = CollaborativeOptimizer(
        inner,
        "runs",
        "step",
        initial_peers=named,
        scheduler=schedule,
        max_grad_norm=0.5,
        on_round=lambda report: attempts.append(report.attempts),
        **QUIET,
    )
    opt.samples_per_step = BATCH
    with opt:
        if rank == 0:
            meeting.there(opt, 1)
        loader = DataLoader(tensors(min(rank, 1), 2), batch_size=BATCH // 2, shuffle=True)
        model, prepared, loader = accelerator.prepare(model, opt, loader)
        if rank == 2:
            accelerator.load_state(folder / "saved")
            meeting.together()
        began, saved, called = opt.epoch, False, False
        while opt.epoch < EPOCHS:
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    accelerator.backward((model(inputs) - targets).square().mean())
                    prepared.step()
                    prepared.zero_grad()
                if opt.epoch == EPOCHS:
                    break
                if rank == 0 and opt.epoch >= KILLED + 2 and not called:
                    called = True
                    meeting.together()  # the third may come
                    meeting.together()  # it has come
                if rank == 1 and opt.epoch >= SAVED and not saved:
                    saved = True
                    accelerator.save_state(folder / "saved")
                if rank == 1 and opt.epoch >= KILLED:
                    os._exit(1)
        return bits(model), began, attempts


def test_a_killed_loop_goes_on_at_the_swarms_epoch(tmp_path: Path) -> None:
    """One of two in lockstep is killed, which costs the other at most one attempt. Its next process, which
    costs none, loads what Accelerate saved at an earlier epoch and begins where the other one is by then.
    Both end with equal bits.
    """
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    first, _, third = run(peer, 3, tmp_path, lost={1}, meets={0, 2})
    assert third[1] >= KILLED + 2
    assert np.array_equal(first[0], third[0])
    assert sum(first[2]) <= EPOCHS + 1
    assert third[2] == [1] * len(third[2])


def test_a_scaled_loss_trains_as_an_unscaled_one() -> None:
    """Accelerate's fp16: a GradScaler around the optimizer, and an inf that costs what the epoch had."""
    accelerate = pytest.importorskip("accelerate")
    ends = []
    for scaled in (False, True):
        accelerator = accelerate.Accelerator(cpu=True)
        model = net()
        inner, schedule = inner_of(model)
        with CollaborativeOptimizer(
            inner, "scaled", 2 * BATCH, BATCH, initial_peers=[], scheduler=schedule, **QUIET
        ) as opt:
            model, prepared = accelerator.prepare(model, opt)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
            if scaled:
                prepared = accelerate.optimizer.AcceleratedOptimizer(opt, scaler=scaler)
            for at, (inputs, targets) in enumerate(DataLoader(tensors(0, 1), batch_size=BATCH)):
                if at == 5 and not scaled:
                    continue  # the scaled loop loses it
                loss = (model(inputs) - targets).square().mean()
                if at == 5:
                    loss = loss * torch.inf
                (scaler.scale(loss) if scaled else loss).backward()
                prepared.step()
                prepared.zero_grad()
                if at == 4 and not scaled:
                    opt.discard()  # what the same epoch had before the inf
                if opt.epoch == 8:
                    break
            assert opt.epoch == 8
            ends.append(bits(model))
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-5, atol=1e-6)
