"""Internet addresses as people write them and as datagrams carry them."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import functools
import ipaddress
import itertools
import os
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from p2pavg.errors import AddressInUseError, ConfigurationError
from p2pavg.forkguard import guard
from p2pavg.networks import is_private

T = TypeVar("T")

SIOCGIFADDR = 0x8915
RECEIVE_BUFFER_BYTES = 1 << 20
EXAMPLE = "10.0.0.5:31330"
LAST_PORT = 65535
MOST_DIGITS = 20  # of a port, however wrong
WILDCARDS = ("0.0.0.0", "::")
_FAR = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}  # no machine has these
Address = tuple[str, int]  # numeric IPv4 or IPv6 address, port


def parse_host_port(text: str) -> tuple[str, int]:
    """Split "host:port" or "[ipv6]:port". Raises `ConfigurationError` naming the right form."""
    if "://" in text:
        raise ConfigurationError(f"{text!r} is a URL; write host:port alone, such as {EXAMPLE}")
    host, separator, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigurationError(f"{text!r} is ambiguous; write an IPv6 address as [address]:port")
    number = int(port) if port.isascii() and port.isdigit() and len(port) < MOST_DIGITS else None
    if not separator or number is None or not _can_be_host(host):
        raise ConfigurationError(f"{text!r} is not an address of a peer; write host:port, such as {EXAMPLE}")
    if not 0 < number <= LAST_PORT:
        raise ConfigurationError(
            f"{text!r} has port {number}, and ports are 1 to {LAST_PORT}; write host:port, such as {EXAMPLE}"
        )
    return host, number


def _can_be_host(text: str) -> bool:
    """Whether a resolver would take it."""
    try:
        text.encode("idna")
    except UnicodeError:  # a part between two dots is empty, or longer than 63
        return False
    return bool(text) and not any(c.isspace() or c in "/[]@" for c in text)


def parse_listen(text: str) -> tuple[str, int]:
    """As `parse_host_port`, of where to listen: port 0 stands for any free one."""
    head, _, tail = text.rpartition(":")
    if tail == "0" and head:
        return parse_host_port(f"{head}:1")[0], 0
    return parse_host_port(text)


def parse_addresses(texts: Iterable[str]) -> tuple[Address, ...]:
    """Each "host:port" as (host, port); a host may be a name. Raises `ConfigurationError`."""
    return tuple(parse_host_port(text) for text in texts)


def initial_addresses(given: Sequence[str] | str | None) -> tuple[Address, ...]:
    """The addresses of members that a user named; None: those in the environment.

    Raises `ConfigurationError` for one that is malformed.
    """
    if given is None:
        given = os.environ.get("P2PAVG_INITIAL_PEERS", "").replace(",", " ").split()
    return parse_addresses([given] if isinstance(given, str) else given)


def format_host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def normalise(sockaddr: tuple[object, ...]) -> Address:
    """A socket's address as (numeric host, port), IPv4 in IPv6 unwrapped."""
    host, port = str(sockaddr[0]), sockaddr[1]
    assert isinstance(port, int)
    if host.startswith("::ffff:") and "." in host:
        host = host[7:]
    return host, port


@functools.lru_cache(maxsize=4096)
def plain(host: str) -> str:
    """A numeric address as people write it, IPv4 in IPv6 unwrapped; a name as it is."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = address.ipv4_mapped if address.version == 6 else None
    return str(mapped or address)


@functools.lru_cache(maxsize=4096)
def can_be_of_peer(host: str) -> bool:
    """Whether a peer may be at a host: false for addresses that stand for all machines, or for none. Whoever
    dials the unspecified one gets to its own machine.
    """
    try:
        address = ipaddress.ip_address(plain(host))
    except ValueError:
        return True  # a name
    return not (address.is_multicast or address.is_unspecified or str(address) == "255.255.255.255")


@functools.lru_cache(maxsize=1024)
def is_link_local(host: str) -> bool:
    """Whether an address holds on one link only, so that nobody elsewhere can use it."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_link_local
    except ValueError:
        return False


def family_of(host: str) -> int:
    """4 or 6, of a numeric address."""
    return 6 if ":" in host else 4


def is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")


