"""A node of two ranks with outer steps, and a single peer that comes later, or was there first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from p2pavg import CollaborativeOptimizer, Outer
from tests.integrations.nodes import BATCH, RANKS, batch, group_of, loss_of, net
from tests.integrations.processes import F32, Meeting

LOCAL = 4  # steps of the first one alone between two outer steps
ALONE, END = 2, 5  # outer steps
LR, NORM, OUTER = 0.2, 0.5, Outer(lr=0.6, momentum=0.5)


@dataclass(frozen=True)
class Ended:
    """alone: parameters after the first ALONE outer steps, of those that made them. momenta, rate: of the
    inner optimizer when the other one had come.
    """

    alone: F32
    momenta: F32
    rate: float
    theta: F32
    epoch: int


def whole(tensors: list[torch.Tensor]) -> F32:
    full = [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in tensors]
    found: F32 = torch.cat([tensor.detach().flatten() for tensor in full]).numpy().copy()
    return found


def schedule(inner: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(inner, 3, 0.7)


def train(rank: int, peers: int, meeting: Meeting, kind: str, port: int, single_first: bool) -> Ended:
    """Rank 0 is the first one: of the node with rank 1 while rank 2 is single, or single before a node."""
    alone = int(single_first)  # ranks before those of the node
    place = rank - alone
    in_node = 0 <= place < RANKS
    model: nn.Module = net()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d):
            layer.eval()
    group, trained = group_of(model, kind, place, port) if in_node else (None, model)
    inner = torch.optim.SGD(trained.parameters(), lr=LR, momentum=0.9)
    leads = not in_node or place == 0
    early = rank == 0 or (in_node and not single_first)
    named = [] if early or not leads else meeting.first(rank)
    opt: Any = CollaborativeOptimizer(
        inner,
        "outer-node",
        LOCAL * BATCH * (1 if single_first else RANKS),
        BATCH,
        outer=OUTER,
        scheduler=schedule(inner),
        max_grad_norm=NORM,
        initial_peers=named,
        compression="none",
        listen="127.0.0.1:0",
        node_group=group,
    )
    params = list(trained.parameters())
    at = 0

    def until(epoch: int) -> None:
        nonlocal at
        while opt.epoch < epoch:
            loss_of(trained, batch(rank, at)).backward()
            opt.step()
            opt.zero_grad()
            at += 1

    moved = np.zeros(0, np.float32)
    if early:
        until(ALONE)
        moved = whole(params)
    if rank == 0:
        meeting.there(opt, 1)
    elif early or not leads:
        meeting.first(rank)
    meeting.together()
    momenta = whole([_state(opt, inner, param)["momentum_buffer"] for param in params])
    rate = inner.param_groups[0]["lr"]
    meeting.together()
    until(END)
    meeting.together()
    epoch = opt.epoch
    opt.close()
    theta = whole(params)
    if group is not None:
        dist.destroy_process_group()
    return Ended(moved, momenta, rate, theta, epoch)


def _state(opt: Any, inner: torch.optim.Optimizer, param: torch.Tensor) -> dict[str, Any]:
    """Of what steps this parameter: on a node's first rank another optimizer than the user's."""
    stepping = getattr(opt, "_stepping", inner)
    found: dict[str, Any] = stepping.state[param]
    return found
