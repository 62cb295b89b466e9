"""Why a newcomer finds nobody to train with: it asks at the TCP ports of the initial peers, and tells its
user.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Sequence

from p2pavg import codecs
from p2pavg.allreduce.choosing import Topology
from p2pavg.allreduce.regions import can_stack
from p2pavg.errors import (
    ConfigurationError,
    CredentialError,
    IdentityInUseError,
    IncompatiblePeerError,
    P2PAvgError,
    UnreachableError,
)
from p2pavg.membership.table.address import Address, format_host_port
from p2pavg.peer.settings import Settings
from p2pavg.plan import MOST_FLAT, MOST_GATHERED, MOST_MEMBERS
from p2pavg.rounds.protocol.roles import Role
from p2pavg.transport.links import handshake
from p2pavg.transport.links.endpoint import Endpoint

logger = logging.getLogger("p2pavg.peer.peer")

LOOPBACK = "127.0.0.1"
ASK_TIMEOUT_S = 5.0
BESIDE_TIMEOUT_S = 1.0  # for a peer of this machine


def check_room(settings: Settings, regions: Sequence[str]) -> None:
    """Raises ConfigurationError when a run has as many peers as it can have.

    regions: as the run's trainers and this peer name theirs.
    """
    run, trainers = settings.run_id, len(regions) - 1
    if codecs.is_sparse(codecs.get(settings.compression)) and trainers >= MOST_GATHERED:
        raise ConfigurationError(
            f"run {run!r} has {trainers} peers, and Outer(density=) takes at most {MOST_GATHERED}, as each "
            'sends its contribution to all others; more can train with another run_id and outer="diloco"'
        )
    stacked = settings.topology is not Topology.FLAT and can_stack(regions)
    most = settings.most_peers or (MOST_MEMBERS if stacked else MOST_FLAT)
    if trainers < most:
        return
    if settings.most_peers:
        raise ConfigurationError(
            f"run {run!r} has {trainers} peers, and P2PAVG_MOST_PEERS is {most}; take another run_id, or try "
            "again a minute after one has left"
        )
    if stacked:
        raise ConfigurationError(
            f"run {run!r} has {trainers} peers, and more than {most} are not tested; take another run_id, or "
            "try again a minute after one has left"
        )
    raise ConfigurationError(
        f"run {run!r} has {trainers} peers, and more than {most} are not tested with a flat plan; pass "
        f"region= to all peers, as two levels over regions take {MOST_MEMBERS}, or take another run_id, or "
        "set P2PAVG_MOST_PEERS to try more"
    )


async def knock(host: str, port: int, party: handshake.Party) -> None:
    """Exchange the first bytes of a connection with a peer, and no more.

    Raises UnreachableError when no peer answers, IncompatiblePeerError (another version or run) and
    CredentialError when it would not take us in.
    """
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(handshake.preamble(handshake.CONTROL, party))
                handshake.parse_preamble(await reader.readexactly(handshake.PREAMBLE_BYTES), party)
            finally:
                writer.close()
    except handshake.Refusal as refusal:
        raise refusal.error() from None
    except (P2PAvgError, OSError, TimeoutError, EOFError) as error:
        raise UnreachableError(f"no peer answers at {format_host_port(host, port)} over TCP") from error


async def warn_of_run_beside(ports: Iterable[int], run_id: str, *, closed: bool) -> None:
    """Warn a peer that was given no initial peers, and begins its run, of one that trains in a run of that
    name on this machine. ports: those at which a peer may listen. closed: this peer has credentials.
    """
    party = handshake.Party.of(run_id, closed=closed)

    async def trains_at(port: int) -> bool:
        try:
            async with asyncio.timeout(BESIDE_TIMEOUT_S):
                await knock(LOOPBACK, port, party)
        except CredentialError:
            return True  # a run of that name, whose credentials this peer does not have
        except (P2PAvgError, TimeoutError):
            return False
        return True

    asked = list(ports)
    found = await asyncio.gather(*(trains_at(port) for port in asked))
    for port in [port for port, trains in zip(asked, found, strict=True) if trains][:1]:
        address = format_host_port(LOOPBACK, port)
        logger.warning(
            "run %r has a peer at %s on this machine, and this peer, which was given no initial peers, "
            "trains apart from it; to train together pass initial_peers=%r",
            run_id,
            address,
            address,
        )


@contextlib.asynccontextmanager
async def asking_whether_closed(
    named: Sequence[Address], run_id: str
) -> AsyncIterator[list[CredentialError]]:
    """Ask at all addresses that a peer without credentials was given, beside the body: what the list holds
    afterwards is why none of them takes it in. An open run of that name, which their tables may know, is then
    not the one that its user means.
    """
    refused: list[CredentialError] = []
    party = handshake.Party.of(run_id, closed=False)
    knocks = [asyncio.create_task(knock(host, port, party)) for host, port in named]
    try:
        yield refused
        if knocks:
            await asyncio.wait(knocks, timeout=BESIDE_TIMEOUT_S)
    finally:
        for task in knocks:
            task.cancel()
        told = await asyncio.gather(*knocks, return_exceptions=True)
    if not any(answer is None for answer in told):
        refused += [answer for answer in told if isinstance(answer, CredentialError)]


async def silent(
    initial_peers: Iterable[Address], party: handshake.Party, told: UnreachableError
) -> P2PAvgError:
    """The error for a newcomer whom no initial peer's table answered. told: without a closer look."""
    for host, port in initial_peers:
        try:
            await knock(host, port, party)
        except UnreachableError:
            continue
        except P2PAvgError as error:
            return error
    return UnreachableError(f"{told}, or start a new swarm without initial_peers")


async def ask(endpoint: Endpoint, initial_peers: Iterable[Address], run_id: str) -> list[P2PAvgError]:
    """Ask at the initial peers' addresses, as the table knows nobody of the run; returns why they refuse this
    peer.
    """
    refusals: list[P2PAvgError] = []
    own = []
    named = list(initial_peers)
    for host, port in named:
        address = format_host_port(host, port)
        try:
            link = await endpoint.connect(host, port, timeout=ASK_TIMEOUT_S)
            if link.hello.get("role") == Role.WATCHER.value:
                link.close("it does not train yet; when it does, its hello is another")
        except IncompatiblePeerError as error:
            if str(error) != handshake.OTHER_RUN:
                refusals.append(error)
                continue
            logger.warning(
                "%s is in another run, and nobody of run %r was found: this peer begins it alone; check "
                "run_id if it should have joined others",
                address,
                run_id,
            )
        except (CredentialError, IdentityInUseError) as error:
            refusals.append(error)
        except ConfigurationError:
            own.append(address)
        except (P2PAvgError, OSError, TimeoutError) as error:
            logger.debug("%s is no trainer of this run: %s", address, error)
    if own and len(own) == len(named):
        refusals.append(
            ConfigurationError(
                f"{own[0]} is this peer's own address, where it would meet itself alone: the peer that you "
                "mean does not run there, or its port has moved (look at what it printed); name a member "
                "that runs, or no initial_peers to start a new run"
            )
        )
    return refusals
