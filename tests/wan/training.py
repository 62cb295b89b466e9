"""Peers that train on the hosts of a lab, each in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from p2pavg.lab import Lab

ROOT = Path(__file__).parents[2]

# Trains until ten rounds had as many voters as there are peers. Then waits for the end of its input.
TRAIN = """
import json, sys, time, torch
from p2pavg import CollaborativeOptimizer

initial_peers, everybody = sys.argv[1].split(), int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Linear(256, 256)
with CollaborativeOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), "nat", 256, 4, initial_peers=initial_peers
) as opt:
    print(json.dumps({"address": opt.peer.address}), flush=True)
    whole, known = 0, None
    while whole < 10:
        time.sleep(0.02)  # an accelerator computes
        model(torch.randn(4, 256)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        report = opt.last_report
        if report is not None and report.epoch != known:
            known = report.epoch
            whole += sum(member.voter and member.samples > 0 for member in report.members) == everybody
    links = [link.peer for link in report.links if link.bytes_sent]
    result = {"peer": report.peer, "lineage": report.lineage, "links": links}
    print(json.dumps(result), flush=True)
    sys.stdin.read()
"""


def train(lab: Lab, host: str, initial_peers: str, everybody: int) -> subprocess.Popen[str]:
    """A peer of a run of so many."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    argv = [sys.executable, "-c", TRAIN, initial_peers, str(everybody)]
    return lab.spawn(host, argv, text=True, env=env, **pipes)


def lines(process: subprocess.Popen[str]) -> Callable[[], dict[str, Any]]:
    """The next line of JSON that a process prints."""

    def read() -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the process ended"
        found: dict[str, Any] = json.loads(line)
        return found

    return read
