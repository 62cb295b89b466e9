"""Handwritten digits, in forty lines: run it in two terminals, and both train one model.

python examples/digits.py                              # prints its address
python examples/digits.py --initial-peers HOST:PORT    # in the other terminal, or on another machine
"""

import argparse
import os
import signal
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

from p2pavg import CollaborativeOptimizer

parser = argparse.ArgumentParser()
parser.add_argument("--initial-peers", nargs="*")
parser.add_argument("--epochs", type=int, default=500)
args = parser.parse_args()
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))  # Ctrl-C leaves the run

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)

torch.set_num_threads(1)  # several peers may share this machine's cores
torch.manual_seed(0)  # all peers start from the same weights ...
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
torch.manual_seed(int.from_bytes(os.urandom(4), "big"))  # ... and each draws its own samples

with CollaborativeOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    run_id="digits",
    target_batch_size=1024,  # samples per epoch, over all peers
    batch_size_per_step=32,
    initial_peers=args.initial_peers,
    on_round=lambda report: print(f"epoch {report.epoch}, peers: {len(report.members)}", flush=True),
) as opt:
    join = f"python {sys.argv[0]} --epochs {args.epochs} --initial-peers {opt.peer.address}"
    print(f"join with: {join}", flush=True)
    if not args.initial_peers:
        print("training begins when somebody joins, or when you press Enter", flush=True)
        opt.peer.wait_for_peers(1, enter=True)
    while opt.epoch < args.epochs:
        chosen = torch.randint(0, 1500, (32,))
        nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        opt.step()
        opt.zero_grad()

right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
print(f"epoch {opt.epoch}: {right:.1%} of the test digits are right")
