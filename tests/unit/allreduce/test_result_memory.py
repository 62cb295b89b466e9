"""Result memory is used again, and never while somebody looks at it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from p2pavg.allreduce.result_memory import MOST_KEPT, ResultMemory


def test_what_nobody_looks_at_is_used_again() -> None:
    """The next result, of nearly the same size, lies where one was that is gone."""
    memory = ResultMemory()
    address = memory.take(100_000).ctypes.data
    assert memory.take(99_000).ctypes.data == address


LOOKS: dict[str, Callable[[np.ndarray], object]] = {
    "itself": lambda array: array,
    "a view": lambda array: array[10:20].view(np.float16),
    "a memoryview": lambda array: memoryview(array)[5:],
    "a buffer's array": lambda array: np.frombuffer(array.data, np.float32),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
@pytest.mark.parametrize(
    "allocate", [None, lambda n: np.empty(n + 64, np.uint8)[64:]], ids=["ordinary", "a view of more"]
)
def test_what_somebody_looks_at_is_not(
    look: Callable[[np.ndarray], object], allocate: Callable[[int], np.ndarray] | None
) -> None:
    """As long as any array or view of a result is there, the next one lies elsewhere."""
    memory = ResultMemory(allocate)
    taken = memory.take(1000)
    address, seen = taken.ctypes.data, look(taken)
    del taken
    other = memory.take(1000)
    assert other.ctypes.data != address
    del seen
    assert memory.take(1000).ctypes.data == address


def test_little_is_kept() -> None:
    """However many results are looked at, few are kept when they are gone."""
    memory, made = ResultMemory(lambda n: made.append(n) or np.empty(n, np.uint8)), []
    held = [memory.take(1000) for _ in range(5)]
    held.clear()
    held = [memory.take(1000) for _ in range(5)]
    assert len(made) == 10 - MOST_KEPT
