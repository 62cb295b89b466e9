"""The same training under Hivemind and then under p2pavg: only the lines that build the optimizer change.

`python -m bench.from_hivemind --hivemind PYTHON --json PATH`: PYTHON has hivemind installed; without it, only
p2pavg trains. Each peer is a process; the printed scripts differ in the lines between the two marks.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from p2pavg.bench.machine import environment

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 240.0

SCRIPT = """\
import json
import sys
import time

import torch
from torch import nn

RANK, EPOCHS = int(sys.argv[1]), int(sys.argv[3])
INITIAL_PEERS, RUN_ID = json.loads(sys.argv[2]), sys.argv[4]
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
teacher = nn.Linear(64, 10)
# ---- the lines that change
{build}
# ---- and no more
print(json.dumps({{"address": address}}), flush=True)
sys.stdin.readline()
generator = torch.Generator().manual_seed(1 + RANK)
begun, losses, samples = time.time(), [], 0
while epoch() < EPOCHS:
    x = torch.randn(32, 64, generator=generator)
    loss = nn.functional.cross_entropy(model(x), teacher(x).argmax(dim=1))
    loss.backward()
    opt.step()
    opt.zero_grad()
    losses.append(loss.item())
    samples += 32
    time.sleep(0.02)  # an accelerator's time
seconds = time.time() - begun
x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(99))
with torch.no_grad():
    final = nn.functional.cross_entropy(model(x), teacher(x).argmax(dim=1)).item()
found = {{"seconds": seconds, "samples": samples, "first_loss": losses[0], "loss": final}}
print(json.dumps(found), flush=True)
sys.stdin.readline()
"""

BUILDS = {
    "hivemind": """\
import hivemind

dht = hivemind.DHT(initial_peers=INITIAL_PEERS, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
opt = hivemind.Optimizer(
    dht=dht,
    run_id=RUN_ID,
    batch_size_per_step=32,
    target_batch_size=1024,
    params=model.parameters(),
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    scheduler=lambda inner: torch.optim.lr_scheduler.CosineAnnealingLR(inner, 100),
    grad_compression=hivemind.compression.Float16Compression(),
    matchmaking_time=2.0,
    averaging_timeout=30.0,
)
address = str(dht.get_visible_maddrs()[0])
epoch = lambda: opt.local_epoch""",
    "p2pavg": """\
from p2pavg import CollaborativeOptimizer

inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
opt = CollaborativeOptimizer(
    inner,
    run_id=RUN_ID,
    batch_size_per_step=32,
    target_batch_size=1024,
    initial_peers=INITIAL_PEERS,
    listen="127.0.0.1:0",
    scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(inner, 100),
    compression="fp16",
)
address = opt.peer.address
epoch = lambda: opt.epoch""",
}


def changed_lines() -> list[str]:
    """What a user changes, as a diff."""
    before, after = (SCRIPT.format(build=BUILDS[name]).splitlines() for name in ("hivemind", "p2pavg"))
    return list(difflib.unified_diff(before, after, "hivemind", "p2pavg", n=0, lineterm=""))


class Worker:
    """One peer."""

    def __init__(self, python: str, script: Path, rank: int, peers: list[str], epochs: int, run: str) -> None:
        self._process = subprocess.Popen(
            [python, str(script), str(rank), json.dumps(peers), str(epochs), run],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        self._timer = threading.Timer(DEADLINE_S, self._process.kill)
        self._timer.start()

    def line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"a peer ended with code {self._process.wait()}")

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._timer.cancel()
        self._process.kill()
        self._process.wait()


def train(name: str, python: str, peers: int, epochs: int) -> dict[str, Any]:
    """All peers of one run, until they have taken `epochs` global steps."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / f"train_{name}.py"
        script.write_text(SCRIPT.format(build=BUILDS[name]))
        workers: list[Worker] = []
        addresses: list[str] = []
        run = f"from-hivemind-{time.time_ns()}"
        try:
            for rank in range(peers):
                workers.append(Worker(python, script, rank, addresses, epochs, run))
                addresses = [*addresses, workers[-1].line()["address"]][:1]
            for worker in workers:
                worker.go_on()
            found = [worker.line() for worker in workers]
            for worker in workers:
                worker.go_on()
        finally:
            for worker in workers:
                worker.close()
    return {
        "seconds": max(one["seconds"] for one in found),
        "samples_per_second": sum(one["samples"] / one["seconds"] for one in found),
        "seconds_per_epoch": max(one["seconds"] for one in found) / epochs,
        "first_loss": found[0]["first_loss"],
        "loss": [one["loss"] for one in found],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hivemind", help="a Python interpreter that has hivemind")
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write all figures there")
    args = parser.parse_args()
    result: dict[str, Any] = {"environment": environment(), "peers": args.peers, "epochs": args.epochs}
    result["changed"] = changed_lines()
    print(*result["changed"], sep="\n")
    for name, python in (("hivemind", args.hivemind), ("p2pavg", sys.executable)):
        if python is None:
            result[name] = {"skipped": "no interpreter with hivemind was named"}
        else:
            result[name] = train(name, python, args.peers, args.epochs)
        print(name, json.dumps(result[name]), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
