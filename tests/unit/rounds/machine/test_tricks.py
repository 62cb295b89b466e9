"""Each kind of message, dropped, forged, unasked, repeated and late: what honest peers keep."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation.byzantine import Liar
from tests.simulation.tricks import KINDS, SECONDS, UNPROTECTED, cost, tricks

SEED = 1


@pytest.mark.parametrize("kind", KINDS)
def test_no_trick_of_a_member_costs_more_than_is_promised(kind: type[Any]) -> None:
    """Honest peers keep a third of the epochs, miss no two on end, and apply equal averages.

    `python -m tests.simulation.tricks --seeds 0:65` plays ten thousand schedules.
    """
    undisturbed = Liar(None, SEED).run(SECONDS)
    played = [each for each in tricks() if each.kind is kind and str(each) not in UNPROTECTED]
    found = {str(trick): cost(Liar(trick, SEED).run(SECONDS), undisturbed) for trick in played}
    assert {trick: why for trick, why in found.items() if why} == {}


def test_what_is_not_protected_is_a_trick() -> None:
    """No name of a trick that is left out is misspelt or outlived."""
    assert {str(trick) for trick in tricks()} >= UNPROTECTED
