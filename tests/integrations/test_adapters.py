"""LoRA: only adapters travel, and a newcomer with another base is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from p2pavg import CollaborativeOptimizer
from p2pavg.errors import IncompatiblePeerError
from tests.integrations.tools import QUIET
from tests.swarm.test_one_process import together

pytestmark = pytest.mark.swarm

EPOCHS = 3
BASE = 2 * 256 * 256


def adapted(base_seed: int) -> tuple[nn.Module, Any]:
    """A model of which LoRA's adapters train, and their names as peft has them."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(base_seed)
    base = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Tanh(), nn.Linear(256, 256, bias=False))
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights="gaussian")
    return peft.get_peft_model(base, config), base


def wrap(model: nn.Module, peers: list[str]) -> CollaborativeOptimizer:
    trains = [param for param in model.parameters() if param.requires_grad]
    inner = torch.optim.SGD(trains, lr=0.1)
    return CollaborativeOptimizer(inner, "lora", "step", 4, initial_peers=peers, **QUIET)


@pytest.fixture
def first() -> Iterator[tuple[nn.Module, CollaborativeOptimizer]]:
    model, _ = adapted(0)
    opt = wrap(model, [])
    yield model, opt
    opt.close(0.0)


def test_only_adapters_travel(first: tuple[nn.Module, CollaborativeOptimizer]) -> None:
    """A round moves the bytes of the adapters, a fraction of the base's, and leaves the base as it was."""
    model, opt = first
    base = [param.detach().clone() for param in model.parameters() if not param.requires_grad]
    newcomer, _ = adapted(0)
    with wrap(newcomer, [opt.peer.address]) as second:
        opt.peer.wait_for_peers(1, timeout=60)

        def train(model: nn.Module, opt: CollaborativeOptimizer, seed: int) -> None:
            rows = torch.randn(4, 256, generator=torch.Generator().manual_seed(seed))
            for _ in range(EPOCHS):
                model(rows).square().mean().backward()
                opt.step()

        together([lambda: train(model, opt, 1), lambda: train(newcomer, second, 2)])
        report = opt.last_report
        assert report is not None
        adapters = sum(param.numel() for param in model.parameters() if param.requires_grad)
        assert len(report.members) == 2
        assert 4 * adapters <= report.bytes_sent < 4 * BASE / 8
        for mine, theirs in zip(model.parameters(), newcomer.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    now = [param for param in model.parameters() if not param.requires_grad]
    assert all(torch.equal(before, after) for before, after in zip(base, now, strict=True))


def test_another_base_is_refused(first: tuple[nn.Module, CollaborativeOptimizer]) -> None:
    """A newcomer whose frozen weights have other values gets an error that says so."""
    _, opt = first
    other, _ = adapted(5)
    with pytest.raises(IncompatiblePeerError, match="frozen parameters"):
        wrap(other, [opt.peer.address])
