"""At which stage of a transfer `bench chaos` strikes."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from p2pavg.bench.chaos.kinds import STAGES
from p2pavg.bench.chaos.process import SwarmProcess
from p2pavg.bench.chaos.worker import stages
from p2pavg.transport.engine import JobProgress


def moved(contributions: tuple[int, ...], results: tuple[int, ...]) -> JobProgress:
    nothing = (0,) * len(results)
    return JobProgress(contributions, results, nothing, nothing, 0.0, 0.0)


@pytest.mark.parametrize(
    ("contributions", "results", "expected"),
    [
        ((0, 0, 0, 0), (0, 0, 0, 0), set()),
        ((0, 3, 0, 0), (0, 0, 0, 0), {"contributions"}),
        ((0, 0, 1, 0), (0, 0, 0, 0), {"means"}),
        ((0, 3, 0, 1), (0, 0, 0, 0), {"contributions", "means"}),
        ((0, 3, 0, 1), (0, 0, 2, 0), {"contributions", "means", "results"}),
    ],
)
def test_a_stage_shows_in_what_came(
    contributions: tuple[int, ...], results: tuple[int, ...], expected: set[str]
) -> None:
    """Rank 0 and rank 1 are in one region, the others in another."""
    assert stages(moved(contributions, results), (7, 7, 9, 9), 0) == expected
    assert expected <= set(STAGES)


def test_without_regions_what_comes_is_of_others() -> None:
    """A flat plan names no groups: contributions are as from another region."""
    assert stages(moved((0, 1), (0, 0)), (), 0) == {"means"}


def test_a_process_is_struck_once_it_has_stopped() -> None:
    """Who says that it stops may still run, and a signal to go on would come too early."""
    code = "import os, signal, time; time.sleep(0.2); os.kill(os.getpid(), signal.SIGSTOP)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        member = SwarmProcess("p0", None, process, {})
        assert member.stops_within(30.0)
        process.send_signal(signal.SIGCONT)
        assert process.wait(30.0) == 0
        assert not member.stops_within(0.0)
