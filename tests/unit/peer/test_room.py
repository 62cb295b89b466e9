"""How many peers a run takes."""

from __future__ import annotations

import pytest

from p2pavg.errors import ConfigurationError
from p2pavg.peer.advice import check_room
from p2pavg.plan import MOST_GATHERED, MOST_MEMBERS


def test_a_full_run_refuses_clearly() -> None:
    """The 65th peer hears how many there are and what to do; the 64th enters."""
    check_room(MOST_MEMBERS - 1, "big", sparse=False)
    with pytest.raises(ConfigurationError, match=r"run 'big' has 64 peers.*another run_id"):
        check_room(MOST_MEMBERS, "big", sparse=False)


def test_a_sparse_run_is_full_sooner() -> None:
    """Where each peer sends its contribution to all others, the 13th hears why it is one too many."""
    check_room(MOST_GATHERED - 1, "big", sparse=True)
    with pytest.raises(
        ConfigurationError, match=r"run 'big' has 12 peers, and Outer\(density=\) takes at most 12"
    ):
        check_room(MOST_GATHERED, "big", sparse=True)
