"""A peer that trains with outer steps on batches that follow from its number, and tells all that happens to
it: `python -m tests.swarm.outer_peer NUMBER HOW OTHERS SECONDS FOLDER [ADDRESS]`.

It begins when it has links to so many others, and ends at the epoch that stands in FOLDER/last.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from p2pavg import CollaborativeOptimizer, Outer
from p2pavg.report import RoundReport

BATCH, TARGET, LR = 4, 240, 0.05
WAYS = {"dense": Outer(), "sparse": Outer(density=1 / 16)}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 4))


def loss_of(model: nn.Module, number: int, step: int, size: int = BATCH) -> torch.Tensor:
    """Of a peer's batch at one of its steps."""
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(1_000_003 * number + step))
    wanted = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin(), x[:, 3] - x[:, 4], x[:, 5].abs()], dim=1)
    return (model(x) - wanted).square().mean()


def tell(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")  # at once: two threads tell
    sys.stdout.flush()


def told(report: RoundReport) -> None:
    tell(
        epoch=report.epoch,
        members={member.peer: [member.weight, member.samples] for member in report.members},
        theta=report.extra.get("theta_sha256_low"),
        discarded=report.samples_discarded,
        plan=report.plan,
        stages=list(report.bytes_by_stage),
    )


def main() -> None:
    number, how, others, seconds, folder, *addresses = sys.argv[1:]
    last = Path(folder, "last")
    torch.set_num_threads(1)
    model = net()
    opt = CollaborativeOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR),
        "reference",
        TARGET,
        BATCH,
        compression="none" if how == "dense" else "fp16",
        outer=WAYS[how],
        listen="127.0.0.1:0",
        initial_peers=addresses,
        on_round=told,
    )
    tell(address=opt.peer.address, peer=opt.peer.peer_id.hex(), first=opt.epoch)
    opt.peer.wait_for_peers(int(others))
    step, epoch = 0, opt.epoch
    while not (last.exists() and opt.epoch >= int(last.read_text())):
        time.sleep(float(seconds))  # an accelerator computes
        loss_of(model, int(number), step).backward()
        opt.step()
        opt.zero_grad()
        step += 1
        if step % 5 == 0:
            tell(taken=step)
        if opt.epoch != epoch:
            tell(stands=opt.epoch, step=step)
            epoch = opt.epoch
    with opt.averaged():
        np.save(
            Path(folder, number),
            torch.cat([param.detach().flatten() for param in model.parameters()]).numpy(),
        )
    tell(ended=opt.epoch)
    opt.close(0)


if __name__ == "__main__":
    main()
