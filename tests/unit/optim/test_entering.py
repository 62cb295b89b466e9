"""Building, dropping and loading an optimizer: what cannot work is refused by name, and runs go on."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from p2pavg import outline
from p2pavg.errors import ConfigurationError, IncompatiblePeerError, StateError
from p2pavg.optim.optimizer import CollaborativeOptimizer
from p2pavg.peer.peer import Peer
from p2pavg.rounds.training import copied
from tests.unit.optim.fake_swarm import FakeSwarm
from tests.unit.optim.test_optimizer import MAKERS, loss_of, net, swarm, vector, wrap

__all__ = ["swarm"]  # the fixture

REAL: dict[str, Any] = {"listen": "127.0.0.1:0", "initial_peers": [], "compression": "none"}


def real(model: nn.Module, make: str = "sgd", **more: Any) -> CollaborativeOptimizer:
    options = {"run_id": "entering", "target_batch_size": 4, "batch_size_per_step": 4} | REAL | more
    return CollaborativeOptimizer(MAKERS[make](model.parameters()), **options)


def test_a_second_optimizer_on_the_same_model_is_refused(swarm: FakeSwarm) -> None:
    """A cell run twice: the first optimizer is found, and the error says to close it."""
    model = net()
    opt = wrap(model)
    with pytest.raises(ConfigurationError, match=r"run 'test'.*opt\.close\(\)"):
        wrap(model)
    loss_of(model, [1, 2, 3, 4]).backward()
    opt.step()
    opt.close()
    again = wrap(model)
    model.zero_grad()
    loss_of(model, [1, 2, 3, 4]).backward()
    again.step()


@pytest.mark.parametrize("options", [{}, {"delay_updates": True}, {"buffers": "leader"}])
def test_a_dropped_optimizer_leaves(options: dict[str, Any]) -> None:
    """Without close(), an optimizer that nobody holds any more closes its peer and frees the parameters."""
    model = net()
    opt = real(model, **options)
    loss_of(model, [1, 2, 3, 4]).backward()
    opt.step()
    gone, peer = weakref.ref(opt), opt.peer
    del opt
    gc.collect()
    assert gone() is None
    deadline = time.monotonic() + 30
    while any(thread.name == "p2pavg-dropped" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(Exception, match="closed"):
        peer.start()
    assert all(param.grad is None for param in model.parameters())
    real(model, **options).close()


def test_a_dropped_optimizer_makes_room_before_it_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of an optimizer that nobody holds, and no collection has found yet, is wrapped anew, and only
    when all that the old one held is closed.
    """
    model, closed, close = net(), [], Peer.close
    monkeypatch.setattr(Peer, "close", lambda peer, *notice: (close(peer, *notice), closed.append(peer))[0])
    gc.disable()
    try:
        peer = real(model).peer
        opt = real(model)
    finally:
        gc.enable()
    assert closed == [peer]
    for _ in range(2):
        loss_of(model, [1, 2, 3, 4]).backward()
        opt.step()
    assert opt.epoch == 2
    opt.close()


def test_what_hides_an_optimizer_is_refused_by_name(swarm: FakeSwarm) -> None:
    """A wrapper around a wrapper, an AcceleratedOptimizer, meta parameters: one sentence each."""
    model = net()
    opt = wrap(model)
    with pytest.raises(ConfigurationError, match="CollaborativeOptimizer is a wrapper"):
        CollaborativeOptimizer(opt, "other", 8, 4)

    class AcceleratedOptimizer(torch.optim.SGD):
        """As accelerate's, by its name."""

    with pytest.raises(ConfigurationError, match=r"accelerator\.prepare"):
        wrap(net(), lambda params: AcceleratedOptimizer(params, lr=0.1))
    with torch.device("meta"):
        without = nn.Linear(3, 3)
    with pytest.raises(ConfigurationError, match="to_empty"):
        wrap(without)


