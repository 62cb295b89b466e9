from __future__ import annotations

import copy
import random
import time

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.swarm.trainers import KEY_BIASES, Job, Outcome, Trainers, flat, inner_of, loss_of, net

pytestmark = pytest.mark.swarm
EACH_VICTIM = (0, 2, 3, 5, 7)  # seeds by which each of three peers dies, early and late


def replay(outcomes: list[Outcome], optimizer: str, epochs: int) -> np.ndarray:
    """One process that takes, per epoch, all peers' samples as one batch.

    A microbatch that was late for its epoch (a busy machine) counts in the next, with its gradient as it was.
    """
    model = net()
    inner = inner_of(optimizer, model)
    scheduler = CosineAnnealingLR(inner, 40)
    versions = []
    for epoch in range(epochs):
        versions.append(copy.deepcopy(model))
        batches = [batch for outcome in outcomes for batch in outcome.counted.get(epoch, [])]
        total = sum(len(ids) for _, ids in batches)
        inner.zero_grad()
        for version in {computed_on for computed_on, _ in batches}:
            ids = [i for computed_on, batch in batches for i in batch if computed_on == version]
            loss = loss_of(versions[version], ids) * (len(ids) / total)
            params = list(versions[version].parameters())
            for param, grad in zip(model.parameters(), torch.autograd.grad(loss, params), strict=True):
                param.grad = grad if param.grad is None else param.grad + grad
        inner.step()
        scheduler.step()
    return flat(model)


def emulate(outcomes: list[Outcome], optimizer: str, epochs: int) -> np.ndarray:
    """One process that adds up the gradients of each peer's batches of an epoch, and averages the sums."""
    model = net(attentive=True)
    inner = inner_of(optimizer, model)
    scheduler = CosineAnnealingLR(inner, 40)
    versions = []
    for epoch in range(epochs):
        versions.append(copy.deepcopy(model))
        counts = [len(outcome.counted.get(epoch, [])) for outcome in outcomes]
        inner.zero_grad()
        for outcome, count in zip(outcomes, counts, strict=True):
            sums = [torch.zeros_like(param) for param in model.parameters()]
            for computed_on, ids in outcome.counted.get(epoch, []):
                params = list(versions[computed_on].parameters())
                for total, grad in zip(
                    sums, torch.autograd.grad(loss_of(versions[computed_on], ids), params), strict=True
                ):
                    total += grad
            for param, total in zip(model.parameters(), sums, strict=True):
                share = total / max(1, count) * (count / sum(counts))
                param.grad = share if param.grad is None else param.grad + share
        inner.step()
        scheduler.step()
    return flat(model)


def jobs(count: int, **changes: object) -> list[Job]:
    """Peers of uneven speed."""
    return [
        Job(rank, wait_for=count - 1, seconds=0.002 * (1 + rank), **changes)  # type: ignore[arg-type]
        for rank in range(count)
    ]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_peers_train_like_one_process(count: int, optimizer: str) -> None:
    """After 50 epochs the peers' parameters are those of one process that replays the same samples."""
    with Trainers() as trainers:
        trainers.start_all(jobs(count, optimizer=optimizer, epochs=50))
        outcomes = trainers.finish(range(count))
    alone = replay(outcomes, optimizer, 50)
    for outcome in outcomes:
        assert outcome.epoch == 50
        assert np.linalg.norm(outcome.params - alone) <= 1e-5 * np.linalg.norm(alone)
        assert np.array_equal(outcome.params, outcomes[0].params)


@pytest.mark.parametrize("optimizer", ["adamw", "rmsprop"])
def test_peers_train_like_their_sums_averaged_in_one_process(optimizer: str) -> None:
    """With attention, 50 epochs end where one process ends that averages the same sums.

    Key biases are left out: the loss does not depend on them, so their gradients are the rounding of whoever
    computes them, and these optimizers make whole steps of that. Between peers they are equal all the same.
    """
    with Trainers() as trainers:
        trainers.start_all(jobs(2, optimizer=optimizer, attentive=True, epochs=50))
        outcomes = trainers.finish(range(2))
    alone = emulate(outcomes, optimizer, 50)
    for outcome in outcomes:
        apart = outcome.params - alone
        apart[KEY_BIASES] = 0
        assert np.linalg.norm(apart) <= 1e-6 * np.linalg.norm(alone)
        assert np.array_equal(outcome.params, outcomes[0].params)


