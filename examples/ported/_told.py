"""What the ported scripts share: their arguments, and one line of JSON at the end."""

import argparse
import hashlib
import json
import signal
import sys

import torch

from p2pavg import CollaborativeOptimizer


def arguments(about: str) -> argparse.Namespace:
    """--alone: the script as it was, in one process. Else it is part --part of --parts."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--initial-peers", nargs="*")
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    torch.set_num_threads(1)  # several peers may share this machine's cores
    return parser.parse_args()


def mine(rows: torch.Tensor, args: argparse.Namespace) -> torch.Tensor:
    """This process's rows of a global batch."""
    return rows if args.alone else rows[args.part :: args.parts]


counted: list[int] = []  # by step of this process, the samples of the swarm's average


def meet(optimizer: CollaborativeOptimizer, args: argparse.Namespace) -> None:
    """Say how the next part is started. Wait for the others, so that all begin with the first step."""
    optimizer.register_step_post_hook(lambda *_: counted.append(optimizer.last_report.samples))
    if args.part + 1 < args.parts:
        join = f"python {sys.argv[0]} --part {args.part + 1} --parts {args.parts}"
        print(f"join with: {join} --initial-peers {optimizer.peer.address}", flush=True)
    optimizer.peer.wait_for_peers(args.parts - 1)


def tell(model: torch.nn.Module, losses: list[float], rates: list[float]) -> None:
    """Print the losses and learning rates by step, and a digest of the parameters."""
    whole = torch.cat([param.detach().flatten() for param in model.parameters()])
    digest = hashlib.sha256(whole.numpy().tobytes()).hexdigest()
    norm = float(whole.double().norm())
    told = {"losses": losses, "rates": rates, "counted": counted, "digest": digest, "norm": norm}
    print(json.dumps(told), flush=True)
