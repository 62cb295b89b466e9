"""As what a peer enters a run, from where those that it met stand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from p2pavg.errors import CredentialError
from p2pavg.peer import advice
from p2pavg.peer.entering import first_links, role_among
from p2pavg.peer.refusals import LinkRefusals
from p2pavg.peer.settings import Settings
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


@pytest.mark.parametrize("linked", [True, False])
async def test_who_meets_only_those_that_are_not_accepted_does_not_start(
    linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody whose certificate is not accepted here, or who does not accept the one here, may be no member:
    with a link to another one that counts for nothing, else it is the reason why this peer does not start.
    """
    refusals = LinkRefusals(set, lambda: 0, lambda error: None, proven=True)
    endpoint: Any = SimpleNamespace(links={b"o": None} if linked else {})
    view: Any = SimpleNamespace(peers={})

    async def dial(done: Any) -> None:
        refusals.refused(b"f" * 20, CredentialError("the certificate has ended"))

    async def ask(*_: Any) -> list[Exception]:
        return []

    monkeypatch.setattr(advice, "ask", ask)
    dialler: Any = SimpleNamespace(first_links=dial)
    entering = first_links(dialler, refusals, endpoint, view, Settings("run", initial_peers=[]))
    if linked:
        await entering
    else:
        with pytest.raises(CredentialError, match="has ended"):
            await entering