@functools.lru_cache(maxsize=4096)
def is_numeric(host: str) -> bool:
    """Whether a host is an address rather than a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def resolve(host: str, port: int) -> list[Address]:
    """The numeric addresses of a host name, in the order that the system prefers; empty when it has none."""
    if is_numeric(host):
        return [(host, port)]
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    return list(dict.fromkeys(normalise(sockaddr) for *_, sockaddr in found))


@functools.lru_cache(maxsize=8192)
def pack_address(address: Address) -> bytes:
    """18 bytes: the address as IPv6 (IPv4 mapped), and the port."""
    host, port = address
    if ":" in host:
        raw = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    else:
        raw = b"\x00" * 10 + b"\xff\xff" + socket.inet_pton(socket.AF_INET, host)
    return raw + port.to_bytes(2, "big")


PACKED_ADDRESS_BYTES = 18


@functools.lru_cache(maxsize=8192)
def unpack_address(data: bytes) -> Address | None:
    """The inverse of `pack_address`; None for addresses that no peer can have (port 0, multicast,
    unspecified).
    """
    if len(data) != PACKED_ADDRESS_BYTES:
        return None
    host = plain(str(ipaddress.IPv6Address(data[:16])))
    port = int.from_bytes(data[16:], "big")
    return (host, port) if port and can_be_of_peer(host) else None


def primary_address(family: socket.AddressFamily = socket.AF_INET) -> str | None:
    """This machine's own address, IPv4 or IPv6, on the way to the internet; no packet is sent.

    Without such a way, the IPv4 address of its first interface that is not loopback; None: it has none.
    """
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((_FAR[family], 9))
            own = str(probe.getsockname()[0])
            return None if is_link_local(own) else own
    except OSError:
        if family == socket.AF_INET6:
            return None
        usable = (host for host in interface_addresses() if ":" not in host)
        return next((host for host in usable if not is_loopback(host)), None)


def wildcard() -> str:
    """Where a peer listens unless it is told: on all addresses of both families, or, where the system has no
    IPv6, on those of IPv4.
    """
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(("::", 0))
    except OSError:
        return "0.0.0.0"
    return "::"


def own_addresses(host: str) -> list[str]:
    """The addresses of this machine at which a socket that listens on `host` may be reached: those on the way
    to the internet where it is a wildcard, and else that one.
    """
    if host not in WILDCARDS:
        return [host]
    families = (socket.AF_INET, socket.AF_INET6) if host == "::" else (socket.AF_INET,)
    found = [address for family in families if (address := primary_address(family)) is not None]
    return found or ["127.0.0.1"]


def families_in_turn(found: Sequence[T], family: Callable[[T], int]) -> list[T]:
    """Addresses of one family and of the others in turn, beginning with that of the first: either may lead
    nowhere.
    """
    first = [one for one in found if family(one) == family(found[0])]
    rest = [one for one in found if family(one) != family(found[0])]
    pairs = itertools.zip_longest(first, rest)
    return [one for pair in pairs for one in pair if one is not None]


def behind_one_router(theirs: Sequence[Address], own: Sequence[Address]) -> list[Address]:
    """Their addresses inside of a network that both are in: who is seen at one address outside stands behind
    one router. Few routers lead a connection to their own outside address back inside.
    """
    if not theirs or not own:
        return []
    outside = own[0][0] if own[0][0] in {host for host, _ in theirs} else theirs[0][0]
    if outside not in {host for host, _ in own}:
        return []
    return [
        a for a in theirs if a[0] != outside and family_of(a[0]) == family_of(outside) and is_private(a[0])
    ]


def interface_addresses() -> list[str]:
    """The addresses of this machine's interfaces, IPv4 first, without those that hold on one link only."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode())
                host = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
            except OSError:
                continue  # an interface without an IPv4 address
            if not is_link_local(host):
                found.append(host)
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return found  # this system has no IPv6, or does not tell
    hosts = [ipaddress.IPv6Address(bytes.fromhex(line.split()[0])) for line in lines]
    return found + [str(host) for host in hosts if not host.is_link_local]


def bind(host: str, port: int) -> socket.socket:
    """A UDP socket there. Raises AddressInUseError, ConfigurationError."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host!r} ({error}); name an address of this machine"
        ) from error
    bound = guard(socket.socket(info[0], socket.SOCK_DGRAM))
    try:
        if info[0] == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        bound.setblocking(False)
        bound.bind(info[4])
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(
                f"UDP port {port} is taken; stop the other program or choose another port"
            ) from error
        raise ConfigurationError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another address"
        ) from error
    return bound
