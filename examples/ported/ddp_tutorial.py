"""The toy of DistributedDataParallel's tutorial, with its process group, wrapper and sampler deleted."""

import torch
from _told import arguments, meet, mine, tell
from torch import nn

from p2pavg import CollaborativeOptimizer

args = arguments(__doc__)


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))


torch.manual_seed(0)
model = ToyModel()
loss_fn = nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
if not args.alone:  # these two lines were added
    optimizer = CollaborativeOptimizer(optimizer, "ddp-tutorial", "step", 20 // args.parts,
        initial_peers=args.initial_peers, compression="none")  # fmt: skip
    meet(optimizer, args)

losses, rates = [], []
for step in range(10):
    optimizer.zero_grad()
    rows = mine(torch.randn(20, 15, generator=torch.Generator().manual_seed(step)), args)
    loss = loss_fn(model(rows[:, :10]), rows[:, 10:])
    loss.backward()
    losses.append(loss.item())
    rates.append(optimizer.param_groups[0]["lr"])
    optimizer.step()
tell(model, losses, rates)
if not args.alone:
    optimizer.close()
