"""The gateway that this machine's packets to the internet go through."""

from __future__ import annotations

import ipaddress
from pathlib import Path

_ROUTES = Path("/proc/net/route")
_GATEWAY_FLAG = 0x2


def default_gateway(routes: str | None = None) -> str | None:
    """The IPv4 address of the default route's gateway with the lowest metric; None: there is none.

    routes: the text of /proc/net/route; None: this machine's, where it has that file (Linux).
    """
    if routes is None:
        try:
            routes = _ROUTES.read_text()
        except OSError:
            return None
    found: list[tuple[int, str]] = []
    for line in routes.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8:
            continue
        try:
            destination, gateway, flags = (int(field, 16) for field in fields[1:4])
            metric, mask = int(fields[6]), int(fields[7], 16)
        except ValueError:
            continue
        if destination == mask == 0 and flags & _GATEWAY_FLAG:
            address = ipaddress.IPv4Address(gateway.to_bytes(4, "little"))
            found.append((metric, str(address)))
    return min(found)[1] if found else None
