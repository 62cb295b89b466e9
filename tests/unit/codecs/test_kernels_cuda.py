"""The CUDA kernels against the CPU's bits and float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.gpu.kernels import CHECKS
from p2pavg import native

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_kernels(check: Callable[[], None]) -> None:
    """Each check of the GPU benchmark holds."""
    assert native.cuda() is not None, "the CUDA module is missing or does not work on this device"
    check()
