"""Every benchmark draws what it measured where --plot says; for some test_bench_local.py looks at that."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pavg.bench.__main__ import main
from tests.swarm.pictures import check_picture

pytestmark = pytest.mark.slow


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "words",
    [
        "rounds --peers 2 --epochs 5 --epoch-seconds 0.1",
        "codec --numel 200000 --rounds 2",
        "join --peers 2 --state-mb 5 --numel 10000 --epoch-seconds 0.3",
        "dht --nodes 12 --publishers 4",
        "dht --simulate 8 --settle-seconds 5 --idle-seconds 2",
        "chaos --peers 3 --epochs 12 --epoch-seconds 0.3 --fault-every 1 --faults kill --seed 1",
    ],
)
def test_a_benchmark_draws_its_result(words: str, tmp_path: Path) -> None:
    """The picture is there, and is one."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "result.svg"
    assert main([*words.split(), "--plot", str(path)]) == 0
    check_picture(path)
