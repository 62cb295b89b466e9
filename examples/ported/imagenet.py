"""A loop as in the ImageNet example: passes over the data, StepLR after each, a smaller last batch, EMA."""

import copy

import torch
from _told import arguments, meet, mine, tell
from torch import nn
from torch.optim.lr_scheduler import StepLR

from p2pavg import CollaborativeOptimizer

args = arguments(__doc__)
epochs, batch_size = 3, 16

seed = torch.Generator().manual_seed(5)
images, labels = torch.randn(56, 3, 8, 8, generator=seed), torch.randint(0, 10, (56,), generator=seed)

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
ema = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
if not args.alone:  # these two lines were added
    optimizer = CollaborativeOptimizer(optimizer, "imagenet", "step", initial_peers=args.initial_peers,
        compression="none")  # fmt: skip
    meet(optimizer, args)
scheduler = StepLR(optimizer, step_size=1, gamma=0.5)

losses, rates = [], []
for _ in range(epochs):
    for index in torch.arange(len(images)).split(batch_size):
        own = mine(index, args)
        loss = nn.functional.cross_entropy(model(images[own]), labels[own])
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        rates.append(optimizer.param_groups[0]["lr"])
        if args.alone:
            optimizer.step()
        else:
            optimizer.step(batch_size=len(own))  # the last batch of a pass is smaller
        with torch.no_grad():
            for kept, param in zip(ema.parameters(), model.parameters(), strict=True):
                kept.lerp_(param, 0.1)
    scheduler.step()
tell(ema, losses, rates)
if not args.alone:
    optimizer.close()
