"""The options of a peer: written once, and known to every class that takes them."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
import torch

from p2pavg import CollaborativeOptimizer, Peer
from p2pavg.errors import ConfigurationError
from p2pavg.optim.training_options import TrainingOptions
from p2pavg.peer.settings import PeerOptions, Settings


@pytest.mark.parametrize(("public", "options"), [(Peer, Settings), (CollaborativeOptimizer, TrainingOptions)])
def test_each_option_is_an_argument_and_is_described(public: type, options: type) -> None:
    """A constructor takes each field of its options, the shared ones too, and its docstring names each."""
    names = [option.name for option in fields(options)]
    assert {option.name for option in fields(PeerOptions)} <= set(names)
    assert set(inspect.signature(public).parameters) == set(names)
    for name in names:
        assert f"\n    {name}: " in (inspect.getdoc(public) or ""), name


def test_an_unknown_option_is_refused_by_name() -> None:
    """The error names the class that the user wrote, and the argument."""
    with pytest.raises(TypeError, match=r"^Peer: .*'colour'"):
        Peer("r", colour="red")  # type: ignore[call-arg]


def test_a_forgotten_argument_is_named_with_what_it_means() -> None:
    """Whichever is left out, with a node's group and without."""
    inner = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    with pytest.raises(ConfigurationError, match=r"^target_batch_size is missing: how many samples .* 4096"):
        CollaborativeOptimizer(inner, "r")
    told = r"^CollaborativeOptimizer: the argument 'run_id' is missing, the run's name$"
    with pytest.raises(TypeError, match=told):
        CollaborativeOptimizer(inner)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'optimizer' is missing, any first-order torch optimizer, already"):
        CollaborativeOptimizer(run_id="r", target_batch_size=4, node_group=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^Peer: the argument 'run_id' is missing, the training job's name$"):
        Peer(listen="127.0.0.1:0")  # type: ignore[call-arg]


def test_initial_peers_become_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text, several, or the environment's are parsed once; a malformed one is refused at once."""
    monkeypatch.setenv("P2PAVG_INITIAL_PEERS", "a.example:1, [2001:db8::7]:2")
    assert Settings("r").initial_addresses == (("a.example", 1), ("2001:db8::7", 2))
    assert Settings("r", initial_peers="10.0.0.5:3").initial_addresses == (("10.0.0.5", 3),)
    assert Settings("r", initial_peers=[]).initial_addresses == ()
    with pytest.raises(ConfigurationError, match="host:port"):
        Settings("r", initial_peers=["10.0.0.5"])


def test_a_launcher_names_a_peer_and_its_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the script names neither, the environment's words count; an empty one is none."""
    monkeypatch.setenv("P2PAVG_NAME", "lab")
    monkeypatch.setenv("P2PAVG_REGION", "eu-west")
    assert (Settings("r").label, Settings("r").region) == ("lab", "eu-west")
    assert (Settings("r", name="mine", region="us").label, Settings("r", region="us").region) == (
        "mine",
        "us",
    )
    monkeypatch.setenv("P2PAVG_REGION", "")
    assert Settings("r").region is None
