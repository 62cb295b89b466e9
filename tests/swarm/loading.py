"""A trainer with DataLoader workers, as a program: `python -m tests.swarm.loading [initial peer]`."""

from __future__ import annotations

import json
import os
import sys
import threading

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from p2pavg import CollaborativeOptimizer


class Ones(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(8)


def main() -> None:
    """Prints one line of JSON when the workers run, and one per epoch; leaves when its input ends."""
    torch.set_num_threads(1)
    told: list[bytes] = []
    threading.Thread(target=lambda: told.append(os.read(0, 1)), daemon=True).start()
    model = nn.Linear(8, 1)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    with CollaborativeOptimizer(
        inner, "loading", 64, 4, initial_peers=sys.argv[1:], listen="127.0.0.1:0"
    ) as opt:
        loader = DataLoader(Ones(), batch_size=4, num_workers=2, multiprocessing_context="fork")
        batches = iter(loader)
        next(batches)
        workers = [worker.pid for worker in batches._workers]  # type: ignore[attr-defined]
        print(json.dumps({"address": opt.peer.address, "workers": workers}), flush=True)
        epoch = 0
        for batch in batches:
            model(batch).square().mean().backward()
            opt.step()
            if opt.epoch != epoch:
                epoch = opt.epoch
                print(json.dumps({"epoch": epoch, "peers": len(opt.peers)}), flush=True)
            if told:
                break


if __name__ == "__main__":
    main()
