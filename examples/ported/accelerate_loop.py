"""A loop with Accelerate: prepare, accumulate, backward. Ported by two lines."""

import torch
from _told import arguments, meet, mine, tell
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from p2pavg import CollaborativeOptimizer

args = arguments(__doc__)
steps, accumulation, batch_size = 10, 2, 8
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = LinearLR(inner, 1.0, 0.1, steps)
if not args.alone:  # these two lines were added, with scheduler= for those that join later
    optimizer = CollaborativeOptimizer(inner, "accelerate", "step", accumulation * batch_size // args.parts,
        initial_peers=args.initial_peers, scheduler=scheduler, compression="none")  # fmt: skip
    meet(optimizer, args)
model, prepared = accelerator.prepare(model, optimizer)

losses, rates, total = [], [], 0.0
for at in range(steps * accumulation):
    rows = mine(torch.randn(batch_size, 12, generator=torch.Generator().manual_seed(at)), args)
    with accelerator.accumulate(model):
        loss = (model(rows[:, :8]) - rows[:, 8:]).square().mean()
        accelerator.backward(loss)
        total += loss.item() / accumulation
        rate = inner.param_groups[0]["lr"]
        prepared.step()
        if args.alone and accelerator.sync_gradients:
            scheduler.step()
        prepared.zero_grad()
    if accelerator.sync_gradients:
        losses.append(total)
        rates.append(rate)
        total = 0.0
tell(accelerator.unwrap_model(model), losses, rates)
if not args.alone:
    optimizer.close()
