"""What offload is forecast to take, and what it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from p2pavg.errors import ConfigurationError
from p2pavg.optim import preflight
from p2pavg.optim.optimizer import CollaborativeOptimizer

pytestmark = pytest.mark.swarm

PROGRAM = """
import json, resource, sys, time
import torch
from torch import nn
from p2pavg import CollaborativeOptimizer
from p2pavg.optim import preflight

def rss(field):
    for line in open("/proc/self/status"):
        if line.startswith(field):
            return int(line.split()[1]) * 1024

name, delayed = sys.argv[1], sys.argv[2] == "True"
torch.set_num_threads(1)
model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(8)])
makers = {"adamw": torch.optim.AdamW, "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)}
inner = makers[name](model.parameters())
x = torch.randn(2, 2048)
model(x).mean().backward()
model.zero_grad()
before = rss("VmRSS")
expected = preflight.check(inner, "fp16", None, delayed=delayed)
opt = CollaborativeOptimizer(
    inner, "preflight-%s" % time.time_ns(), 4, 2, initial_peers=[], listen="127.0.0.1:0",
    offload_optimizer=True, delay_updates=delayed,
)
while opt.epoch < 2:
    model(x).mean().backward()
    opt.step()
print(json.dumps({"before": before, "forecast": expected.host_bytes, "peak": rss("VmHWM")}))
opt.close(0.0)
"""


@pytest.mark.parametrize(
    ("name", "delayed"),
    [  # each state and each way once; the other two: `pytest -m long`
        ("adamw", True),
        ("sgd", False),
        pytest.param("adamw", False, marks=pytest.mark.long),
        pytest.param("sgd", True, marks=pytest.mark.long),
    ],
)
def test_the_forecast_is_near_the_peak(name: str, delayed: bool) -> None:
    """Peak resident memory of a training process is within 10% of what was forecast before it wrapped.

    Memory is counted as it is in use: left to itself, glibc keeps some of what PyTorch frees in a backward,
    up to about 100 MB, whatever the size of the model and with any optimizer.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, str(delayed)],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    expected = told["before"] + told["forecast"]
    assert abs(told["peak"] - expected) <= 0.1 * expected, told


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little memory is one sentence with numbers, before anything was opened or changed."""
    model = nn.Linear(1000, 1000)
    monkeypatch.setattr(preflight, "host_available", lambda: 20_000_000)
    with pytest.raises(ConfigurationError, match=r"needs 0\.0\d GB more memory on host .* 0\.02 GB are free"):
        CollaborativeOptimizer(
            torch.optim.AdamW(model.parameters()), "preflight", 8, 4, offload_optimizer=True
        )
    assert model.weight.grad is None


def test_device_memory_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a model on an accelerator its memory is forecast as well: sums twice, and staging."""
    expected = preflight.forecast(
        10**9, 8.0, 2.0, accelerator=True, sent_bytes=2.0, live_bytes=2, gradients_held=2 * 10**9
    )
    assert expected.device == {"gradient sums": 6 * 10**9, "staging": 32 << 20}
    assert expected.host == {
        "master parameters": 4 * 10**9,
        "optimizer state": 8 * 10**9,
        "averages": 4 * 10**9,
        "rounds": 6 * 10**9,
        "rounded parameters": 2 * 10**9,
    }


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0.0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4.0),
        (lambda p: torch.optim.AdamW(p, fused=True), 8.0),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 12.0),
    ],
)
def test_state_is_found_by_trying(make: object, expected: float) -> None:
    """What an optimizer keeps is seen on a small parameter of its own; the real one is left alone."""
    params = [nn.Parameter(torch.ones(3))]
    optimizer = make(params)  # type: ignore[operator]
    assert preflight.state_bytes_per_parameter(optimizer) == pytest.approx(expected, abs=0.01)
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"] == params


def test_what_a_subclass_adds_is_there_when_it_shows_its_state():
    """An optimizer of one's own, whose step() reads attributes of its own, is asked like any other."""

    class Halved(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1, momentum=0.9)
            self.part = 0.5

        def step(self, closure=None):
            for group in self.param_groups:
                group["lr"] *= self.part
            return super().step(closure)

    optimizer = Halved([torch.nn.Parameter(torch.zeros(4))])
    assert preflight.state_bytes_per_parameter(optimizer) == pytest.approx(4.0, abs=0.01)
    assert optimizer.param_groups[0]["lr"] == 0.1
