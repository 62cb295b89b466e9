"""Whom this machine can ask for a port: its gateway by PCP or NAT-PMP, else by UPnP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from p2pavg.membership.reach.gateway import default_gateway
from p2pavg.membership.reach.gateway_talk import Gateway
from p2pavg.membership.reach.leases import LEASE_S, GatewayRefusal, Lessor, Mapped
from p2pavg.membership.reach.upnp import Upnp


class Lessors:
    """Asks one after the other, and from then on whoever gave a port. The default route may change
    meanwhile.
    """

    def __init__(
        self,
        route: Callable[[], str | None] = default_gateway,
        at: Callable[[str], Lessor] | None = None,
        upnp: Lessor | None = None,
        *,
        secret: bytes = b"",
    ) -> None:
        """route: the address of the gateway now, None where there is none; at: how that one is asked. secret:
        as of `Gateway`.
        """
        self._route = route
        self._at = at or partial(Gateway, secret=secret)
        self._upnp = upnp or Upnp()
        self._gateway: tuple[str, Lessor] | None = None
        self._giver: Lessor | None = None

    async def lease(
        self, protocol: str, inside_port: int, outside_port: int, lease_s: int = LEASE_S
    ) -> Mapped:
        """As of `Gateway.lease`. Raises GatewayRefusal, which says what each of them said."""
        address = self._route()
        if address is None:
            self._giver = None
            raise GatewayRefusal("this machine has no gateway: no default route leads to one")
        if self._gateway is None or self._gateway[0] != address:
            self._gateway, self._giver = (address, self._at(address)), None
        refusals = []
        for lessor in [self._giver] if self._giver is not None else [self._gateway[1], self._upnp]:
            try:
                mapped = await lessor.lease(protocol, inside_port, outside_port, lease_s)
            except GatewayRefusal as refusal:
                refusals.append(str(refusal))
            else:
                self._giver = lessor
                return mapped
        self._giver = None
        raise GatewayRefusal("; ".join(refusals))
