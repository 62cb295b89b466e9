"""As what a peer enters a run, from where those that it met stand."""

from __future__ import annotations

from typing import Any

import pytest

from p2pavg.peer.entering import role_among
from p2pavg.rounds.protocol.roles import Role
from p2pavg.rounds.training import RunStart

FIRST, OTHER = b"f" * 32, b"o" * 32


class Met:
    """A link to a peer that says where it stands."""

    def __init__(self, role: str, epoch: int, lineage: bytes = FIRST) -> None:
        self.hello = {"role": role, "epoch": epoch, "lineage": lineage}


@pytest.mark.parametrize(
    ("start", "met", "role"),
    [
        (0, [], Role.TRAINER),
        (0, [Met("trainer", 0)], Role.TRAINER),
        (0, [Met("watcher", 9)], Role.TRAINER),
        (0, [Met("trainer", 0, OTHER)], Role.JOINER),
        (0, [Met("trainer", 0), Met("trainer", 3)], Role.JOINER),
        (0, [Met("joiner", 34)], Role.JOINER),  # a member that downloads a state, as it fell behind
        (0, [Met("joiner", 0)], Role.TRAINER),  # it has no state that could be waited for
        (5, [Met("joiner", 0)], Role.TRAINER),  # which knows less than a checkpoint
        (5, [Met("joiner", 9)], Role.JOINER),
        (5, [Met("trainer", 4)], Role.TRAINER),
    ],
)
def test_a_newcomer_begins_no_second_run(start: int, met: list[Any], role: Role) -> None:
    """Whoever meets somebody with a state that is further, joins its run."""
    assert role_among(met, RunStart(start, FIRST)) is role
