"""What is trained: a byte-level language model on the standard library's text. Needs nothing of p2pavg."""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

WINDOW = 64  # bytes of a sample
SAMPLES = 8192  # of a pass
HELD_OUT = 512  # windows that nobody trains on
LEARNING_RATE = 1e-3
BATCH = 2  # samples of a local step


def build() -> GPT2LMHeadModel:
    """The same weights in each process. About 0.5M values."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = GPT2Config(
        vocab_size=256, n_positions=WINDOW, n_embd=96, n_layer=4, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(shape)


@functools.cache
def _windows() -> torch.Tensor:
    folder = Path(sysconfig.get_paths()["stdlib"])
    wanted, text = (SAMPLES + HELD_OUT) * WINDOW, b""
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= wanted:
            break
    return torch.frombuffer(bytearray(text[:wanted]), dtype=torch.uint8).view(-1, WINDOW).long()


def training() -> torch.Tensor:
    """(SAMPLES, WINDOW) bytes as int64: every 17th window is left out."""
    every = _windows()
    return every[[at for at in range(len(every)) if at % 17][:SAMPLES]]


def held_out() -> torch.Tensor:
    """(n, WINDOW) bytes as int64 that nobody trains on."""
    return _windows()[::17]


def loss(model: GPT2LMHeadModel) -> float:
    """Of the windows that nobody trains on, in nats per byte."""
    model.eval()
    with torch.no_grad():
        parts = [model(input_ids=part, labels=part).loss for part in held_out().split(128)]
    model.train()
    return float(torch.stack(parts).mean())


def sha256(model: torch.nn.Module) -> str:
    """Of all parameters in their order, float32 little-endian."""
    found = hashlib.sha256()
    for param in model.parameters():
        found.update(param.detach().numpy().tobytes())
    return found.hexdigest()
