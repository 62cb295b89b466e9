"""What an idle member of a large run sends and receives, in virtual time."""

from __future__ import annotations

import pytest

from p2pavg.bench.dht import idle
from p2pavg.membership.roster import FULL_VIEW
from p2pavg.membership.table import rpc


def test_members_of_a_large_run_leave_its_table_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the tables of 140 members still grow, nobody reads the run's few holders again and again: it was
    20 kB/s on average, and 170 at a holder. Everybody's sample stays whole.
    """
    monkeypatch.setattr(idle, "MOST_JOINING", 10)
    real = rpc.verify
    cost = idle.idle_cost(140, warm_seconds=3.0, seconds=7.0)
    assert rpc.verify is real  # real signatures count again
    assert sum(cost.bytes_per_s) / 140 < 4_000
    assert max(cost.bytes_per_s) < 20_000
    assert set(cost.seen) == {FULL_VIEW}
