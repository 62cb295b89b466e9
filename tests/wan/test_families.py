"""IPv4, IPv6 and both in one swarm."""

from __future__ import annotations

import pytest

from p2pavg.lab import Lab
from p2pavg.lab.topology import parse
from tests.wan.test_routes import Trainer

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