def test_a_loaded_optimizer_is_wrapped_first(swarm: FakeSwarm) -> None:
    """An inner optimizer that has loaded a run's state_dict() is refused in that run, and free in another."""
    model = net()
    opt = wrap(model, target_batch_size=4)
    loss_of(model, [1, 2, 3, 4]).backward()
    opt.step()
    saved = copy.deepcopy(opt.state_dict())
    opt.close()
    inner = MAKERS["sgd"](net().parameters())
    inner.load_state_dict(saved)
    with pytest.raises(ConfigurationError, match=r"epoch 1 .*wrap first, then load_state_dict"):
        CollaborativeOptimizer(inner, "test", 4, 4)
    swarm.joined.clear()
    CollaborativeOptimizer(inner, "another", 4, 4).close()
    assert "p2pavg" not in inner.param_groups[0]
    fresh = net()
    fresh.load_state_dict(model.state_dict())
    swarm.joined.clear()
    resumed = wrap(fresh, target_batch_size=4)
    swarm.joined.clear()
    resumed.load_state_dict(saved)
    assert resumed.epoch == 1
    assert "p2pavg" not in resumed.param_groups[0]


@pytest.mark.parametrize("options", [{}, {"delay_updates": True}, {"offload_optimizer": True}])
def test_loading_the_present_state_changes_nothing(swarm: FakeSwarm, options: dict[str, Any]) -> None:
    """load_state_dict(state_dict()) keeps the peer, its place, its sums and its samples."""
    model = net()
    inner = MAKERS["adamw"](model.parameters())
    schedule = CosineAnnealingLR(inner, 10)
    opt = CollaborativeOptimizer(inner, "test", 8, 4, scheduler=schedule, compression="none", **options)
    for number in range(3):
        loss_of(model, [number, 1, 2, 3]).backward()
        opt.step()
    opt.state_dict()
    peer, rate = opt.peer, schedule.get_last_lr()
    sums = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    assert any(bool(total.any()) for total in sums)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert opt.peer is peer
    assert swarm.joined[0].samples() == 4
    assert len(swarm.joined) == 1
    assert schedule.get_last_lr() == rate
    for total, param in zip(sums, model.parameters(), strict=True):
        assert param.grad is not None
        assert torch.equal(total, param.grad)
    edited = copy.deepcopy(opt.state_dict())
    edited["param_groups"][0]["lr"] = 0.125
    opt.load_state_dict(edited)
    assert opt.param_groups[0]["lr"] == 0.125
    opt.close()


def stepped(params: list[torch.Tensor]) -> torch.optim.SGD:
    """An optimizer that has a momentum of each of these."""
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


