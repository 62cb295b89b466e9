"""Settings: how a peer takes its place in a swarm, checked before anything is opened."""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from p2pavg.credentials import Credentials, from_environment
from p2pavg.errors import ConfigurationError, CredentialError
from p2pavg.membership.peerinfo import MAX_NAME
from p2pavg.membership.table.address import is_loopback, parse_host_port, wildcard
from p2pavg.printable import printable

logger = logging.getLogger("p2pavg.peer.peer")
DEFAULT_PORT = 31330
DEFAULT_LISTEN = f"0.0.0.0:{DEFAULT_PORT}"
MAX_STREAMS = 128
MAX_RUN_ID = 200


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user said, in the shape that `place.Place` needs."""

    run_id: str
    initial_peers: tuple[str, ...]
    host: str
    port: int
    port_is_default: bool
    announce: tuple[str, int] | None
    client_only: bool
    region: str
    streams: int | None  # per link; None: as many as transfers call for
    credentials: Credentials | None
    name: str = ""
    upload_bps: float | None = None  # bit/s over all links; None: what they carry


def settings(
    run_id: str,
    initial_peers: Sequence[str] | None,
    listen: str | None,
    announce: str | None,
    client_only: bool,
    region: str | None,
    streams: int | str,
    credentials: str | os.PathLike[str] | None,
    max_upload_mbps: float | None = None,
    name: str | None = None,
) -> Settings:
    """As `peer.Peer` describes its arguments. Raises ConfigurationError, CredentialError."""
    if not isinstance(run_id, str) or not 0 < len(run_id) <= MAX_RUN_ID:
        raise ConfigurationError(
            f"run_id must be a text of 1 to {MAX_RUN_ID} characters, the same on all peers"
        )
    if initial_peers is None:
        initial_peers = os.environ.get("P2PAVG_INITIAL_PEERS", "").replace(",", " ").split()
    if isinstance(initial_peers, str):
        initial_peers = [initial_peers]
    for address in initial_peers:
        parse_host_port(address)
    if streams != "auto" and (type(streams) is not int or not 1 <= streams <= MAX_STREAMS):
        raise ConfigurationError(f'streams must be "auto" or an int from 1 to {MAX_STREAMS}, not {streams!r}')
    check_rate("max_upload_mbps", max_upload_mbps)
    if listen == DEFAULT_LISTEN:
        listen = None
    host, port = _listen(listen)
    return Settings(
        run_id=run_id,
        initial_peers=tuple(initial_peers),
        host=host,
        port=port,
        port_is_default=listen is None,
        announce=None if announce is None else parse_host_port(announce),
        client_only=bool(client_only),
        region=region or "",
        streams=None if streams == "auto" else int(streams),
        credentials=_credentials(run_id, credentials, host),
        name=_name(name),
        upload_bps=None if max_upload_mbps is None else 1e6 * max_upload_mbps,
    )


def check_rate(name: str, value: object) -> None:
    """Raises ConfigurationError unless it is None or a number of Mb/s, at least 1."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and (not number or not 1 <= value < math.inf):  # type: ignore[operator]
        raise ConfigurationError(f"{name} must be a number of Mb/s of at least 1, or None, not {value!r}")


def _name(name: str | None) -> str:
    if name is None:
        return printable(socket.gethostname().partition(".")[0])[:MAX_NAME]
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise ConfigurationError(f"name must be a text of 1 to {MAX_NAME} characters, or None for the host's")
    return printable(name)


def _listen(listen: str | None) -> tuple[str, int]:
    if listen is None:
        return wildcard(), DEFAULT_PORT
    head, _, tail = listen.rpartition(":")
    if tail == "0" and head:  # any free port: no address of a peer, but one to listen on
        return parse_host_port(f"{head}:1")[0], 0
    return parse_host_port(listen)


def _credentials(run_id: str, source: str | os.PathLike[str] | None, host: str) -> Credentials | None:
    source = source or from_environment()
    if source is None:
        if not is_loopback(host):
            logger.warning(
                "run %r is open: whoever reaches its ports can read its gradients and take part; "
                "close it with 'p2pavg credentials new' and credentials=",
                run_id,
            )
        return None
    loaded = Credentials.load(source)
    if loaded.run_id != run_id:
        raise CredentialError(
            f"these credentials are for run {loaded.run_id!r}, not {run_id!r}; use that run_id"
        )
    return loaded
