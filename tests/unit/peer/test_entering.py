"""As what a peer enters a run, from where those that it met stand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from p2pavg.errors import CredentialError
from p2pavg.peer import advice
from p2pavg.peer.announcing import enter
from p2pavg.peer.entering import first_links, role_among
from p2pavg.peer.refusals import LinkRefusals
from p2pavg.peer.settings import Settings
from p2pavg.peer.tensors import NoState
from p2pavg.rounds.protocol.roles import Role
from p2pavg.rounds.training import RunStart, TrainingSpec
from p2pavg.transport.links import handshake

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


async def closed_member(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(handshake.preamble(handshake.CONTROL, handshake.Party.of("run", closed=True)))


async def open_member(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(handshake.preamble(handshake.CONTROL, handshake.Party.of("run", closed=False)))


@pytest.mark.parametrize("welcomes", [(closed_member,), (closed_member, open_member), (open_member,)])
async def test_who_names_a_closed_run_alone_enters_no_open_one_of_its_name(welcomes: Sequence[Any]) -> None:
    """A peer without credentials that has links to an open run, which the table knew, hears that the run
    which it named is closed; if it named a member of the open one, too, it takes part there.
    """
    servers = [await asyncio.start_server(welcome, "127.0.0.1", 0) for welcome in welcomes]
    named = [f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    endpoint: Any = SimpleNamespace(links={b"o": None})
    view: Any = SimpleNamespace(peers={})
    refusals = LinkRefusals(set, lambda: 0, lambda error: None, proven=False)

    async def dial(done: Any) -> None:
        """There is a link already."""

    dialler: Any = SimpleNamespace(first_links=dial)
    entering = first_links(dialler, refusals, endpoint, view, Settings("run", initial_peers=named))
    if open_member in welcomes:
        await entering
    else:
        with pytest.raises(CredentialError, match="run is closed"):
            await entering
    for server in servers:
        server.close()


@pytest.mark.parametrize(("weighted", "agree"), [(True, True), (False, False)])
def test_calls_with_and_without_a_group_size_are_of_one_run(weighted: bool, agree: bool) -> None:
    """Each call of all_reduce says for itself how many it waits for, so a first call with a size meets one
    without; the target of an optimizer is the same on all peers.
    """
    told = []
    for size in (2, 1):
        hello: dict[str, Any] = {}
        spec = TrainingSpec(
            target_batch_size=size,
            numel=9,
            schema=b"s",
            initial_digest=b"d",
            compression="fp16",
            state=NoState(),
            weighted=weighted,
        )
        enter(hello, spec, RunStart(0, FIRST))
        told.append(hello["terms"])
    assert (told[0] == told[1]) is agree