@pytest.mark.parametrize("offload", [False, True])
def test_delayed_peers_train_like_one_process_with_their_gradients(offload: bool) -> None:
    """Delayed peers apply exactly the gradients that they computed, at most one epoch old."""
    options = {"delay_updates": True, "offload_optimizer": offload}
    with Trainers() as trainers:
        trainers.start_all(jobs(3, optimizer="adamw", options=options))
        outcomes = trainers.finish(range(3))
    ages = {
        epoch - computed_on
        for outcome in outcomes
        for epoch, batches in outcome.counted.items()
        for computed_on, _ in batches
    }
    if not any(outcome.late for outcome in outcomes):  # a late contribution counts one epoch later still
        assert ages <= {0, 1}
    assert 1 in ages
    alone = replay(outcomes, "adamw", 20)
    for outcome in outcomes:
        assert np.linalg.norm(outcome.params - alone) <= 1e-5 * np.linalg.norm(alone)
        assert np.array_equal(outcome.params, outcomes[0].params)


def test_rates_set_by_each_loop_leave_peers_equal() -> None:
    """Loops that set the learning rate by their own steps, at uneven paces: the leader's value moves all."""
    with Trainers() as trainers:
        trainers.start_all(jobs(3, optimizer="adamw", rates=True, run_id="rates"))
        outcomes = trainers.finish(range(3))
    for outcome in outcomes:
        assert outcome.epoch == 20
        assert np.array_equal(outcome.params, outcomes[0].params)


@pytest.mark.parametrize("codec", ["none", "fp16", "bf16", "int8"])
def test_all_peers_hold_the_same_bits(codec: str) -> None:
    """With every codec the peers' parameters are equal to the bit after 20 epochs."""
    with Trainers() as trainers:
        trainers.start_all(jobs(3, codec=codec, optimizer="adamw"))
        outcomes = trainers.finish(range(3))
    assert not np.array_equal(outcomes[0].params, flat(net()))
    for outcome in outcomes[1:]:
        assert np.array_equal(outcome.params, outcomes[0].params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n in EACH_VICTIM else pytest.mark.long) for n in range(20)]
)
def test_survivors_finish_equal(seed: int) -> None:
    """Whichever peer is killed at whatever moment, the others finish with the same bits."""
    rng = random.Random(seed)
    victim, moment = rng.randrange(3), rng.uniform(0.0, 0.8)
    with Trainers() as trainers:
        trainers.start_all(jobs(3, optimizer="adamw", codec="fp16", target=96, run_id=f"kill-{seed}"))
        time.sleep(moment)
        assert not trainers.pipes[victim].poll(0), "the victim had finished before it was killed"
        trainers.processes[victim].kill()
        survivors = [rank for rank in range(3) if rank != victim]
        outcomes = trainers.finish(survivors)
    for outcome in outcomes:
        assert outcome.epoch == 20
        assert np.isfinite(outcome.params).all()
        assert np.array_equal(outcome.params, outcomes[0].params)


def test_a_dead_peer_in_the_table_does_not_hold_up_a_newcomer() -> None:
    """A trainer killed a moment ago is still announced; who joins then is in within a few seconds more than
    processes take to start here.
    """
    with Trainers() as trainers:
        began = time.monotonic()
        trainers.start_all([Job(rank, run_id="dead-peer", epochs=10_000, wait_for=2) for rank in range(3)])
        started_s = time.monotonic() - began
        first = trainers.addresses[0]
        trainers.processes[2].kill()
        trainers.processes[2].join(10)
        began = time.monotonic()
        trainers.start(Job(3, run_id="dead-peer", initial_peers=(first,)))
        assert time.monotonic() - began < started_s + 5
