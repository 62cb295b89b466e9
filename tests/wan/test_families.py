"""IPv4, IPv6 and both in one swarm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from p2pavg.lab import Lab
from p2pavg.lab.topology import parse
from tests.wan.test_routes import ROOT, Trainer

pytestmark = [pytest.mark.wan, pytest.mark.timeout(300)]

TOPOLOGY = """
hosts = ["dual", "four", "six"]
[[nodes]]
hosts = "dual"
family = "both"
[[nodes]]
hosts = "six"
family = "6"
[[paths]]
rtt_ms = 20
"""


def test_peers_of_two_families_average_through_one_that_has_both() -> None:
    """A peer with both families is found over either; one of IPv4 alone and one of IPv6 alone contribute to
    the same epochs, through it.
    """
    with Lab(parse(TOPOLOGY, "families")) as lab:
        dual = Trainer(lab, "dual")
        four = Trainer(lab, "four", f"{lab.address('dual')}:31330")
        dual.until(2)
        six = Trainer(lab, "six", f"[{lab.address6('dual')}]:31330")
        assert six.start["address"] == f"[{lab.address6('six')}]:31330"
        since = six.until(3)["at"]
        four.until(3, since)
        assert [four.next()["peers"] for _ in range(20)] == [3] * 20


def test_peers_of_two_families_meet_through_a_node_that_only_helps(tmp_path: Path) -> None:
    """Both can be dialled, and not by each other: a bootstrap node with both families, which trains nothing,
    relays, and they contribute to the same epochs.
    """
    with Lab(parse(TOPOLOGY, "famhelp")) as lab:
        helper = lab.spawn(
            "dual",
            [sys.executable, "-m", "p2pavg", "bootstrap", "--run", "routes", "--identity", tmp_path / "key"],
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
        assert helper.stdout is not None
        assert helper.stdout.readline()
        four = Trainer(lab, "four", f"{lab.address('dual')}:31330")
        six = Trainer(lab, "six", f"[{lab.address6('dual')}]:31330")
        since = six.until(2)["at"]
        four.until(2, since)
        assert [four.next()["peers"] for _ in range(5)] == [2] * 5
