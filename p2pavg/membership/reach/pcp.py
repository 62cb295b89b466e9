"""PCP (RFC 6887): the request for a mapping, and its answer. Pure."""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass

VERSION = 2
NONCE_BYTES = 12
_MAP = 1
_RESPONSE = 0x80
_PROTOCOLS = {"tcp": 6, "udp": 17}
_REQUEST = struct.Struct("!BBHI16s12sB3xHH16s")
_ANSWER = struct.Struct("!BBBBII12x12sB3xHH16s")
_HEAD = struct.Struct("!BBBBII12x")

UNSUPPORTED_VERSION = 1
NOT_AUTHORIZED = 2
REASONS = {
    UNSUPPORTED_VERSION: "does not speak PCP",
    NOT_AUTHORIZED: "refuses (ports are switched off there, or another process had this one minutes ago)",
    3: "found the request malformed",
    4: "does not know the request",
    7: "has no connection to its provider",
    8: "has no more ports to give",
    9: "cannot map this protocol",
    10: "gave this machine as many ports as it may have",
    11: "cannot give the port that was asked for",
    12: "stands behind another translator that changes addresses",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """result: 0 is success, others are keys of `REASONS`. epoch_s: seconds since the gateway's table began.
    address, outside_port: where the mapping is reached. lease_s: seconds that it, or an error, lasts.
    """

    result: int
    epoch_s: int
    lease_s: int
    address: str = ""
    outside_port: int = 0


def _mapped(address: str) -> bytes:
    parsed = ipaddress.ip_address(address)
    return parsed.packed if parsed.version == 6 else bytes(10) + b"\xff\xff" + parsed.packed


def ask_port(
    own: str, protocol: str, inside_port: int, outside_port: int, lease_s: int, nonce: bytes
) -> bytes:
    """The request for a mapping, sent from the address `own`; lease_s 0 removes it.

    nonce: 12 bytes that nobody can guess, the same in all requests about one mapping.
    """
    anywhere = _mapped("0.0.0.0") if ipaddress.ip_address(own).version == 4 else bytes(16)
    number = _PROTOCOLS[protocol]
    return _REQUEST.pack(
        VERSION, _MAP, 0, lease_s, _mapped(own), nonce, number, inside_port, outside_port, anywhere
    )


def read(data: bytes, request: bytes) -> Answer | None:
    """The answer to `request` in a datagram; None: it is none.

    A gateway that knows other versions alone, such as NAT-PMP, says so in one of them.
    """
    if len(data) >= 4 and data[0] != VERSION and data[3] == UNSUPPORTED_VERSION:
        return Answer(UNSUPPORTED_VERSION, 0, 0)
    if len(data) < _HEAD.size or data[0] != VERSION or data[1] != _RESPONSE | _MAP:
        return None
    _, _, _, result, lease_s, epoch_s = _HEAD.unpack_from(data)
    if result == UNSUPPORTED_VERSION or len(data) < _ANSWER.size:
        return None  # of the versions, it speaks of another request's
    _, _, _, result, lease_s, epoch_s, nonce, number, inside, outside, address = _ANSWER.unpack_from(data)
    asked = _REQUEST.unpack(request)
    if (nonce, number, inside) != (asked[5], asked[6], asked[7]):
        return None
    if result:
        return Answer(result, epoch_s, lease_s)
    parsed = ipaddress.IPv6Address(address)
    return Answer(0, epoch_s, lease_s, str(parsed.ipv4_mapped or parsed), outside)
