"""Two processes that train with DistributedDataParallel are one peer of the swarm; others may be single.

torchrun --nproc-per-node 2 examples/ddp_node.py                   # a node; prints its address
python examples/ddp_node.py --initial-peers HOST:PORT              # a single peer, in another terminal
"""

import argparse
import os
import signal
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

from p2pavg import CollaborativeOptimizer

parser = argparse.ArgumentParser()
parser.add_argument("--initial-peers", nargs="*")
parser.add_argument("--epochs", type=int, default=300)
args = parser.parse_args()
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))  # Ctrl-C leaves the run

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)

torch.set_num_threads(1)  # several peers may share this machine's cores
torch.manual_seed(0)  # all peers start from the same weights ...
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
torch.manual_seed(int.from_bytes(os.urandom(4), "big"))  # ... and each process draws its own samples

group, trained = None, model
if "RANK" in os.environ:  # torchrun started this process as one rank of a node
    dist.init_process_group("gloo")
    group, trained = dist.group.WORLD, nn.parallel.DistributedDataParallel(model)

opt = CollaborativeOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    run_id="ddp-node",
    target_batch_size=1024,  # samples per epoch, over all peers and their ranks
    batch_size_per_step=32,  # of each rank
    initial_peers=args.initial_peers,
    node_group=group,
    on_round=lambda report: print(f"epoch {report.epoch}, peers: {len(report.members)}", flush=True),
)
if opt.peer is not None:  # of a node, its first rank
    join = f"python {sys.argv[0]} --epochs {args.epochs} --initial-peers {opt.peer.address}"
    print(f"join with: {join}", flush=True)
    if not (args.initial_peers or os.environ.get("P2PAVG_INITIAL_PEERS")):
        print("training begins when somebody joins, or when you press Enter", flush=True)
        opt.peer.wait_for_peers(1, enter=True)
while opt.epoch < args.epochs:
    chosen = torch.randint(0, 1500, (32,))
    nn.functional.cross_entropy(trained(images[chosen]), labels[chosen]).backward()
    opt.step()
    opt.zero_grad()
opt.close()

if group is None or dist.get_rank() == 0:
    right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    print(f"epoch {opt.epoch}: {right:.1%} of the test digits are right")
if group is not None:
    dist.barrier()  # a rank that tears its connections down while another still uses them may abort
    dist.destroy_process_group()
