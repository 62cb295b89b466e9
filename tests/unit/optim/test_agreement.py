"""What beside the average makes steps equal on all peers, and what is said when something does not."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from p2pavg.data.sampler import SwarmSampler
from p2pavg.errors import ConfigurationError
from p2pavg.optim.optimizer import CollaborativeOptimizer
from p2pavg.optim.sample import ELEMENTS, Sample, of_copy, windows
from p2pavg.optim.training_state import TrainingState
from p2pavg.optim.tree import TreeWriter, unpack
from p2pavg.optim.updates import options
from p2pavg.optim.updates.overshoot import Overshoot
from p2pavg.rounds.state import snapshot
from p2pavg.rounds.training import Heal, State, SwappedError, copied
from tests.unit.optim.fake_swarm import FakeSwarm
from tests.unit.optim.test_optimizer import MAKERS, loss_of, net, swarm, vector, wrap

__all__ = ["swarm"]  # the fixture

Act = Callable[[CollaborativeOptimizer, nn.Module, int], None]


def train(
    swarm: FakeSwarm, acts: list[Act], epochs: int = 6, make: str = "sgd", **more: Any
) -> list[torch.Tensor]:
    """The parameters after `epochs` epochs of one peer for each act, which is called with its optimizer,
    model and step before every microbatch.
    """
    swarm.members = len(acts)
    models = [net() for _ in acts]
    ends: dict[int, torch.Tensor] = {}
    failures: list[BaseException] = []
    ready = threading.Barrier(len(acts))
    building = threading.Lock()

    def work(rank: int) -> None:
        try:
            model = models[rank]
            with building:
                while len(swarm.joined) < rank:
                    building.release()
                    building.acquire()
                opt = wrap(model, MAKERS[make], target_batch_size=8 * len(acts), **more)
            ready.wait(60)
            number = 0
            while opt.epoch < epochs:
                acts[rank](opt, model, number)
                loss_of(model, [100 * rank + 4 * number + i for i in range(4)]).backward()
                opt.step()
                number += 1
            ends[rank] = vector(model).clone()
            with swarm.condition:  # the others' last rounds go without it
                swarm.late.add(rank)
                if swarm.waiting and set(swarm.waiting) >= set(range(len(acts))) - swarm.late:
                    swarm.average()
            opt.close(0.0)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert not failures
    return [ends[rank] for rank in range(len(acts))]


def nothing(opt: CollaborativeOptimizer, model: nn.Module, number: int) -> None:
    """A plain loop."""


def by_iteration(speed: float) -> Act:
    def act(opt: CollaborativeOptimizer, model: nn.Module, number: int) -> None:
        for group in opt.param_groups:
            group["lr"] = 0.1 / (1 + speed * number)

    return act


def outside(opt: CollaborativeOptimizer, model: nn.Module, number: int) -> None:
    """A scheduler that the loop steps."""
    if not hasattr(opt, "outer"):
        opt.outer = CosineAnnealingLR(opt, 30)  # type: ignore[attr-defined]
    opt.outer.step()  # type: ignore[attr-defined]


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize(
    "acts",
    [[by_iteration(1.0), by_iteration(1.5)], [by_iteration(1.0), nothing], [outside, nothing, nothing]],
    ids=["both by iteration", "one by hand", "a scheduler in one loop"],
)
def test_the_leaders_options_move_all_peers(
    swarm: FakeSwarm, acts: list[Act], delayed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Learning rates set by loops of their own leave the peers equal, and each difference is told once."""
    first, *others = train(swarm, acts, delay_updates=delayed)
    for ends in others:
        assert torch.equal(ends, first)
    told = [r.getMessage() for r in caplog.records if "at the leader" in r.getMessage()]
    rates = [text for text in told if text.startswith("lr is")]
    assert len(rates) == len(acts) - 1
    assert all("scheduler=" in text and "opt.epoch" in text for text in rates)


def test_equal_loops_are_not_warned_about(swarm: FakeSwarm, caplog: pytest.LogCaptureFixture) -> None:
    """Peers that set the same rates by opt.epoch, and evaluate with other weights, hear nothing."""

    def act(opt: CollaborativeOptimizer, model: nn.Module, number: int) -> None:
        opt.param_groups[0]["lr"] = 0.1 / (1 + opt.epoch)
        saved = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for param in model.parameters():
                param.data.mul_(0.5)
            for param, value in zip(model.parameters(), saved, strict=True):
                param.data.copy_(value)

    first, second = train(swarm, [act, act])
    assert torch.equal(first, second)
    assert not caplog.records


