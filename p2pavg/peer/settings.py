"""Settings: what a user may say of a peer, checked before anything is opened."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from p2pavg import codecs, kinds
from p2pavg.allreduce.choosing import Topology
from p2pavg.codecs import Codec
from p2pavg.credentials import Credentials, from_environment
from p2pavg.errors import ConfigurationError, CredentialError
from p2pavg.extras import check_installed
from p2pavg.membership.peerinfo import MAX_ADDRESSES, MAX_NAME
from p2pavg.membership.table.address import (
    Address,
    initial_addresses,
    is_loopback,
    parse_addresses,
    parse_host_port,
    parse_listen,
    wildcard,
)
from p2pavg.printable import printable
from p2pavg.report import RoundReport
from p2pavg.report.prices import PriceTable

logger = logging.getLogger("p2pavg.peer.peer")
DEFAULT_PORT = 31330
DEFAULT_LISTEN = f"0.0.0.0:{DEFAULT_PORT}"
MOST_CHOSEN = 128  # streams of one link that `streams=` may ask for: both ends may ask
MAX_RUN_ID = 200


@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """The options that `Peer` and `CollaborativeOptimizer` share.

    An option is written here, as a field with its default, and described in the docstrings of those two
    classes; both take it then. Code on the event loop reads it from `Runtime.settings`.
    """

    initial_peers: Sequence[str] | str | None = None
    listen: str | None = DEFAULT_LISTEN
    announce: str | Sequence[str] | None = None
    map_port: bool | None = None
    client_only: bool = False
    region: str | None = None
    name: str | None = None
    compression: str | Codec = "fp16"
    streams: int | str = "auto"
    max_upload_mbps: float | None = None
    max_relay_mbps: float | None = None
    plan: str = "auto"
    prices: str | os.PathLike[str] | None = None
    metrics: str | None = None
    credentials: str | os.PathLike[str] | None = field(default=None, repr=False)  # may be the secret itself
    on_round: Callable[[RoundReport], None] | None = None

    def shared(self) -> dict[str, Any]:
        """The options of this class by name, without those that a class derived from it adds."""
        return {option.name: getattr(self, option.name) for option in fields(PeerOptions)}


@dataclass(frozen=True, kw_only=True)
class Settings(PeerOptions):
    """All options of `Peer`, checked, and what follows from them.

    Raises ConfigurationError for an option that cannot work, CredentialError for credentials that cannot.
    """

    run_id: str = field(kw_only=False)
    reports: str | os.PathLike[str] | None = None
    identity: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for option in ("name", "region"):
            if getattr(self, option) is None:
                object.__setattr__(self, option, os.environ.get(f"P2PAVG_{option.upper()}") or None)
        if not isinstance(self.run_id, str) or not 0 < len(self.run_id) <= MAX_RUN_ID:
            raise ConfigurationError(
                f"run_id must be a text of 1 to {MAX_RUN_ID} characters, the same on all peers"
            )
        streams = self.streams
        if streams != "auto" and (type(streams) is not int or not 1 <= streams <= MOST_CHOSEN):
            raise ConfigurationError(
                f'streams must be "auto" or an int from 1 to {MOST_CHOSEN}, not {kinds.seen(streams)}'
            )
        if self.map_port is not None and not isinstance(self.map_port, bool):
            raise ConfigurationError(f"map_port must be True, False or None, not {kinds.seen(self.map_port)}")
        check_rate("max_upload_mbps", self.max_upload_mbps)
        if not _is_zero(self.max_relay_mbps):
            check_rate("max_relay_mbps", self.max_relay_mbps)
        _ = self.topology, codecs.get(self.compression), self.label
        kinds.check_fields(self, PeerOptions)
        kinds.check_fields(self, Settings)
        _ = self.initial_addresses, self.price_table, self.metrics_place, self.most_peers
        _ = self.bind, self.announced, self.membership

    @cached_property
    def initial_addresses(self) -> tuple[Address, ...]:
        """(host, port) of each initial peer, of the environment when none is given."""
        return initial_addresses(self.initial_peers)

    @cached_property
    def most_peers(self) -> int | None:
        """How many peers a run may have when this one joins, of the environment; None: what is tested."""
        given = os.environ.get("P2PAVG_MOST_PEERS")
        return kinds.whole_of("P2PAVG_MOST_PEERS", given, 1, kinds.MOST_PEERS) if given else None

    @cached_property
    def bind(self) -> Address:
        """(host, port) to listen on; port 0: any free one."""
        if self.port_is_default or self.listen is None:
            return wildcard(), DEFAULT_PORT
        return parse_listen(self.listen)

    @property
    def port_is_default(self) -> bool:
        """Whether the user named no port, so that the next free one will do."""
        return self.listen is None or self.listen == DEFAULT_LISTEN

    @cached_property
    def announced(self) -> tuple[Address, ...]:
        """(host, port) that others are told, best first; none: what they see of this peer."""
        given = [self.announce] if isinstance(self.announce, str) else self.announce or ()
        if len(given) > MAX_ADDRESSES:
            raise ConfigurationError(
                f"announce= names {len(given)} addresses, and {MAX_ADDRESSES} fit; leave some out"
            )
        return parse_addresses(given)

    @property
    def maps_port(self) -> bool:
        """Whether the gateway is asked for a port."""
        if self.map_port is None:
            return self.membership is not None and not self.announced and not self.client_only
        return self.map_port

    @cached_property
    def membership(self) -> Credentials | None:
        """The credentials, loaded; None: the run is open."""
        source = self.credentials or from_environment()
        if source is None:
            return None
        loaded = Credentials.load(source)
        if loaded.run_id != self.run_id:
            raise CredentialError(
                f"these credentials are for run {loaded.run_id!r}, not {self.run_id!r}; use that run_id"
            )
        return loaded

    def warn_if_open(self) -> None:
        """Warn of a run that is open to others than this machine."""
        if self.membership is None and not is_loopback(self.bind[0]):
            logger.warning(
                "run %r is open: whoever reaches its ports can read its gradients and take part; "
                "close it with 'p2pavg credentials new' and credentials=",
                self.run_id,
            )

    @cached_property
    def label(self) -> str:
        """How people call this peer."""
        if self.name is None:
            return printable(socket.gethostname().partition(".")[0])[:MAX_NAME]
        if not isinstance(self.name, str) or not 0 < len(self.name) <= MAX_NAME:
            raise ConfigurationError(
                f"name must be a text of 1 to {MAX_NAME} characters, or None for the host's"
            )
        return printable(self.name)

    @property
    def streams_per_link(self) -> int | None:
        """TCP streams per link; None: as many as transfers call for."""
        return None if self.streams == "auto" else int(self.streams)

    @property
    def upload_bps(self) -> float | None:
        """Most bit/s over all links; None: what they carry."""
        return None if self.max_upload_mbps is None else 1e6 * self.max_upload_mbps

    @cached_property
    def topology(self) -> Topology:
        """How rounds that this peer leads are planned."""
        try:
            return Topology(self.plan)
        except ValueError:
            names = ", ".join(f'"{name}"' for name in Topology)
            raise ConfigurationError(f"plan must be one of {names}, not {kinds.seen(self.plan)}") from None

    @cached_property
    def price_table(self) -> PriceTable | None:
        """What traffic costs; None: not known."""
        if self.topology is Topology.CHEAPEST and self.prices is None:
            raise ConfigurationError('plan="cheapest" needs prices=, the path of a price table')
        return None if self.prices is None else PriceTable.load(self.prices)

    @cached_property
    def metrics_place(self) -> Address | None:
        """(host, port) at which metrics are served; None: nowhere."""
        if self.metrics is None:
            return None
        check_installed("Metrics need", "prometheus_client")
        return parse_host_port(self.metrics)

    @property
    def relay_bps(self) -> float | None:
        """Most bit/s that this peer carries for others; 0.0: none; None: a share of what is measured."""
        return None if self.max_relay_mbps is None else 1e6 * self.max_relay_mbps

    @property
    def reports_path(self) -> str | None:
        """The file to which reports are appended; None: no file."""
        path = os.environ.get("P2PAVG_REPORTS") if self.reports is None else self.reports
        return os.fspath(path) if path else None


def _is_zero(value: object) -> bool:
    return isinstance(value, int | float) and value == 0


def check_rate(name: str, value: object) -> None:
    """Raises ConfigurationError unless it is None or a number of Mb/s from 1 on."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and (not number or not 1 <= value <= kinds.MOST_MBPS):  # type: ignore[operator]
        raise ConfigurationError(
            f"{name} must be a number of Mb/s of at least 1, up to {kinds.MOST_MBPS:g}, or None, not "
            f"{kinds.seen(value)}"
        )
