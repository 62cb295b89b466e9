"""Folders become markers; the lab's tests run one after the other, beside everything else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from tests.progress import Progress
from tests.warm.popen import Warm

# Several processes share few cores here: a thread pool in each would only make them wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No test begins with what another one, or a user of this machine, measured of paths with the same addresses.
os.environ["P2PAVG_PATHS"] = ""

# In a fresh checkout hypothesis first builds tables of characters, for seconds.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

_TESTS = Path(__file__).parent
_MARKED = ("wan", "chaos", "swarm")
_WARM = (*_MARKED, "integrations")
_FIRST = (*_MARKED, "integrations")  # the long ones
_SHARING = ("swarm/test_docs_commands.py", "swarm/test_wrong_turns.py")
_NICE = 5  # of all tests but the lab's, which runs to the millisecond
_seen: set[str] = set()  # the folders of the tests that this process ran


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(_TESTS).parts[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark by folder; the long ones begin."""
    for item in items:
        if _folder(item) in _MARKED:
            item.add_marker(_folder(item))
        # Most run peers in real time, beside others on a shared machine; the lab's are to the millisecond.
        # What passed only when it ran again is named at the end (-rR), and is a fault to be found.
        item.add_marker(pytest.mark.flaky(reruns=2 if _folder(item) == "wan" else 1))
    items.sort(key=lambda item: _FIRST.index(_folder(item)) if _folder(item) in _FIRST else len(_FIRST))


class _OneLab(LoadScopeScheduling):
    """Under xdist the lab's tests go to one worker: two labs at once would not be on time, and they share
    results. So do those of a file that share swarms, which each worker would start anew.
    """

    def _split_scope(self, nodeid: str) -> str:
        if "tests/wan/" in nodeid:
            return "lab"
        file = nodeid.partition("::")[0]
        return file if file.endswith(_SHARING) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Each other test goes to whichever worker is free."""
    return _OneLab(config, log)


@pytest.fixture(autouse=True)
def _nothing_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test before left open in this process is no other optimizer of the run of this one."""
    live = sys.modules.get("p2pavg.optim.live")
    if live is not None:
        monkeypatch.setattr(live, "_open", WeakKeyDictionary())


@pytest.fixture(autouse=True)
def _programs_are_warm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The many programs of swarms and labs are forked from one that has imported what they need."""
    if (
        sys.platform == "linux"
        and _folder(request.node) in _WARM
        and not request.node.get_closest_marker("cold")
    ):
        monkeypatch.setattr(subprocess, "Popen", Warm)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give way to the worker that has the lab, and skip what needs a CUDA device where there is none."""
    if not _seen and _folder(item) != "wan" and "PYTEST_XDIST_WORKER" in os.environ:
        os.nice(_NICE)
    _seen.add(_folder(item))
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Show how much of the time has passed, instead of how many of the tests."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and hasattr(reporter, "_get_progress_information_message"):
        progress = Progress()
        config.pluginmanager.register(progress)
        reporter._get_progress_information_message = progress.message