def test_a_rate_set_while_a_round_is_under_way_is_for_the_next(swarm: FakeSwarm) -> None:
    """With delayed updates the leader's older value steps, and what the loop set since is kept."""
    model = net()
    opt = wrap(model, target_batch_size=4, delay_updates=True, delay_warmup_epochs=0)
    gate = threading.Event()
    swarm.before_arrival = lambda: gate.wait(60) and None
    loss_of(model, [0, 1, 2, 3]).backward()
    opt.step()
    opt.param_groups[0]["lr"] = 0.25
    gate.set()
    opt.state_dict()  # waits for the update
    assert opt.epoch == 1
    assert opt.param_groups[0]["lr"] == 0.25
    opt.close()


@pytest.mark.parametrize("delayed", [False, True])
def test_hooks_of_the_inner_optimizer_run_in_every_application(swarm: FakeSwarm, delayed: bool) -> None:
    """Weights clipped in a step hook stay equal on a peer that applies averages late."""
    model = net()
    inner = MAKERS["sgd"](model.parameters())
    calls: list[int] = []
    inner.register_step_post_hook(lambda *_: calls.append(1))
    opt = CollaborativeOptimizer(inner, "test", 4, 4, compression="none", delay_updates=delayed)
    for number in range(3):
        loss_of(model, [number]).backward()
        opt.step()
    opt.close(0.0)
    assert len(calls) == 3


def clamp(opt: CollaborativeOptimizer, model: nn.Module, number: int) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.05, 0.05)


def momentum(opt: CollaborativeOptimizer, model: nn.Module, number: int) -> None:
    for state in opt.state.values():
        if state.get("momentum_buffer") is not None:
            state["momentum_buffer"].zero_()


@pytest.mark.parametrize("act", [clamp, momentum])
def test_a_peer_that_parts_is_told(swarm: FakeSwarm, act: Act, caplog: pytest.LogCaptureFixture) -> None:
    """Code of one loop that changes weights or momentum: a digest tells, once, and names hooks."""
    first, second = train(swarm, [nothing, act])
    assert not torch.equal(first, second)
    told = [r.getMessage() for r in caplog.records if "not those of the leader" in r.getMessage()]
    assert len(told) == 1
    assert "register_step_post_hook" in told[0]
    assert "resync_epochs" in told[0]


def test_resync_makes_parted_peers_equal(swarm: FakeSwarm, caplog: pytest.LogCaptureFixture) -> None:
    """After the epoch that averages parameters a peer that had parted is equal again."""

    def once(opt: CollaborativeOptimizer, model: nn.Module, number: int) -> None:
        if number == 3:
            clamp(opt, model, number)

    first, second = train(swarm, [nothing, once], epochs=6, resync_epochs=3)
    assert torch.equal(first, second)
    assert any("not those of the leader" in record.getMessage() for record in caplog.records)


