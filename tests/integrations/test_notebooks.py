"""A notebook: code without `if __name__`, under a loop that runs, with everything that loads and compiles."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.swarm.scripts import ROOT

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(200)]

CELLS = """
import asyncio, os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from p2pavg import CollaborativeOptimizer

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

def wrap(model, run):
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    words = {"initial_peers": [], "compression": "none", "listen": "127.0.0.1:0"}
    return CollaborativeOptimizer(inner, run, 8, 4, **words)

data = TensorDataset(torch.randn(32, 8, generator=torch.Generator().manual_seed(1)))

async def cell():
    ends = []
    for kind in ("plain", "before", "after"):  # when the model is compiled
        model = net()
        run = torch.compile(model, backend="aot_eager") if kind == "before" else model
        opt = wrap(run, "cell")
        other = net()  # of a GAN
        second = wrap(other, "another")
        if kind == "after":
            run = torch.compile(model, backend="aot_eager")
        context = {"plain": None, "before": "fork", "after": "spawn"}[kind]
        loader = DataLoader(data, batch_size=4, num_workers=0 if context is None else 1,
                            multiprocessing_context=context)
        for rows, in loader:
            run(rows).square().mean().backward()
            opt.step()
            if second.epoch < 1:
                other(rows).square().sum().backward()
                second.step()
        assert (opt.epoch, second.epoch) == (4, 1)
        ends.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
        opt.close()
        second.close()
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])
    assert not torch.equal(ends[0], torch.cat([param.detach().flatten() for param in net().parameters()]))

asyncio.run(cell())
print("trained")
"""


def test_a_notebook_loads_and_compiles_as_it_likes() -> None:
    """Forked and spawned loaders, torch.compile before and after wrapping, and two optimizers at a time: each
    way trains to the same bits.
    """
    found = subprocess.run(
        [sys.executable, "-c", CELLS], capture_output=True, text=True, cwd=ROOT, timeout=180, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == ["trained"]
