"""The examples of the integrations, as a person starts them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.swarm.scripts import Script, Terminal

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]


@pytest.fixture
def start() -> Iterator[Terminal]:
    with Terminal() as terminal:
        yield terminal


@pytest.fixture
def terminal() -> Iterator[int]:
    """A stdin on which nobody types: the first peer waits for the second."""
    reading, writing = os.pipe()
    yield reading
    os.close(reading)
    os.close(writing)


ALARMS = (
    "learning rate",
    "same samples",
    "as many samples",
    "changed before step()",
    "parameters",
    "schedule",
)
"""Words of the warnings about settings that would train something else."""


def last_line(script: Script) -> str:
    """What it said last, after nothing that warns of a setting."""
    last = script.end().splitlines()[-1]
    assert not [line for line in script.lines if any(words in line for words in ALARMS)]
    return last


def needs(*names: str) -> None:
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def test_a_language_model_with_trainer(start: Terminal, terminal: int, tmp_path: Path) -> None:
    """Two Trainers join by the printed line and both end at the swarm's last epoch, with a lower loss."""
    needs("transformers", "accelerate")
    words = ("examples/hf_trainer.py", "--epochs", "60", "--output", str(tmp_path / "first"))
    first = start(*words, stdin=terminal)
    printed = first.line_with("--initial-peers").split()
    second = start(*words[:-1], str(tmp_path / "second"), *printed[-2:])
    for script in (first, second):
        last = last_line(script)
        assert last.startswith("epoch 60: loss")
        assert float(last.split()[-1]) < 4.5  # 5.5 before training


def test_digits_with_lightning(start: Terminal, terminal: int) -> None:
    """Two Lightning trainers train one model, which reads digits."""
    needs("lightning")
    first = start("examples/lightning_digits.py", "--epochs", "80", stdin=terminal)
    printed = first.line_with("--initial-peers").split()
    second = start("examples/lightning_digits.py", "--epochs", "80", *printed[-2:])
    for script in (first, second):
        last = last_line(script)
        assert last.startswith("epoch 80: ")
        assert float(last.split(": ")[1].split("%")[0]) > 80


def test_a_node_of_two_ranks_and_a_single_peer(start: Terminal) -> None:
    """torchrun's two ranks are one peer, a third process is another one, and both read digits."""
    words = ("examples/ddp_node.py", "--epochs", "150")
    node = start("-m", "torch.distributed.run", "--nproc-per-node", "2", *words)
    printed = node.line_with("--initial-peers").split()
    single = start(*words, *printed[-2:])
    node.line_with("peers: 2")
    for script in (node, single):
        last = last_line(script)
        assert float(last.split(": ")[1].split("%")[0]) > 85
