"""An accelerator that is the CPU: gradients stay tensors, and are encoded chunk by chunk when asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from p2pavg.allreduce.encoded import EncodedResult
from p2pavg.allreduce.encoding import Owed
from p2pavg.codecs import Codec, encode_feedback


@dataclass
class FakeEncoding:
    """Each look at it finds one more chunk done."""

    data: np.ndarray
    pieces: list[np.ndarray]
    all_finite: bool
    done: int = 0
    at: int = 0

    def failed(self) -> bool:
        return False

    def chunks_done(self) -> int:
        if self.done < len(self.pieces):
            piece = self.pieces[self.done]
            self.data[self.at : self.at + len(piece)] = piece
            self.at += len(piece)
            self.done += 1
        return self.done

    def finite(self) -> bool:
        while self.chunks_done() < len(self.pieces):
            pass
        return self.all_finite

    def whole(self) -> bool:
        return self.done == len(self.pieces) and self.all_finite


@dataclass
class FakeGradient:
    vector: torch.Tensor
    owed: Owed | None = None

    def with_feedback(self, owed: Owed) -> FakeGradient:
        return replace(self, owed=owed)

    def encode(
        self, codec: Codec, parts: Sequence[tuple[int, int]], chunk: int, scale: float
    ) -> FakeEncoding:
        values, pieces, finite, owed = self.vector.numpy(), [], True, self.owed
        for start, count in parts:
            for at in range(start, start + count, chunk):
                source = values[at : min(at + chunk, start + count)]
                piece = np.zeros(codec.encoded_size(len(source)), np.uint8)
                if owed is None:
                    finite &= codec.encode(source, piece, scale)
                else:
                    here = slice(2 * at, 2 * (at + len(source)))
                    before, after = owed.before[here], owed.after[here]
                    finite &= encode_feedback(codec, source, scale, before, owed.share, piece, after)
                pieces.append(piece)
        data = np.full(sum(map(len, pieces)), 0xFF, np.uint8)
        return FakeEncoding(data, pieces, finite)


@dataclass
class FakePath:
    """Counts what it is asked for."""

    decoded: int = 0
    allocated: list[int] = field(default_factory=list)
    forks: int = 0
    asides: int = 0

    def allocate(self, nbytes: int) -> np.ndarray:
        self.allocated.append(nbytes)
        return np.empty(nbytes, np.uint8)

    def gradient(self, vector: torch.Tensor) -> FakeGradient:
        return FakeGradient(vector)

    def decode(self, result: EncodedResult, vector: torch.Tensor) -> None:
        self.decoded += 1
        result.decode_into(vector.numpy())

    def fork(self) -> None:
        self.forks += 1

    @contextmanager
    def aside(self) -> Iterator[None]:
        self.asides += 1
        yield