STRANGE: dict[str, tuple[Any, str]] = {
    "nothing": ({}, "takes what state_dict"),
    "None": (None, "takes what state_dict"),
    "a model's": ({"weight": torch.ones(2)}, "takes what state_dict"),
    "groups of numbers": ({"param_groups": [1]}, "takes what state_dict"),
    "no groups": ({"param_groups": []}, "its groups have no parameters, here 4"),
    "another class": (lambda params: torch.optim.AdamW(params, lr=0.001), "no 'momentum', which SGD needs"),
    "fewer parameters": (lambda params: torch.optim.SGD(params[1:], lr=0.5), "have 3 parameters, here 4"),
    "more groups": (
        lambda params: torch.optim.SGD([{"params": [p]} for p in params], 0.5),
        "have 1, 1, 1, 1",
    ),
    "a damaged part": ({"p2pavg": 3}, "malformed"),
    "a part without a history": ({"p2pavg": {"epoch": 1}}, "malformed"),
    "other shapes": (
        lambda params: stepped([torch.zeros(9, *p.shape[1:]) for p in params]),
        "where a parameter is",
    ),
    "a damaged history": ({"p2pavg": {"history": "x", "epoch": 1}}, "malformed"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_state_dict_of_something_else_changes_nothing(name: str, swarm: FakeSwarm) -> None:
    """It is refused in one sentence, before the run is left, and before an option or a value is loaded."""
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = CollaborativeOptimizer(inner, "test", 4, 4)
    given, why = STRANGE[name]
    if callable(given):
        given = given(list(net().parameters())).state_dict()
    elif given and "p2pavg" in given:
        given = {**inner.state_dict(), **given}
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(StateError, match=why):
        opt.load_state_dict(given)
    assert opt.state_dict()["param_groups"] == before["param_groups"]
    assert len(swarm.joined) == 1
    loss_of(model, [1, 2, 3, 4]).backward()
    opt.step()
    assert opt.epoch == 1
    opt.close()


@pytest.mark.parametrize("make", ["sgd", "adamw"])
def test_a_plain_optimizers_state_is_loaded_with_a_warning(
    make: str, swarm: FakeSwarm, caplog: pytest.LogCaptureFixture
) -> None:
    """That of a training without p2pavg, or of an older torch, which knew fewer options: values are those."""
    alone = net()
    plain = MAKERS[make](alone.parameters())
    loss_of(alone, [1, 2, 3, 4]).backward()
    plain.step()
    saved = copy.deepcopy(plain.state_dict())
    saved["param_groups"][0]["lr"] = 0.0123
    del saved["param_groups"][0]["maximize"]
    model = net()
    opt = wrap(model, MAKERS[make], target_batch_size=4)
    swarm.joined.clear()
    with caplog.at_level(logging.WARNING):
        opt.load_state_dict(saved)
    assert "epoch, history, scheduler and extras are not in it" in caplog.text
    assert opt.epoch == 0
    assert opt.param_groups[0]["lr"] == 0.0123
    loss_of(model, [1, 2, 3, 4]).backward()
    opt.step()
    opt.close()


def test_loading_an_older_state_enters_by_all_known_members() -> None:
    """The first peer of a swarm, started without initial peers, finds the others again after a load."""
    models = [net(), net()]
    first = real(models[0])
    saved = copy.deepcopy(first.state_dict())
    second = real(models[1], initial_peers=[first.peer.address])
    loss_of(models[0], [0, 1, 2, 3]).backward()
    training = threading.Thread(target=first.step)
    training.start()
    for _ in range(200):
        if not training.is_alive():
            break
        loss_of(models[1], [4, 5, 6, 7]).backward()
        second.step()
    training.join(60)
    assert first.epoch >= 1
    first.load_state_dict(saved)
    assert len(first.peers) == 1
    assert first.epoch >= 1  # the swarm is further: its state wins
    assert torch.equal(vector(models[0]), vector(models[1]))
    first.close(0.0)
    second.close(0.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": nn.Linear(8, 5)}, r"parameter 0 is float32 \[4, 8\].* and float32 \[5, 8\]"),
        ({"model": nn.Linear(8, 4).double()}, r"parameter 0 is float32 \[4, 8\].* and float64 \[4, 8\]"),
        ({"make": "adamw"}, r"optimizer is SGD .* and AdamW"),
        ({"max_grad_norm": 1.0}, r"max_grad_norm is None .* and 1.0"),
        ({"scheduled": True}, r"scheduler is None .* and CosineAnnealingLR"),
        ({"model": nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, affine=False))}, r"buffer 0 is missing"),
    ],
    ids=["shape", "dtype", "optimizer", "clipping", "scheduler", "buffers"],
)
def test_what_differs_between_peers_is_named(change: dict[str, Any], words: str) -> None:
    """Two peers that do not fit: the error names the first thing that differs, on both sides."""
    first = real(nn.Linear(8, 4))
    try:
        change = dict(change)
        model = change.pop("model", nn.Linear(8, 4))
        inner = MAKERS[change.pop("make", "sgd")](model.parameters())
        schedule = CosineAnnealingLR(inner, 3) if change.pop("scheduled", False) else None
        address = first.peer.address
        with pytest.raises(IncompatiblePeerError, match=words):
            CollaborativeOptimizer(
                inner,
                "entering",
                4,
                4,
                scheduler=schedule,
                **REAL | {"initial_peers": [address]} | change,
            )
    finally:
        first.close(0.0)


def test_an_outline_comes_back() -> None:
    """Lines survive packing; too many different ones pack to nothing; junk unpacks to nothing."""
    lines = ["optimizer SGD", "group of 400"] + [f"parameter float32 [{n % 7}]" for n in range(400)]
    assert outline.unpack(outline.pack(lines)) == lines
    assert len(outline.pack(lines)) < 300
    assert outline.pack([str(hash(str(n))) for n in range(5000)]) == b""
    for junk in (b"", b"x" * 50, b"\x78\x9c" + b"y" * 30, None, 3, outline.pack(lines)[:-9]):
        assert outline.unpack(junk) == []


