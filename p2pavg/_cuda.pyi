"""CUDA kernels, in C++ (csrc/bindings). Device pointers, host addresses and streams are integers.

Nothing here checks what a caller can check: `p2pavg.codecs.cuda` checks types, sizes and devices, and keeps
tensors alive. RuntimeError: CUDA says no.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Draws = tuple[int, int, int]  # seed, epoch, first element
_Owing = tuple[int, int, float]  # residuals before and after, share

SOURCES: str  # SHA-256 over the C++ that it was built of, as CMakeLists.txt makes it

def problem() -> str:
    """Why the kernels do not run on a device here; empty: they do."""

def encoded_size(codec: int, n: int) -> int: ...
def encode(
    codec: int,
    src: int,
    n: int,
    chunk: int,
    scale: float,
    dst: int,
    flag: int,
    stream: int,
    draws: _Draws | None = None,
) -> None: ...
def decode(
    codec: int, src: int, n: int, chunk: int, scale: float, add: bool, dst: int, flag: int, stream: int
) -> None: ...
def accumulate(
    src: Sequence[int],
    dst: Sequence[int],
    counts: Sequence[int],
    type: int,
    scale: float,
    flag: int,
    stream: int,
) -> None: ...
def rescale(data: int, n: int, wanted: int, current: int, stream: int) -> None: ...
def clear_if(data: int, n: int, flag: int, told: int, stream: int) -> None: ...
def pinned(nbytes: int) -> npt.NDArray[np.uint8]:
    """Page-locked host memory, freed with the array."""

def is_pinned(address: int) -> bool: ...

class Transfer:
    def done(self) -> int: ...
    def wait(self) -> bool: ...
    def hold(self, stream: int) -> None: ...

class Staging:
    def __init__(self, device: int, slot_bytes: int, slots: int) -> None: ...
    def download(
        self,
        codec: int,
        src: int,
        n: int,
        chunk: int,
        scale: float,
        host: int,
        stream: int,
        draws: _Draws | None = None,
        owing: _Owing | None = None,
    ) -> Transfer: ...
    def upload(
        self, codec: int, host: int, n: int, chunk: int, scale: float, dst: int, stream: int
    ) -> Transfer: ...
    def device_bytes(self) -> int: ...
