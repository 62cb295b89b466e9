"""The models of `bench outer`: a small language model over bytes, and a model whose steps only sleep."""

from __future__ import annotations

import math
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from p2pavg.bench.outer import CONTEXT

HEAD = 16  # width of an attention head
LAYERS = 2
MOST_TEXT = 8 << 20
VALIDATION = 1 << 18  # bytes at the end of the text
EVALUATED = 512  # windows of the validation text over which a loss is computed
PIECES = 8  # tensors of a model that sleeps


def width_of(params: int) -> int:
    """The width at which `Bytes` has about `params` parameters."""
    best = HEAD
    while _parameters(best + HEAD) <= params:
        best += HEAD
    return best


def _parameters(width: int) -> int:
    return LAYERS * (12 * width * width + 9 * width) + width * (512 + CONTEXT + 2)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.mixed(self.before(x)).view(rows, length, 3, width // HEAD, HEAD)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        narrow: Tensor = self.narrow(F.gelu(self.wide(self.between(x))))
        return x + narrow


class Bytes(nn.Module):
    """A decoder-only transformer: int64[rows, length] -> logits float32[rows, length, 256]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.bytes(x) + self.places[: x.shape[1]])))
        return logits


def read_text(folder: Path | None = None) -> tuple[Tensor, Tensor]:
    """(training bytes, validation bytes), uint8: the files of Python's standard library, in a fixed order."""
    root = folder or Path(sysconfig.get_path("stdlib"))
    names = sorted(
        path for path in root.rglob("*.py") if not {"site-packages", "test", "tests"} & set(path.parts)
    )
    text = bytearray()
    for name in names[::2] + names[1::2]:  # so that the validation text is of many packages
        text += name.read_bytes()
        if len(text) >= MOST_TEXT:
            break
    whole = torch.frombuffer(text, dtype=torch.uint8)
    return whole[:-VALIDATION], whole[-VALIDATION:]


def windows(text: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` random places of the text: int64[count, CONTEXT + 1]."""
    starts = torch.randint(0, len(text) - CONTEXT, (count, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT + 1)].long()


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy per byte, in nats."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def factor(step: int, steps: int) -> float:
    """The learning rate's factor: warm-up over a twentieth of the steps, then a cosine down to a tenth."""
    warmup = max(1, steps // 20)
    return min(1.0, (step + 1) / warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / steps))))


class Language:
    """A model that learns to predict bytes, and the text that it sees."""

    def __init__(self, params: int, batch: int, seed: int, peers: Sequence[int]) -> None:
        """seed: of the model and, with a peer's index, of the text that the peer sees. peers: whose text
        this process sees, of each as much.
        """
        training, self._validation = read_text()
        torch.manual_seed(seed)
        self.model = Bytes(width_of(params))
        drawn = [torch.Generator().manual_seed(1000 * seed + peer) for peer in peers]
        self._batches = self._draw(training, batch, drawn)

    def _draw(self, text: Tensor, batch: int, generators: Sequence[torch.Generator]) -> Iterator[Tensor]:
        while True:
            yield torch.cat([windows(text, batch, generator) for generator in generators])

    def backward(self) -> None:
        """One microbatch."""
        torch.autograd.backward(loss_of(self.model, next(self._batches)))

    @torch.no_grad()
    def loss(self) -> float | None:
        """The validation loss, over the same windows of the text each time."""
        generator = torch.Generator().manual_seed(0)
        samples = (windows(self._validation, 64, generator) for _ in range(EVALUATED // 64))
        losses = [loss_of(self.model, each) for each in samples]
        return float(torch.stack(losses).mean())


class Sleeper:
    """Parameters whose gradients cost no computation, and microbatches that take a known time."""

    def __init__(self, params: int, seconds: float) -> None:
        torch.manual_seed(0)
        rows = max(1, params // (PIECES * 1024))
        self.model: nn.Module = nn.ModuleList(nn.Linear(1024, rows, bias=False) for _ in range(PIECES))
        self._gradients = [torch.randn_like(weight) for weight in self.model.parameters()]
        self._seconds = seconds

    def backward(self) -> None:
        """Sleep as long as an accelerator would compute, beside the optimizer's own work."""
        end = time.monotonic() + self._seconds
        for weight, gradient in zip(self.model.parameters(), self._gradients, strict=True):
            if weight.grad is None:
                weight.grad = gradient
        time.sleep(max(0.0, end - time.monotonic()))

    def loss(self) -> float | None:
        """None: a model that sleeps learns nothing."""
        return None