def test_the_first_difference_is_told_by_its_place() -> None:
    """Parameters are counted among parameters, and what one side lacks is missing there."""
    mine = ["optimizer SGD", "group of 2", "parameter a", "parameter b"]
    told = outline.first_difference
    assert told(mine, [*mine[:3], "parameter c"], "x", "y") == "parameter 1 is b at peer x and c at peer y"
    assert told(mine, mine[:3], "x", "y") == "parameter 1 is b at peer x and missing at peer y"
    assert (
        told(mine[:3], [*mine[:3], "buffer z"], "x", "y") == "buffer 0 is missing at peer x and z at peer y"
    )
    assert told(mine, mine, "x", "y") == ""
    assert told(mine, [], "x", "y") == ""


def test_reports_tell_the_bytes_of_the_state() -> None:
    """Parameters and both moments of Adam, as a donor would send them; known after the first epoch."""
    model, told = net(), list[int]()
    with real(model, "adamw", on_round=lambda report: told.append(report.state_bytes)) as opt:
        for ids in itertools.repeat([0, 1, 2, 3]):
            loss_of(model, ids).backward()
            opt.step()
            if any(told):
                break
        meta, buffers = copied(opt._state.snapshot())
    assert told[0] == 0
    tensors = sum(buffer.nbytes for buffer in buffers.values())
    assert tensors >= 3 * 4 * sum(param.numel() for param in model.parameters())
    assert tensors < told[-1] < tensors + 20_000  # what else is in it, as a few names and numbers
    assert meta


def stepped_net(make: Any, kind: torch.dtype = torch.float32) -> torch.optim.Optimizer:
    """An optimizer that has stepped, of a model of this dtype."""
    model = net().to(kind)
    optimizer: torch.optim.Optimizer = make(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("saved", "loads", "kind", "why"),
    [
        (torch.optim.Adam, torch.optim.AdamW, torch.float32, "decoupled_weight_decay is False"),
        (torch.optim.AdamW, torch.optim.Adam, torch.float32, "decoupled_weight_decay is True"),
        (torch.optim.Adam, torch.optim.Adamax, torch.float32, "it has 'amsgrad', which Adamax has not"),
        (torch.optim.Adam, torch.optim.RAdam, torch.float32, "it has 'amsgrad', which RAdam has not"),
        (torch.optim.NAdam, torch.optim.RAdam, torch.float32, "it has 'momentum_decay', which RAdam has not"),
        (torch.optim.AdamW, torch.optim.AdamW, torch.bfloat16, "float32 where a parameter is torch.bfloat16"),
    ],
)
def test_a_state_of_a_kin_class_or_dtype_is_refused_by_name(
    saved: Any, loads: Any, kind: torch.dtype, why: str, swarm: FakeSwarm
) -> None:
    """Classes whose options or states look alike, and a model of fewer digits than what was saved."""
    inner = stepped_net(loads, kind)
    opt = CollaborativeOptimizer(inner, "test", 4, 4)
    before = copy.deepcopy(inner.state_dict())
    with pytest.raises(StateError, match=why):
        opt.load_state_dict(stepped_net(saved).state_dict())
    assert str(inner.state_dict()) == str(before)
    opt.close()


def test_a_runs_state_of_another_dtype_is_refused_by_name(swarm: FakeSwarm) -> None:
    """Both are told: what was saved, and what is here."""
    first = CollaborativeOptimizer(stepped_net(torch.optim.AdamW), "test", 4, 4)
    saved = copy.deepcopy(first.state_dict())
    first.close()
    other = CollaborativeOptimizer(stepped_net(torch.optim.AdamW, torch.bfloat16), "test", 4, 4)
    with pytest.raises(StateError, match=r"AdamW, float32, and here .*, AdamW, bfloat16\)"):
        other.load_state_dict(saved)
    other.close()


def test_options_of_another_kind_that_a_state_brings_are_told(
    swarm: FakeSwarm, caplog: pytest.LogCaptureFixture
) -> None:
    """A state of the same class with amsgrad, for an optimizer without: what is loaded counts and is told."""
    plain = stepped_net(lambda params: torch.optim.AdamW(params, lr=0.5, amsgrad=True))
    opt = CollaborativeOptimizer(stepped_net(torch.optim.AdamW), "test", 4, 4)
    opt.load_state_dict(plain.state_dict())
    assert opt.param_groups[0]["amsgrad"] is True
    assert "built with (amsgrad False by True)" in caplog.text
    opt.close()
