"""Sources and networks: the units of the internet to which whatever a stranger takes is counted.

Identities and ports are free, addresses are not; so whatever strangers may have here is counted to where they
are. Two sizes, and no others, are used for that everywhere:

- A *source* is what one customer gets: an IPv4 address, or a /64 of IPv6, of 2^64 addresses. Thousands may
  share an IPv4 address behind the NAT of a carrier. They count as one all the same, because nothing tells
  them from one machine with many ports; so a source's share must do for dozens of peers.
- A *network* is what one small owner gets: a /24 of IPv4, or a /48 of IPv6. Its share must do for a
  laboratory.

Addresses of IPv4 that are written in IPv6 (mapped, or behind NAT64) count as IPv4.
"""

from __future__ import annotations

import functools
import ipaddress

_OF_IPV4 = (0xFFFF, 0x64FF9B << 64)  # the first 96 bits of ::ffff:0:0/96 (mapped) and 64:ff9b::/96 (NAT64)
_PRIVATE = [
    ipaddress.ip_network(text)
    for text in (
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "169.254.0.0/16",
        "127.0.0.0/8",
        "fc00::/7",
        "fe80::/10",
        "::1/128",
    )
]


@functools.lru_cache(maxsize=8192)
def source_of(host: str) -> str:
    """The source of a numeric address: the address itself for IPv4, its /64 for IPv6.

    Any other text is a source of its own.
    """
    number = _ipv6_number(host)
    if number is None:
        return host
    embedded = _embedded_ipv4(number)
    return embedded if embedded is not None else f"{ipaddress.IPv6Address(number >> 64 << 64)}/64"


@functools.lru_cache(maxsize=8192)
def network_of(host: str) -> str:
    """The network of a numeric address: its /24 for IPv4, its /48 for IPv6.

    Any other text is a network of its own.
    """
    number = _ipv6_number(host)
    if number is not None:
        embedded = _embedded_ipv4(number)
        if embedded is None:
            return f"{ipaddress.IPv6Address(number >> 80 << 80)}/48"
        host = embedded
    try:
        return f"{ipaddress.IPv4Address(int(ipaddress.IPv4Address(host)) & 0xFFFFFF00)}/24"
    except ValueError:
        return host


@functools.lru_cache(maxsize=8192)
def is_private(host: str) -> bool:
    """Whether a numeric address is of a private network, of one link, or of this machine. Addresses that
    carriers share (100.64.0.0/10) are none of these: strangers have them.
    """
    number = _ipv6_number(host)
    host = (_embedded_ipv4(number) if number is not None else None) or host
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return any(address in network for network in _PRIVATE if network.version == address.version)


def is_public(host: str) -> bool:
    """Whether a numeric address is one of the internet: neither private, nor shared, nor set aside."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_global
    except ValueError:
        return False


def _ipv6_number(host: str) -> int | None:
    try:
        return int(ipaddress.IPv6Address(host.partition("%")[0])) if ":" in host else None
    except ValueError:
        return None


def _embedded_ipv4(number: int) -> str | None:
    """The IPv4 address that is written in an IPv6 address."""
    return str(ipaddress.IPv4Address(number & 0xFFFFFFFF)) if number >> 32 in _OF_IPV4 else None
