"""A node of two ranks and single peers, over gloo: what each ends with."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from p2pavg import CollaborativeOptimizer
from tests.integrations.processes import F32, Meeting, bits

STEPS = 6
BATCH = 4
RANKS = 2


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 33), nn.BatchNorm1d(33, affine=False), nn.Tanh(), nn.Linear(33, 5))


def batch(member: int, at: int) -> torch.Tensor:
    return torch.randn(BATCH, 9, generator=torch.Generator().manual_seed(100 * member + at))


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(rows).square().sum(dim=1).mean()
    return found


def group_of(model: nn.Module, kind: str, rank: int, port: int) -> tuple[Any, nn.Module]:
    """This process as a rank of the node: the node's group, and the model as its ranks train it."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo")
    if kind in ("ddp", "delayed"):
        return dist.group.WORLD, nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in (model[0], model[3]):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    return dist.group.WORLD, fully_shard(model, mesh=mesh)


def train(rank: int, peers: int, meeting: Meeting, kind: str, port: int, dies: int | None) -> F32:
    """Ranks 0 and 1 are the node, others single peers; `kind` is how the node's ranks train together.
    dies: the step before which its second rank ends.
    """
    group: Any = None
    model: nn.Module = net()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d):
            layer.eval()  # statistics of a batch differ between one process and several
    trained = model
    if rank < RANKS and kind != "single":
        group, trained = group_of(model, kind, rank, port)
    inner = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9)
    leads = rank == 0 or group is None
    named = meeting.first(rank) if leads else []
    behind = kind == "delayed"
    opt: Any = CollaborativeOptimizer(
        inner,
        "node",
        4 * BATCH * peers if behind else "step",
        BATCH,
        delay_updates=behind,
        initial_peers=named,
        compression="none",
        listen="127.0.0.1:0",
        node_group=group,
    )
    if leads:
        meeting.there(opt, peers - RANKS)
    else:
        meeting.first(rank)
    meeting.together()
    at = 0
    try:
        while opt.epoch < STEPS:
            if rank == 1 and at == dies:
                os._exit(1)
            for half in batch(rank, at).chunk(2):
                (loss_of(trained, half) / 2).backward()
            opt.step(batch_size=BATCH)
            opt.zero_grad()
            at += 1
            assert behind or opt.stepped
            assert behind or opt.epoch == at
    except RuntimeError:  # gloo's, when the other rank is gone
        assert rank == 0
        assert dies is not None
        opt.close()
        return np.zeros(0, np.float32)
    if dies is None:
        meeting.together()
    if kind == "fsdp" and group is not None:
        whole = [param.full_tensor() for param in trained.parameters()]  # type: ignore[attr-defined]
        found = torch.cat([param.detach().flatten() for param in whole]).numpy().copy()
    else:
        found = bits(model)
    opt.close()
    if group is not None:
        dist.destroy_process_group()
    return found
