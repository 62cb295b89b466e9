"""A machine that is suspended and comes back."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

from p2pavg import CollaborativeOptimizer
from tests.swarm.trainers import BATCH, DEADLINE_S, Job, Trainers, flat, inner_of, loss_of, net

pytestmark = [pytest.mark.swarm, pytest.mark.slow]

SUSPENDED_S = 10.0
AFTER = 20  # epochs that all train together once the suspended peer is back


def train(job: Job, pipe: Connection) -> None:
    """Trains until told how far; tells when it is under way, and where it ended."""
    torch.set_num_threads(1)
    model = net()
    opt = CollaborativeOptimizer(
        inner_of(job.optimizer, model),
        job.run_id,
        job.target,
        BATCH,
        initial_peers=job.initial_peers,
        compression=job.codec,
        listen="127.0.0.1:0",
        **job.options,
    )
    pipe.send(opt.peer.address)
    pipe.recv()
    told, last, drawn = False, 1 << 30, job.rank * 1_000_000
    deadline = time.monotonic() + DEADLINE_S
    while opt.epoch < last:
        assert time.monotonic() < deadline, f"epoch {opt.epoch} of {last} at the deadline"
        drawn += BATCH
        time.sleep(job.seconds)
        loss_of(model, list(range(drawn, drawn + BATCH))).backward()
        opt.step()
        if not told and opt.epoch >= 3:
            told = True
            pipe.send("under way")
        if pipe.poll():
            if pipe.recv() == "where":
                pipe.send(opt.epoch)
            else:
                last = opt.epoch + AFTER
    opt._update.settle()
    pipe.send((flat(model), opt.epoch))
    pipe.recv()
    opt.close(0.0)


@pytest.mark.parametrize("options", [{}, {"delay_updates": True}], ids=["waiting", "delayed"])
def test_a_suspended_peer_heals(options: dict[str, bool]) -> None:
    """The others train on while one is stopped for ten seconds; then it heals and trains along."""
    with Trainers() as trainers:
        jobs = [Job(rank, seconds=0.02, run_id="suspended", options=dict(options)) for rank in range(3)]
        for job in jobs:
            job.initial_peers = tuple(trainers.addresses[:1])
            trainers.launch(train, job)
        for pipe in trainers.pipes:
            pipe.send("go")
        for rank in range(3):
            assert trainers.receive(rank) == "under way"
        trainers.pipes[0].send("where")
        before = trainers.receive(0)
        stopped = trainers.processes[2].pid
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(SUSPENDED_S)  # the fault itself
        trainers.pipes[0].send("where")
        meanwhile = trainers.receive(0)
        os.kill(stopped, signal.SIGCONT)
        assert meanwhile >= before + 5, "the others did not go on"
        trainers.pipes[2].send("where")
        assert trainers.receive(2) >= 3
        for pipe in trainers.pipes:
            pipe.send("end")
        ends = [trainers.receive(rank) for rank in range(3)]
        for pipe in trainers.pipes:
            pipe.send("done")
    assert min(epoch for _, epoch in ends) >= meanwhile
    by_epoch: dict[int, list[np.ndarray]] = {}
    for params, epoch in ends:
        by_epoch.setdefault(epoch, []).append(params)
    for same in by_epoch.values():
        assert all(np.array_equal(same[0], other) for other in same[1:])
    for params, _ in ends:
        assert np.isfinite(params).all()
        assert np.linalg.norm(params - ends[0][0]) <= 0.5 * np.linalg.norm(ends[0][0])
