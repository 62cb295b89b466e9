"""A loop as in nanoGPT: the learning rate by iteration, accumulation, clipping. Ported by two lines."""

import math

import torch
from _told import arguments, meet, mine, tell
from torch import nn

from p2pavg import CollaborativeOptimizer

args = arguments(__doc__)
max_iters, warmup_iters, learning_rate, min_lr = 12, 3, 1e-2, 1e-3
accumulation, batch_size, grad_clip, window = 2, 8, 1.0, 16

torch.manual_seed(1337)
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
if not args.alone:  # these two lines were added, and clip_grad_norm_ below is max_grad_norm= here
    optimizer = CollaborativeOptimizer(optimizer, "nanogpt", "step", batch_size * accumulation // args.parts,
        initial_peers=args.initial_peers, max_grad_norm=grad_clip, compression="none")  # fmt: skip
    meet(optimizer, args)


def get_batch(at: int) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(0, 64, (batch_size, window + 1), generator=torch.Generator().manual_seed(at))
    rows = mine(text, args)
    return rows[:, :-1], rows[:, 1:]


def get_lr(it: int) -> float:
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


losses, rates = [], []
for iter_num in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    total = 0.0
    for micro_step in range(accumulation):
        x, y = get_batch(accumulation * iter_num + micro_step)
        logits = model(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()) / accumulation
        total += loss.item()
        loss.backward()
    if args.alone:
        nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    losses.append(total)
    rates.append(optimizer.param_groups[0]["lr"])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
tell(model, losses, rates)
if not args.alone:
    optimizer.close()
