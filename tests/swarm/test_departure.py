from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from tests.swarm.departing import (
    Account,
    Plan,
    come_and_go,
    stay,
    train_until_interrupted,
    train_until_terminated,
)
from tests.swarm.trainers import Trainers

pytestmark = pytest.mark.swarm


def balance(staying: list[Account], departing: list[Account]) -> None:
    """No leave lost samples but the last peer's, which nobody could inherit from, and all are accounted for.

    staying: in the order in which they left; the last one was alone then. On a busy machine a peer may be
    left behind by an epoch and lose samples that way; it names them.
    """
    averaged: dict[int, int] = {}
    for account in staying:
        averaged |= account.averaged
    last = staying[-1]
    assert sorted(averaged) == list(range(last.epoch))
    for account in [*staying[:-1], *departing]:
        assert "left" not in account.why
    everybody = [*staying, *departing]
    discarded = sum(account.discarded for account in everybody)
    assert sum(account.produced for account in everybody) == sum(averaged.values()) + discarded


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("leaves", [2, pytest.param(25, marks=pytest.mark.long)])
@pytest.mark.parametrize("options", [{}, {"delay_updates": True}], ids=["waiting", "delayed"])
def test_leaving_loses_no_sample(options: dict[str, object], leaves: int) -> None:
    """Four peers join and leave many times each: every sample is in one average, and the averages fit."""
    run = f"leaves-{len(options)}"
    with Trainers() as trainers:
        plan = Plan(run, 400, options=options)
        address = trainers.launch(stay, plan)
        trainers.launch(stay, replace(plan, initial_peers=(address,)))
        for seed in range(4):
            plan = replace(plan, leaves=leaves, initial_peers=(address,), seed=seed)
            trainers.launch(come_and_go, plan)
        departing = [trainers.receive(rank, 550.0) for rank in range(2, 6)]
        staying = []
        for rank in (1, 0):
            trainers.pipes[rank].send("stop")
            staying.append(trainers.receive(rank))
    balance(staying, departing)
    assert staying[-1].epoch > 5
    assert staying[-1].weight == pytest.approx(-staying[-1].epoch, rel=1e-4)


def test_nothing_is_left_behind() -> None:
    """After close() no thread, socket or temporary file of ours is left, and the others see the peer gone."""
    with Trainers() as trainers:
        address = trainers.launch(stay, Plan("tidy"))
        trainers.launch(stay, Plan("tidy", initial_peers=(address,)))
        trainers.pipes[1].send("stop")
        first = trainers.receive(1)
        trainers.pipes[0].send("stop")
        second = trainers.receive(0)
    for account in (first, second):
        assert account.threads == []
        assert account.sockets == 0
        assert account.files == []
    balance([first, second], [])


def test_sigterm_leaves_in_order() -> None:
    """SIGTERM in the middle of training: the samples are handed over, the process ends with code 143."""
    with Trainers() as trainers:
        address = trainers.launch(stay, Plan("sigterm", target=100_000))
        trainers.launch(train_until_terminated, Plan("sigterm", 100_000, initial_peers=(address,)))
        assert trainers.receive(1) == "trains"
        pid = trainers.processes[1].pid
        os.kill(pid, signal.SIGTERM)
        departing = trainers.receive(1)
        trainers.processes[1].join(20)
        assert trainers.processes[1].exitcode == 143
        trainers.pipes[0].send("stop")
        stayer = trainers.receive(0)
    assert departing.produced > 0
    assert departing.discarded == 0
    assert stayer.discarded == departing.produced + stayer.produced


def test_an_interrupt_leaves_in_order() -> None:
    """Ctrl-C in the middle of a backward(), with the README's handler for it: the step ends, all samples are
    handed over, and the process ends as the handler says.
    """
    with Trainers() as trainers:
        address = trainers.launch(stay, Plan("sigint", target=100_000))
        trainers.launch(train_until_interrupted, Plan("sigint", 100_000, initial_peers=(address,)))
        departing = trainers.receive(1)
        trainers.processes[1].join(20)
        assert trainers.processes[1].exitcode == 130
        trainers.pipes[0].send("stop")
        stayer = trainers.receive(0)
    assert departing.produced == 5 * 4
    assert departing.discarded == 0
    assert stayer.discarded == departing.produced + stayer.produced


def test_samples_that_nobody_takes_are_named() -> None:
    """The only peer of a run leaves: its last report names what it had accumulated."""
    with Trainers() as trainers:
        trainers.launch(stay, Plan("alone", target=1000))
        trainers.pipes[0].send("stop")
        account = trainers.receive(0)
    balance([account], [])
    assert account.produced % 1000 == account.discarded
