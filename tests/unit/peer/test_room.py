"""How many peers a run takes."""

from __future__ import annotations

import pytest

from p2pavg.errors import ConfigurationError
from p2pavg.peer.advice import check_room
from p2pavg.plan import MOST_MEMBERS


def test_a_full_run_refuses_clearly() -> None:
    """The 65th peer hears how many there are and what to do; the 64th enters."""
    check_room(MOST_MEMBERS - 1, MOST_MEMBERS, "big")
    with pytest.raises(ConfigurationError, match=r"run 'big' has 64 peers.*another run_id"):
        check_room(MOST_MEMBERS, MOST_MEMBERS, "big")
