"""The percentage behind the dots, by time: hundreds of slow tests begin, thousands of quick ones follow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

SECONDS = {"wan": 4.0, "chaos": 60.0, "swarm": 5.0, "fuzz": 0.5}  # what a test of a folder takes, about
QUICK_S = 0.05


def seconds(nodeid: str) -> float:
    """About how long a test takes."""
    folder = nodeid.removeprefix("tests/").partition("/")[0]
    return SECONDS.get(folder, QUICK_S)


class Progress:
    """A plugin of the process that shows the dots."""

    def __init__(self) -> None:
        self._all = 0.0
        self._over: set[str] = set()
        self._done = 0.0

    def collected(self, nodeids: Iterable[str]) -> None:
        """These tests will run."""
        self._all = sum(map(seconds, nodeids))

    def over(self, nodeid: str) -> None:
        """This one has."""
        if nodeid not in self._over:
            self._over.add(nodeid)
            self._done += seconds(nodeid)

    def message(self) -> str:
        """As wide as pytest's own."""
        share = self._done / self._all if self._all else 1.0
        return f" [{min(100, int(100 * share + 1e-6)):3d}%]"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without xdist."""
        if session.items:
            self.collected(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """Every worker has collected the same."""
        self.collected(ids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Before the reporter shows how far it is."""
        self.over(report.nodeid)
