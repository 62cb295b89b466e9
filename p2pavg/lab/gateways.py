"""Gateways of a lab: routers that translate the addresses of the hosts behind them. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from p2pavg.errors import ConfigurationError

HOME = "192.168.1"  # addresses behind a gateway, as in most homes; several homes may use the same ones
CARRIER = "100.64.1"  # addresses behind a gateway that serves other gateways (RFC 6598)
PUBLIC = "10.77.1"  # outside addresses of gateways
MOST = 64


class Dependence(StrEnum):
    """The part of the remote address that a port mapping, or a filter, depends on (RFC 4787, 4.1 and 5)."""

    INDEPENDENT = "independent"  # one mapping for all destinations; every remote address may send to it
    ADDRESS = "address"
    PORT = "port"  # depends on the remote address and port


class PortMapping(StrEnum):
    """The protocol by which hosts may ask a gateway for a port."""

    NONE = "none"
    PMP = "pmp"  # RFC 6886
    PCP = "pcp"  # RFC 6887
    BOTH = "both"


@dataclass(frozen=True)
class Gateway:
    """A router that translates addresses, in front of hosts or of other gateways.

    hairpin: hosts behind it reach each other at its outside address. early_syn: an uninvited TCP connection
    is dropped ("drop") or refused ("reset"). udp_s, tcp_s: seconds after which an idle mapping ends.
    """

    hosts: tuple[str, ...]
    mapping: Dependence = Dependence.INDEPENDENT
    filtering: Dependence = Dependence.PORT
    behind: str = ""
    hairpin: bool = True
    early_syn: str = "drop"
    port_mapping: PortMapping = PortMapping.NONE
    udp_s: float = 30.0
    tcp_s: float = 300.0


def parse_nat(text: object) -> tuple[Dependence, Dependence]:
    """ "MAPPING/FILTERING". Raises ConfigurationError."""
    mapping, slash, filtering = text.partition("/") if isinstance(text, str) else ("", "", "")
    try:
        if slash:
            return Dependence(mapping), Dependence(filtering)
    except ValueError:
        pass
    known = ", ".join(Dependence)
    raise ConfigurationError(f"nat is MAPPING/FILTERING, each one of {known}, not {text!r}.")


def parse_gateway(name: str, table: dict[str, Any], hosts: Sequence[str]) -> Gateway:
    """One [gateways.NAME] table whose hosts were looked up. Raises ConfigurationError."""
    known = {"nat", "behind", "hairpin", "early_syn", "port_mapping", "udp_s", "tcp_s"}
    unknown = table.keys() - known
    if unknown:
        raise ConfigurationError(
            f"gateway {name!r}: there is no setting {sorted(unknown)[0]!r}; choose from hosts, "
            f"{', '.join(sorted(known))}."
        )
    mapping, filtering = parse_nat(table.pop("nat", "independent/port"))
    if table.get("early_syn", "drop") not in ("drop", "reset"):
        raise ConfigurationError(f"gateway {name!r}: early_syn is 'drop' or 'reset'.")
    asked = table.pop("port_mapping", False)
    words: dict[object, PortMapping] = {False: PortMapping.NONE, True: PortMapping.BOTH}
    words |= {str(word): word for word in PortMapping}
    if not isinstance(asked, (bool, str)) or asked not in words:
        raise ConfigurationError(f"gateway {name!r}: port_mapping is one of {', '.join(PortMapping)}.")
    for key in ("udp_s", "tcp_s"):
        if not isinstance(table.get(key, 1.0), (int, float)) or not 0 < table.get(key, 1.0) < 1e6:
            raise ConfigurationError(f"gateway {name!r}: {key} must be a number of seconds above 0.")
    return Gateway(tuple(hosts), mapping, filtering, port_mapping=words[asked], **table)


def check(gateways: Mapping[str, Gateway]) -> None:
    """Raises ConfigurationError where gateways stand behind each other in a circle, or a host behind two."""
    if len(gateways) > MOST:
        raise ConfigurationError(f"a lab has at most {MOST} gateways.")
    seen: set[str] = set()
    for name, gateway in gateways.items():
        twice = seen.intersection(gateway.hosts)
        if twice:
            raise ConfigurationError(f"host {sorted(twice)[0]!r} stands behind two gateways.")
        seen.update(gateway.hosts)
        outer, steps = gateway.behind, 0
        while outer:
            if outer not in gateways:
                raise ConfigurationError(f"gateway {name!r} stands behind {outer!r}, which is no gateway.")
            outer, steps = gateways[outer].behind, steps + 1
            if steps > len(gateways):
                raise ConfigurationError(f"gateway {name!r} stands behind itself.")


def ordered(gateways: Mapping[str, Gateway]) -> list[str]:
    """Gateway names in an order in which every gateway follows the one that it stands behind."""
    names: list[str] = []
    while len(names) < len(gateways):
        names += [n for n, g in gateways.items() if n not in names and (not g.behind or g.behind in names)]
    return names


def inside_network(gateways: Mapping[str, Gateway], name: str) -> str:
    """The first three numbers of every address behind a gateway."""
    return CARRIER if any(gateway.behind == name for gateway in gateways.values()) else HOME


def inside_address(gateways: Mapping[str, Gateway], name: str, host: str) -> str:
    """The address of a host behind the gateway."""
    return f"{inside_network(gateways, name)}.{100 + gateways[name].hosts.index(host)}"


def outside_address(gateways: Mapping[str, Gateway], name: str) -> str:
    """The outside address of a gateway."""
    outer = gateways[name].behind
    siblings = [other for other in ordered(gateways) if gateways[other].behind == outer]
    network = inside_network(gateways, outer) if outer else PUBLIC
    return f"{network}.{siblings.index(name) + 2}"


def configuration(gateways: Mapping[str, Gateway]) -> list[str]:
    """Lines of the router's configuration, one for each gateway."""
    names = ordered(gateways)
    order = list(Dependence)
    lines = []
    for name in names:
        gateway = gateways[name]
        settings = {
            "inside": number(f"{inside_network(gateways, name)}.1"),
            "external": number(outside_address(gateways, name)),
            "parent": names.index(gateway.behind) + 1 if gateway.behind else 0,
            "mapping": order.index(gateway.mapping),
            "filtering": order.index(gateway.filtering),
            "hairpin": int(gateway.hairpin),
            "resets": int(gateway.early_syn == "reset"),
            "pmp": int(gateway.port_mapping in (PortMapping.PMP, PortMapping.BOTH)),
            "pcp": int(gateway.port_mapping in (PortMapping.PCP, PortMapping.BOTH)),
            "udp_idle_ns": f"{gateway.udp_s * 1e9:.0f}",
            "tcp_idle_ns": f"{gateway.tcp_s * 1e9:.0f}",
        }
        lines.append(f"gateway {name} " + " ".join(f"{key}={value}" for key, value in settings.items()))
    return lines


def number(address: str) -> int:
    """An IPv4 address as the router reads it in settings. Raises ConfigurationError."""
    try:
        return int(ipaddress.IPv4Address(address))
    except ValueError:
        raise ConfigurationError(f"{address!r} is no IPv4 address.") from None
