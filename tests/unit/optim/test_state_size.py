"""What reports say of the state that newcomers download."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from p2pavg.optim.optimizer import CollaborativeOptimizer
from p2pavg.rounds.training import copied
from tests.unit.optim.test_optimizer import loss_of, net


def test_reports_tell_the_bytes_of_the_state() -> None:
    """Parameters and both moments of Adam, as a donor would send them; known after the first epoch."""
    model, told = net(), list[Any]()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with CollaborativeOptimizer(
        inner, "weighed", 4, 4, listen="127.0.0.1:0", on_round=lambda report: told.append(report.state_bytes)
    ) as opt:
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
