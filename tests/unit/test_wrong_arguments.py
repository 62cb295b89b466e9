"""Every public argument, given what it is not: p2pavg's own error of one sentence, or it works."""

from __future__ import annotations

import asyncio
import inspect
import math
import types
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2pavg import (
    CollaborativeOptimizer,
    Outer,
    P2PAvgError,
    Peer,
    StochasticInt8,
    SwarmSampler,
    SwarmShards,
)
from p2pavg.optim.process import company
from p2pavg.optim.training_options import TrainingOptions
from p2pavg.peer.settings import Settings
from p2pavg.peer.tensors import Call


def nothing(*_: Any) -> None:
    """A function where none is wanted."""


PLAIN = (None, True, "x", "", 3, -1, 0, 2.5, math.nan, math.inf, 1e300, 2**70, [], ["a:1"], {})
JUNK = (object(), b"x", [1], {"a": 1}, nothing, torch.zeros(2), types)
TAKES_JUNK = {("lengths", "[1]"), ("urls", "[1]")}  # (argument, value) that is no junk there


def options(**given: Any) -> TrainingOptions:
    inner = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1)
    return TrainingOptions(**{"optimizer": inner, "run_id": "r", "target_batch_size": 4, **given})


def shards(**given: Any) -> SwarmShards:
    return SwarmShards(**{"urls": ["a"], "lengths": [3], **given})


MAKERS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "CollaborativeOptimizer": (options, [f.name for f in fields(TrainingOptions) if f.name != "node_group"]),
    "Peer": (lambda **given: Settings(**{"run_id": "r", **given}), [f.name for f in fields(Settings)]),
    "Outer": (Outer, [f.name for f in fields(Outer)]),
    "StochasticInt8": (lambda **given: StochasticInt8(**{"seed": 1, **given}), ["seed", "epoch", "first"]),
    "SwarmSampler": (
        lambda **given: SwarmSampler(**{"length": 9, **given}),
        ["length", "seed", "block", "endless"],
    ),
    "SwarmShards": (shards, ["urls", "lengths", "seed", "piece"]),
}


def refusal(call: Callable[..., Any], *args: Any, **options: Any) -> str | None:
    """What the user is told; None: it works."""
    try:
        call(*args, **options)
    except P2PAvgError as error:
        return str(error)
    return None


def is_one_sentence(told: str | None) -> bool:
    return told is None or (0 < len(told) < 300 and "\n" not in told)


@pytest.mark.parametrize("public", MAKERS)
def test_an_argument_of_another_kind_is_refused_in_one_sentence(public: str) -> None:
    """No constructor raises another error than p2pavg's own, whatever it is given, and none takes silently
    what is no such thing.
    """
    make, arguments = MAKERS[public]
    for argument in arguments:
        for value in (*PLAIN, *JUNK):
            told = refusal(make, **{argument: value})
            assert is_one_sentence(told), (argument, value, told)
            wanted = (value is nothing and argument == "on_round") or (argument, repr(value)) in TAKES_JUNK
            if any(value is junk for junk in JUNK) and not wanted:
                assert told is not None, f"{public}({argument}={value!r}) was taken"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"listen": 3}, "listen must be a text or None, not 3"),
        ({"client_only": "no"}, "client_only must be True or False, not 'no'"),
        ({"initial_peers": [1]}, "initial_peers must be a list of texts, a text or None, not [1]"),
        ({"reports": True}, "reports must be a text, a path or None, not True"),
        ({"on_round": 3}, "on_round must be a function or None, not 3"),
        ({"credentials": b"secret"}, "credentials must be a text, a path or None, not bytes"),
        ({"region": "x" * 3 + "y", "metrics": 9}, "metrics must be a text or None, not 9"),
        (
            {"compression": None},
            "There is no compression None; choose one of none, fp16, bf16, int8, int4.",
        ),
    ],
)
def test_it_is_told_what_is_wanted(given: dict[str, Any], told: str) -> None:
    """The sentence names the argument, what it takes and what it got, but no secret."""
    assert refusal(Settings, run_id="r", **given) == told