def test_equal_draws_are_told_once_whatever_is_mended(
    swarm: FakeSwarm, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer that began with the leader's samples hears of it once, however often parameters are averaged."""
    opt = wrap(model := net(), target_batch_size=8)
    loss_of(model, [0, 1, 2, 3]).backward()
    opt.step()
    agreement = opt._agreement
    assert agreement is not None
    leader = msgpack.packb(msgpack.unpackb(agreement.say()) | {"who": b"leader"})
    for _ in range(3):
        with agreement.heeded(leader, counted=True):
            pass
        agreement.mended()
    told = [r for r in caplog.records if "began with the same samples" in r.getMessage()]
    assert len(told) == 1


@pytest.mark.parametrize("options", [{}, {"delay_updates": True}, {"offload_optimizer": True}])
def test_code_after_step_is_told_to_a_lone_peer(
    swarm: FakeSwarm, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A loop that changes weights between steps is told once, even where nobody else is."""
    train(swarm, [clamp], **options)
    told = [r.getMessage() for r in caplog.records if "between two calls of step()" in r.getMessage()]
    assert len(told) == 1


def test_a_scheduler_stepped_in_the_loop_is_told(swarm: FakeSwarm, caplog: pytest.LogCaptureFixture) -> None:
    """scheduler= and scheduler.step() in the loop: one warning."""
    model = net()
    inner = MAKERS["sgd"](model.parameters())
    schedule = CosineAnnealingLR(inner, 100)
    opt = CollaborativeOptimizer(inner, "test", 4, 4, scheduler=schedule, compression="none")
    for number in range(4):
        loss_of(model, [number]).backward()
        opt.step()
        schedule.step()
    assert len(caplog.records) == 1
    assert "out of the loop" in caplog.records[0].getMessage()


@pytest.mark.parametrize("above", [True, False])
def test_averages_above_the_target_are_told(above: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Ten averages in a row that hold a quarter more than the target: one warning, with both numbers."""
    watch = Overshoot(256)
    for number in range(40):
        watch.saw(413 if above or number % 9 else 256)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (1 if above else 0)
    assert all("413" in text and "target_batch_size=256" in text for text in told)


def snapshot_of(state: TrainingState) -> dict[str, Any]:
    return copied(state.snapshot())[1]


@pytest.mark.parametrize("how", ["data.copy_", "copy_", "data ="])
def test_no_copy_of_swapped_weights(swarm: FakeSwarm, how: str) -> None:
    """While other weights stand in the model, however they got there, no copy is made; afterwards it is."""
    model = net()
    opt = wrap(model)
    state = swarm.joined[0].spec.state
    before = snapshot_of(state)
    params = list(model.parameters())
    kept = [p.detach().clone() for p in params]
    originals = [p.data for p in params]
    for param in params:
        if how == "data.copy_":
            param.data.copy_(param.data * 0.9)
        elif how == "copy_":
            with torch.no_grad():
                param.copy_(param * 0.9)
        else:
            param.data = param.data * 0.9
    with pytest.raises(SwappedError):
        snapshot_of(state)
    for param, value, original in zip(params, kept, originals, strict=True):
        if how == "data =":
            param.data = original
        else:
            param.data.copy_(value)
    assert all((before[name] == blob).all() for name, blob in snapshot_of(state).items())
    opt.close()


def test_a_checkpoint_that_is_due_while_weights_are_swapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An evaluation with other weights begins when a checkpoint is due: it holds the run's weights, and who
    resumes from it says so.
    """
    looked = threading.Event()
    nap = snapshot.time.sleep

    def looks_again(seconds: float) -> None:
        if seconds == snapshot.LOOK_S:
            looked.set()
        nap(seconds)

    monkeypatch.setattr(snapshot.time, "sleep", looks_again)
    model = net()
    params = list(model.parameters())

    def swap(*_: Any) -> None:
        """As early as can be: before the parameters' epoch is told to anybody."""
        for param in params:
            param.data.mul_(0.5)

    with wrap(
        model,
        target_batch_size=4,
        initial_peers=[],
        listen="127.0.0.1:0",
        checkpoint_dir=tmp_path,
        checkpoint_epochs=1,
    ) as opt:
        opt.register_step_post_hook(swap)
        loss_of(model, [0, 1, 2, 3]).backward()
        opt.step()
        assert looked.wait(60)
        for param in params:
            param.data.mul_(2.0)
        saved = opt._saving
        assert saved is not None
        deadline = time.monotonic() + 60
        while not saved.checkpoints.paths():
            assert time.monotonic() < deadline
            nap(0.01)
        found = saved.checkpoints.newest()
    assert found is not None
    assert found.state.epoch == 1
    with (
        caplog.at_level("INFO"),
        wrap(net(), initial_peers=[], listen="127.0.0.1:0", checkpoint_dir=tmp_path),
    ):
        assert f"resumed at epoch 1 from {tmp_path}" in caplog.messages
    written = unpack(found.state.meta["parameters"], found.state.buffers["parameters"])
    for value, param in zip(written, params, strict=True):
        assert torch.equal(value, param)


def test_swapped_says_so(swarm: FakeSwarm) -> None:
    """Inside opt.swapped() nothing is copied, nor was while it began; step() there is an error."""
    model = net()
    opt = wrap(model)
    state = swarm.joined[0].spec.state
    meta, sections = state.snapshot()
    with opt.swapped():
        with pytest.raises(SwappedError):
            state.snapshot()
        with pytest.raises(SwappedError):
            copied((meta, sections))
        loss_of(model, [0, 1, 2, 3]).backward()
        with pytest.raises(ConfigurationError, match="swapped"):
            opt.step()
    snapshot_of(state)


def test_windows_reach_everything() -> None:
    """Over epochs the sample looks at every tensor, and at elements all over a large one."""
    sizes = [5] * 200 + [0, 1, 100_000]
    seen: dict[int, set[int]] = {}
    for epoch in range(400):
        found = windows(sizes, epoch)
        assert len(found) <= 64
        for index, start, count in found:
            assert 0 < count <= ELEMENTS
            assert start + count <= sizes[index]
            seen.setdefault(index, set()).add(start * 10 // max(1, sizes[index]))
    assert set(seen) == {index for index, size in enumerate(sizes) if size}
    assert len(seen[202]) == 10


def test_a_sample_of_a_copy_is_that_of_the_tensors() -> None:
    """Whatever dtypes, strides and devices tensors have, their copied bytes give the same sample."""
    tensors = [
        torch.randn(7, 9),
        torch.randn(3, 4, 5, 5).to(memory_format=torch.channels_last),
        torch.randn(40).double(),
        torch.randn(6, 50).t(),
        torch.randn(33).bfloat16(),
        torch.zeros(0),
        torch.tensor(2.5),
    ]
    writer = TreeWriter()
    writer.pack(tensors)
    for epoch in range(5):
        assert of_copy(writer.bytes(), writer.places, epoch) == Sample(tensors, epoch).data


def strange_notes() -> Iterator[bytes]:
    yield from (b"", b"\xff" * 9, msgpack.packb([1]), msgpack.packb({"options": {}}))
    base = {"digest": b"d", "where": b"w"}
    for columns in ([], {"lr": 3}, {"lr": [1, 2, 3]}, {3: [1]}, {"lr": [{}]}, {"lr": [[[1]]]}):
        yield msgpack.packb({**base, "options": columns})


@pytest.mark.parametrize("note", list(strange_notes()))
def test_strange_notes_change_nothing(swarm: FakeSwarm, note: bytes) -> None:
    """A note that no peer of this version writes is not heeded, and the average is applied all the same."""
    model = net()
    opt = wrap(model, target_batch_size=4)
    arrive = swarm.joined[0].arrive

    def forged(contribution: Any) -> Any:
        outcome = arrive(contribution)
        if hasattr(outcome, "note"):
            object.__setattr__(outcome, "note", note)
        return outcome

    swarm.joined[0].arrive = forged  # type: ignore[method-assign]
    before = {k: v for k, v in opt.param_groups[0].items() if k != "params"}
    loss_of(model, [0, 1, 2, 3]).backward()
    opt.step()
    assert opt.epoch == 1
    assert {k: v for k, v in opt.param_groups[0].items() if k != "params"} == before


def test_what_was_said_before_the_last_contribution_is_no_measure(
    swarm: FakeSwarm, caplog: pytest.LogCaptureFixture
) -> None:
    """What a peer hands in as it leaves has no note, and may be in a round: the leader's note is of that one,
    and what this peer said is of an earlier one. Nobody is told that they differ.
    """
    opt = wrap(model := net(), target_batch_size=4)
    loss_of(model, [0, 1, 2, 3]).backward()
    opt.step()
    agreement = opt._update._shared.agreement  # type: ignore[attr-defined]
    told = msgpack.unpackb(agreement.say())
    told["digest"] = b"d" * 16
    told["options"]["lr"] = [0.25]
    agreement.say_nothing()
    with agreement.heeded(msgpack.packb(told), counted=True):
        assert opt.inner.param_groups[0]["lr"] == 0.25
    assert not caplog.records


def test_options_keep_their_types() -> None:
    """Tensors stay tensors, tuples tuples; what an option cannot hold is left out."""
    groups: list[dict[str, Any]] = [
        {"lr": torch.tensor(0.1), "betas": (0.9, 0.99), "nesterov": False, "name": "a", "eps": None},
        {"lr": torch.tensor(0.2), "betas": (0.9, 0.99), "nesterov": False, "name": "b", "eps": None},
    ]
    lr = groups[0]["lr"]
    assert options.columns(groups)["betas"] == [[0.9, 0.99]]
    options.apply(
        groups, {"lr": [0.5, 0.25], "betas": [[0.8, 0.9]], "nesterov": ["yes"], "name": [1.5], "more": [1]}
    )
    assert groups[0]["lr"] is lr
    assert lr.item() == 0.5
    assert groups[1]["lr"].item() == 0.25
    assert groups[0]["betas"] == (0.8, 0.9)
    assert (groups[0]["nesterov"], groups[0]["name"]) == (False, "a")
    assert "more" not in groups[0]


def test_a_healed_peer_starts_anew(swarm: FakeSwarm, caplog: pytest.LogCaptureFixture) -> None:
    """Loading the swarm's state is no change between steps, and resets what was told."""
    donor, model = net(), net()
    opt_donor = wrap(donor, target_batch_size=4)
    loss_of(donor, [0, 1, 2, 3]).backward()
    opt_donor.step()
    meta, buffers = copied(swarm.joined[0].spec.state.snapshot())
    swarm.joined.clear()
    opt = wrap(model, target_batch_size=8)
    loss_of(model, [0, 1, 2, 3]).backward()
    swarm.joined[0].outcomes.append(Heal(State(1, b"x", meta, buffers)))
    opt.step()
    assert opt.epoch == 1
    for _ in range(2):
        loss_of(model, [0, 1, 2, 3]).backward()
        opt.step()
    assert not caplog.records


@pytest.fixture(autouse=True)
def warnings_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


def test_samples_that_a_sampler_gave_out_are_not_compared(swarm: FakeSwarm) -> None:
    """With a sampler no peer says that it began with the leader's samples: the ledger finds those."""
    sampler = SwarmSampler(16, block=4)
    opt = wrap(model := net(), sampler=sampler)
    drawn = list(islice(sampler, 4))
    loss_of(model, drawn).backward()
    opt.step()
    assert msgpack.unpackb(opt._agreement.say())["drawn"] == b""
    opt.close()
