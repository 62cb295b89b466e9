"""Folders become markers, and tests that start processes run one after the other beside the fast ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Several processes share few cores here: a thread pool in each would only make them wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_TESTS = Path(__file__).parent
_WITH_PROCESSES = ("swarm", "chaos", "wan")


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(_TESTS).parts[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark by folder; under xdist all tests with processes form one group, which is begun first."""
    for item in items:
        folder = _folder(item)
        if folder in _WITH_PROCESSES:
            item.add_marker(folder)
            item.add_marker(pytest.mark.xdist_group("processes"))
    items.sort(key=lambda item: _folder(item) not in _WITH_PROCESSES)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a CUDA device where there is none."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