def test_options_of_training_tell_what_they_take() -> None:
    """A flag, a path, a module, a dict of parts, and a group of ranks."""
    for name, kind in (
        ("delay_updates", "True or False"),
        ("checkpoint_dir", "a text, a path or None"),
        ("model", "a torch.Module or None"),
        ("extras", "a dict or None"),
    ):
        assert refusal(options, **{name: 3}) == f"{name} must be {kind}, not 3"
    inner = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1)
    told = refusal(CollaborativeOptimizer, inner, "r", 4, node_group=3)
    assert told is not None
    assert told.startswith("node_group must be a torch.distributed group")


BOUNDLESS = {  # what has no bound that a number could break
    "max_grad_norm",  # a huge one clips nothing, nor does infinity
}


@pytest.mark.parametrize("public", MAKERS)
def test_every_number_has_bounds(public: str, tmp_path: Path) -> None:
    """No argument takes a number that nothing could come of: infinity, 10**30, 1e300."""
    make, arguments = MAKERS[public]
    for argument in arguments:
        for value in (10**30, 10**5000, -(10**5000), 2**70, 1e300, math.inf, -math.inf, -1, math.nan, -2.5):
            told = refusal(make, **{argument: value})
            assert told is not None or argument in BOUNDLESS, f"{public}({argument}={value!r}) was taken"
    prices = tmp_path / "prices.toml"
    prices.write_text("[gb]\nworld = 0.1\n")
    assert refusal(options, max_egress_usd_per_hour=1.0, prices=prices) is None
    for limit in (10**30, 1e-300, math.inf, math.nan):
        assert "max_egress_usd_per_hour" in str(
            refusal(options, max_egress_usd_per_hour=limit, prices=prices)
        )


def test_more_overlap_than_an_outer_step_has_steps_is_refused() -> None:
    """Outer(overlap=) is at most the local steps that a peer alone takes between two averages, where they are
    known; sync_every is at most what samples can be counted.
    """
    given = {"target_batch_size": 64, "batch_size_per_step": 8}
    assert refusal(options, outer=Outer(overlap=8), **given) is None
    told = refusal(options, outer=Outer(overlap=9), **given)
    assert told is not None
    assert told.startswith("Outer(overlap=9) is more than the 8 local steps that an outer step has at most")
    assert refusal(options, outer=Outer(overlap=5, fragments=2), **given)
    given = {"target_batch_size": None, "batch_size_per_step": 8}
    assert refusal(options, outer=Outer(overlap=5, sync_every=4), **given)
    assert refusal(options, outer=Outer(overlap=4, sync_every=4), **given) is None
    told = refusal(options, outer=Outer(sync_every=10**9), target_batch_size=None, batch_size_per_step=10**9)
    assert told is not None
    assert "more than 1,000,000,000,000,000 samples between two averages" in told


