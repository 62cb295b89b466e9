"""What a gateway gives: a port that leads here, for a while."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from p2pavg.errors import P2PAvgError

SECRET = "gateway"  # of a peer's identity, that it shows to gateways
LEASE_S = 600  # a peer that crashed leaves its mapping behind for so long


class GatewayRefusal(P2PAvgError):
    """The gateway gives no port; the message says why."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A port of the gateway that leads to this machine.

    epoch_s: how long ago the gateway's table began; falls when it restarted and forgot the mapping.
    """

    address: str
    port: int
    lease_s: float
    epoch_s: int


class Lessor(Protocol):
    """Who can be asked for a port."""

    async def lease(
        self, protocol: str, inside_port: int, outside_port: int, lease_s: int = LEASE_S
    ) -> Mapped:
        """A mapping to `inside_port` of this machine, "tcp" or "udp"; `outside_port` where that is free.

        lease_s: 0 removes the mapping. Raises GatewayRefusal.
        """
