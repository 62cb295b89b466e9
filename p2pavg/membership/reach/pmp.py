"""NAT-PMP (RFC 6886): what is asked of a gateway, and its answers. Pure."""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass

VERSION = 0
_OPCODES = {"udp": 1, "tcp": 2}
_RESPONSE = 128
_ADDRESS = struct.Struct("!BBHI4s")
_MAP = struct.Struct("!BBHHHI")
_MAPPED = struct.Struct("!BBHIHHI")

UNSUPPORTED_VERSION = 1
REASONS = {
    UNSUPPORTED_VERSION: "does not speak NAT-PMP",
    2: "refuses to map ports (it is switched off there)",
    3: "has no address from its provider",
    4: "has no more ports to give",
    5: "does not know the request",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a request.

    result: 0 is success, others are keys of `REASONS`. epoch_s: seconds since the gateway's table began.
    address: the outside address; "": it was not asked for. lease_s: seconds that the mapping lasts.
    """

    result: int
    epoch_s: int
    address: str = ""
    inside_port: int = 0
    outside_port: int = 0
    lease_s: int = 0


def ask_address() -> bytes:
    """The request for the gateway's outside address."""
    return bytes((VERSION, 0))


def ask_port(protocol: str, inside_port: int, outside_port: int, lease_s: int) -> bytes:
    """The request for a mapping; protocol is "tcp" or "udp". lease_s 0 removes it."""
    wanted = outside_port if lease_s else 0
    return _MAP.pack(VERSION, _OPCODES[protocol], 0, inside_port, wanted, lease_s)


def read(data: bytes, request: bytes) -> Answer | None:
    """The answer to `request` in a datagram; None: it is none.

    A gateway that knows PCP alone says so in that version.
    """
    if len(data) >= 4 and data[0] != VERSION and data[3] == UNSUPPORTED_VERSION:
        return Answer(UNSUPPORTED_VERSION, 0)
    if len(data) < 8 or data[0] != VERSION or data[1] != _RESPONSE | request[1]:
        return None
    _, _, result, epoch_s = struct.unpack_from("!BBHI", data)
    if result:
        return Answer(result, epoch_s)
    if request[1] == 0:
        return (
            Answer(0, epoch_s, str(ipaddress.IPv4Address(data[8:12]))) if len(data) >= _ADDRESS.size else None
        )
    if len(data) < _MAPPED.size or data[8:10] != request[4:6]:
        return None
    _, _, _, _, inside_port, outside_port, lease_s = _MAPPED.unpack_from(data)
    return Answer(0, epoch_s, "", inside_port, outside_port, lease_s)
