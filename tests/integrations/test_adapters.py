"""LoRA: only adapters travel, and a newcomer with another base is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from p2pavg import CollaborativeOptimizer
from p2pavg.errors import IncompatiblePeerError
from tests.integrations.processes import STEPS
from tests.integrations.tools import QUIET, inner_of, trainer_args
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


def test_a_newcomer_gets_the_adapters_alone(first: tuple[nn.Module, CollaborativeOptimizer]) -> None:
    """Who comes in the middle gets the state of the adapters, whose bytes are all that there are of it."""
    model, opt = first
    rows = torch.randn(4, 256, generator=torch.Generator().manual_seed(1))
    for _ in range(EPOCHS):
        model(rows).square().mean().backward()
        opt.step()
    newcomer, _ = adapted(0)
    assert not all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(model.parameters(), newcomer.parameters(), strict=True)
    )
    with wrap(newcomer, [opt.peer.address]) as second:
        assert second.epoch == EPOCHS
        for mine, theirs in zip(model.parameters(), newcomer.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    _, sections = opt._state.snapshot()
    adapters = sum(param.numel() for param in model.parameters() if param.requires_grad)
    assert sum(section.nbytes for section in sections.values()) == pytest.approx(4 * adapters, rel=0.1)


def test_another_base_is_refused(first: tuple[nn.Module, CollaborativeOptimizer]) -> None:
    """A newcomer whose frozen weights have other values gets an error that says so."""
    _, opt = first
    other, _ = adapted(5)
    with pytest.raises(IncompatiblePeerError, match="frozen parameters"):
        wrap(other, [opt.peer.address])


def test_adapters_in_bf16_with_checkpointing_train_as_with_trainer_alone(tmp_path: Path) -> None:
    """LoRA, bf16 and gradient checkpointing at once: the losses and adapters of Trainer without the swarm,
    and the base as it was.
    """
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    from p2pavg.hf import trainer_kwargs

    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    words = torch.randint(0, 64, (2 * STEPS, 16), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in words]

    def build() -> tuple[nn.Module, list[nn.Parameter]]:
        torch.manual_seed(0)
        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **size))
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(base, config)
        return model, [param for param in model.parameters() if param.requires_grad]

    args = trainer_args(tmp_path, bf16=True, gradient_checkpointing=True, per_device_train_batch_size=2)
    losses, ends = [], []
    for swarm in (False, True):
        model, adapters = build()
        frozen = [param.detach().clone() for param in model.parameters() if not param.requires_grad]
        inner, schedule = inner_of(adapters)
        if swarm:
            opt = CollaborativeOptimizer(
                inner, "lora", "step", initial_peers=[], scheduler=schedule, max_grad_norm=0.5, **QUIET
            )
            with opt:
                trainer = transformers.Trainer(model, train_dataset=rows, **trainer_kwargs(opt, args))
                trainer.train()
                assert opt.epoch == STEPS
        else:
            trainer = transformers.Trainer(model, args, train_dataset=rows, optimizers=(inner, schedule))
            trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        ends.append(torch.cat([param.detach().flatten() for param in adapters]))
        now = [param for param in model.parameters() if not param.requires_grad]
        assert all(torch.equal(before, after) for before, after in zip(frozen, now, strict=True))
    assert len(losses[0]) == STEPS
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-6, atol=1e-7)