@pytest.mark.parametrize(
    ("variable", "call"),
    [
        ("P2PAVG_PEERS", company.wanted),
        ("P2PAVG_MOST_PEERS", lambda: Settings("r")),
        ("P2PAVG_INITIAL_PEERS", lambda: Settings("r")),
    ],
)
def test_numbers_of_the_environment_have_bounds(
    variable: str, call: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that Python itself would not read is no traceback, and is not told in full."""
    for text in ("0", "-1", "x", "10.0.0.5:" + 5000 * "9", 5000 * "9"):
        monkeypatch.setenv(variable, text)
        told = refusal(call)
        assert told is not None
        assert told.startswith((f"{variable} must be a whole number from 1 to 10000", "'")), told


@pytest.mark.parametrize(
    ("extras", "told"),
    [
        ([1], "extras must be a dict or None, not [1]"),
        ({"a": 1}, "extras['a'] must have state_dict() and load_state_dict(), which 1 has not"),
        ({"a": torch.nn.Linear}, "extras['a'] must have state_dict() and load_state_dict(), which"),
        (
            {"a": types.SimpleNamespace(state_dict={}, load_state_dict={})},
            "extras['a'] must have state_dict()",
        ),
        ({3: torch.nn.ReLU()}, "a name in extras must be a text that does not begin with 'p2pavg.', not 3"),
        ({"p2pavg.sampler": torch.nn.ReLU()}, "a name in extras must be a text that does not begin with"),
    ],
)
def test_extras_have_names_and_a_state(extras: Any, told: str) -> None:
    """What could not be saved, or not by its name, is refused before a peer is started."""
    found = refusal(options, extras=extras)
    assert found is not None
    assert found.startswith(told)
    assert refusal(options, extras={"a": torch.nn.ReLU()}) is None


def test_a_peers_methods_take_nothing_else_either() -> None:
    """Whatever a method of `Peer` is given, the error is p2pavg's own, or that the peer was not started."""
    peer, ones = Peer("r", listen="127.0.0.1:0"), torch.ones(2)

    def all_reduce(*args: Any, **options: Any) -> None:
        asyncio.run(peer.all_reduce(ones, *args, **options))

    for value in (*PLAIN, *JUNK):
        tried = (
            refusal(peer.wait_for_peers, value, timeout=0.0),
            refusal(peer.wait_for_peers, 1, timeout=value),
            refusal(peer.set_target, value),
            refusal(all_reduce, value),
            refusal(all_reduce, group_size=value),
            refusal(all_reduce, timeout=value),
        )
        assert all(told is not None and is_one_sentence(told) for told in tried), (value, tried)
    for value in JUNK:
        assert "notice_s must be a number" in str(refusal(peer.close, value))


def test_tensors_that_cannot_hold_an_average_are_refused() -> None:
    """Elements that share memory, sparse tensors and such without values; strided ones are averaged."""
    one = torch.ones(1)
    for wrong, why in (
        (one.expand(3), "share memory"),
        (torch.ones(6).as_strided((2, 3), (1, 1)), "share memory"),
        (np.lib.stride_tricks.as_strided(np.ones(6, np.float32), (2, 3), (4, 4)), "share memory"),
        (torch.ones(3).to_sparse(), "torch.sparse_coo"),
        (torch.ones(3, device="meta"), "meta device"),
    ):
        assert why in str(refusal(Call, [torch.ones(2), wrong], 1.0, None, 1.0))
    for right in (torch.ones(3, 4).t(), torch.ones(4, 6)[::2, 1::3], np.ones((3, 4), np.float32)[::-1].T):
        assert refusal(Call, right, 1.0, None, 1.0) is None


def test_an_optimizers_methods_take_nothing_else_either() -> None:
    """Whatever a method of the loop is given, p2pavg's own error comes before anything is counted."""
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    with CollaborativeOptimizer(inner, "r", 64, 2, initial_peers=[], listen="127.0.0.1:0") as opt:
        model(torch.ones(2, 2)).sum().backward()
        for value in (*PLAIN, *JUNK):
            whole = type(value) is int
            if not callable(value) and value is not None:
                assert "step(batch_size=n)" in str(refusal(opt.step, value))
            if not whole and value is not None:
                assert refusal(opt.step, batch_size=value)
            if not whole:
                assert refusal(opt.scale_loss, torch.ones(()), value)
                assert refusal(setattr, opt, "samples_per_step", value)
            if not isinstance(value, torch.Tensor):
                assert "the loss" in str(refusal(opt.scale_loss, value, 2))
            assert "state_dict() of this optimizer" in str(refusal(opt.load_state_dict, value))
            assert is_one_sentence(refusal(opt.log, loss=value))
        opt.step()
        assert opt.noted == 2


def test_the_table_has_every_argument() -> None:
    """An argument that is added to a public constructor is tried, too."""
    for public, (_, tried) in MAKERS.items():
        own = {"CollaborativeOptimizer": TrainingOptions, "Peer": Settings}.get(public) or globals()[public]
        missing = set(inspect.signature(own).parameters) - set(tried) - {"node_group", "name", "wire_id"}
        assert not missing
