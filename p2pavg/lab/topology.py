"""A lab's network: read from TOML, checked, turned into the router's configuration. Pure."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from p2pavg.errors import ConfigurationError
from p2pavg.lab import gateways as nat
from p2pavg.lab.gateways import Gateway

SUBNET = "10.77.0"
SUBNET6 = "fd77::"
LARGEST_LAB = 64
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")

# A user's setting -> the router's setting, and the factor between them.
PATH_SETTINGS: Mapping[str, tuple[str, float]] = {
    "delay_ms": ("delay_ns", 1e6),
    "jitter_ms": ("jitter_ns", 1e6),
    "rate_mbps": ("rate_bps", 1e6),
    "flow_rate_mbps": ("flow_bps", 1e6),
    "loss": ("loss", 1),
    "corrupt": ("corrupt", 1),
    "queue_kb": ("queue_bytes", 1e3),
    "shared": ("shared", 1),
    "down": ("down", 1),
}
NODE_SETTINGS: Mapping[str, tuple[str, float]] = {
    "egress_mbps": ("egress_bps", 1e6),
    "ingress_mbps": ("ingress_bps", 1e6),
    "queue_kb": ("queue_bytes", 1e3),
    "behind_nat": ("behind_nat", 1),
    "drop_udp": ("drop_udp", 1),
}
FAMILIES = ("4", "6", "both")


@dataclass(frozen=True)
class PathSettings:
    """One ordered pair of hosts. Rates count IP bytes, headers included; 0 is unlimited.

    delay_ms is one way. jitter_ms: uniform, plus or minus, never reordering a flow. loss: a share of packets.
    corrupt: a share in which one bit of the payload is flipped, unseen by the checksum. queue_kb: the bytes
    that may wait at a full rate before packets are dropped; 0 is one bandwidth-delay product. shared: paths
    with one number have rate_mbps together, as those out of a site with one uplink; 0: a path has its own.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    rate_mbps: float = 0.0
    flow_rate_mbps: float = 0.0
    loss: float = 0.0
    corrupt: float = 0.0
    queue_kb: float = 0.0
    shared: int = 0


@dataclass(frozen=True)
class NodeSettings:
    """One host. Its total rates of sending and receiving are in Mb/s; 0 is unlimited.

    behind_nat: only answers of TCP, UDP and ICMP flows that the host opened reach it; addresses are not
    translated. Hosts whose addresses are translated stand behind a `Gateway`. drop_udp: no datagram goes out
    or in. family: the host's addresses: IPv4, IPv6 or both.
    """

    egress_mbps: float = 0.0
    ingress_mbps: float = 0.0
    queue_kb: float = 0.0
    behind_nat: bool = False
    drop_udp: bool = False
    family: str = "4"


@dataclass(frozen=True)
class Topology:
    """A named network. `paths` has every ordered pair of different hosts, `nodes` every host.

    Between hosts behind different gateways a path leads from host to host, gateways included.
    """

    name: str
    description: str
    nodes: Mapping[str, NodeSettings]
    paths: Mapping[tuple[str, str], PathSettings]
    sysctls: Mapping[str, str] = field(default_factory=dict)
    mtu: int = 1500
    seed: int = 1
    gateways: Mapping[str, Gateway] = field(default_factory=dict)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names, in the order of their addresses."""
        return tuple(self.nodes)

    def address(self, host: str) -> str:
        """A host's own address: IPv4 where it has one. Raises ConfigurationError for an unknown host."""
        index = self.index(host)
        if self.nodes[host].family == "6":
            return self.address6(host)
        gateway = self.gateway_of(host)
        return nat.inside_address(self.gateways, gateway, host) if gateway else f"{SUBNET}.{index + 1}"

    def address6(self, host: str) -> str:
        """The IPv6 address of `host`; "" for one that has none."""
        index = self.index(host)
        return f"{SUBNET6}{index + 1:x}" if self.nodes[host].family in ("6", "both") else ""

    def gateway_of(self, host: str) -> str:
        """The gateway that `host` stands behind; "": none."""
        return next((name for name, gateway in self.gateways.items() if host in gateway.hosts), "")

    def index(self, host: str) -> int:
        if host not in self.nodes:
            raise ConfigurationError(
                f"There is no host {host!r} here; the hosts are {', '.join(self.hosts)}."
            )
        return self.hosts.index(host)

    def rtt_ms(self, a: str, b: str) -> float:
        """The propagation delay there and back, in ms."""
        return self.paths[a, b].delay_ms + self.paths[b, a].delay_ms

    def rate_mbps(self, src: str, dst: str, streams: int | None = None) -> float:
        """The most Mb/s of IP from src to dst over so many streams (None: any number); inf: no cap."""
        path = self.paths[src, dst]
        caps = [path.rate_mbps, self.nodes[src].egress_mbps, self.nodes[dst].ingress_mbps]
        if streams is not None:
            caps.append(streams * path.flow_rate_mbps)
        return min((cap for cap in caps if cap > 0), default=float("inf"))

    def smallest_rtt_ms(self) -> float:
        return min((self.rtt_ms(a, b) for a, b in self.paths), default=0.0)

    def scaled(self, factor: float) -> Topology:
        """The network with rates and queues times `factor`: `factor` times the bytes take as long."""
        nodes = {
            host: replace(
                node,
                egress_mbps=factor * node.egress_mbps,
                ingress_mbps=factor * node.ingress_mbps,
                queue_kb=factor * node.queue_kb,
            )
            for host, node in self.nodes.items()
        }
        paths = {
            pair: replace(
                path,
                rate_mbps=factor * path.rate_mbps,
                flow_rate_mbps=factor * path.flow_rate_mbps,
                queue_kb=factor * path.queue_kb,
            )
            for pair, path in self.paths.items()
        }
        return replace(self, nodes=nodes, paths=paths)

    def configuration(self) -> str:
        """The router's configuration file."""
        lines = [f"mtu {self.mtu}", f"seed {self.seed}"]
        lines += [
            f"host {host} {'-' if node.family == '6' else self.address(host)} {self.address6(host) or '-'}"
            for host, node in self.nodes.items()
        ]
        lines += [f"sysctl {key} {value}" for key, value in self.sysctls.items()]
        lines += nat.configuration(self.gateways)
        lines += [f"node {self.index(host)} {self._node_text(host)}" for host in self.hosts]
        lines += [
            f"path {self.index(src)} {self.index(dst)} {settings_text(vars(path), PATH_SETTINGS)}"
            for (src, dst), path in self.paths.items()
        ]
        return "\n".join(lines) + "\n"

    def _node_text(self, host: str) -> str:
        node = self.nodes[host]
        settings = {key: value for key, value in vars(node).items() if key != "family"}
        gateway = self.gateway_of(host)
        place = nat.ordered(self.gateways).index(gateway) + 1 if gateway else 0
        address = 0 if node.family == "6" else nat.number(self.address(host))
        return (
            f"{settings_text(settings, NODE_SETTINGS)} address={address} "
            f"v6={int(node.family != '4')} gateway={place}"
        )


def settings_text(settings: Mapping[str, Any], known: Mapping[str, tuple[str, float]]) -> str:
    """Settings as the router reads them. Raises ConfigurationError for an unknown or impossible one."""
    words = []
    for key, value in settings.items():
        if key not in known:
            raise ConfigurationError(f"There is no setting {key!r}; choose from {', '.join(known)}.")
        if not isinstance(value, (int, float)) or not 0 <= value < 1e12:
            raise ConfigurationError(f"{key} must be a number of at least 0, not {value!r}.")
        if key in ("loss", "corrupt") and value > 1:
            raise ConfigurationError(f"{key} is a fraction between 0 and 1, not {value}.")
        name, factor = known[key]
        words.append(f"{name}={float(value) * factor:.17g}")
    return " ".join(words)


def parse(text: str, name: str) -> Topology:
    """Read a topology from TOML. Raises ConfigurationError that names the fault and its place."""
    try:
        document = tomllib.loads(text)
        return _build(document, name)
    except (ConfigurationError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigurationError(f"Topology {name!r}: {error}") from None
    except LookupError as error:
        raise ConfigurationError(f"Topology {name!r}: {error} is not between two of its hosts") from None


def _build(document: dict[str, Any], name: str) -> Topology:
    unknown = set(document) - {
        *("description", "hosts", "groups", "nodes", "paths", "gateways", "sysctl", "mtu", "seed")
    }
    if unknown:
        raise ConfigurationError(f"unknown key {sorted(unknown)[0]!r}.")
    hosts: list[str] = document.get("hosts", [])
    if not 2 <= len(hosts) <= LARGEST_LAB or len(set(hosts)) != len(hosts):
        raise ConfigurationError(f"`hosts` must list 2 to {LARGEST_LAB} different names.")
    for host in hosts:
        if not _NAME.fullmatch(host):
            raise ConfigurationError(f"host {host!r}: use lower-case letters, digits, '-' and '_'.")
    groups: dict[str, list[str]] = document.get("groups", {})

    nodes = {host: NodeSettings() for host in hosts}
    gateways: dict[str, Gateway] = {}
    for table in document.get("nodes", []):
        chosen = _members(table.pop("hosts", "*"), hosts, groups)
        translated = "nat" in table
        mapping, filtering = nat.parse_nat(table.pop("nat", "independent/port"))
        if table.get("family", "4") not in FAMILIES:
            raise ConfigurationError(f"family is one of {', '.join(FAMILIES)}, as text.")
        settings_text({key: value for key, value in table.items() if key != "family"}, NODE_SETTINGS)
        for host in chosen:
            nodes[host] = replace(nodes[host], **table)
            if translated:
                gateways[f"{host}-gateway"] = Gateway((host,), mapping, filtering)
    for gateway, table in document.get("gateways", {}).items():
        if not _NAME.fullmatch(gateway):
            raise ConfigurationError(f"gateway {gateway!r}: use lower-case letters, digits, '-' and '_'.")
        chosen = _members(table.pop("hosts", []), hosts, groups)
        gateways[gateway] = nat.parse_gateway(gateway, table, chosen)
    nat.check(gateways)
    for gateway, made in gateways.items():
        wrong = [host for host in made.hosts if nodes[host].behind_nat or nodes[host].family == "6"]
        if wrong:
            raise ConfigurationError(
                f"host {wrong[0]!r} cannot stand behind {gateway!r}: it is behind_nat, or has no IPv4."
            )

    paths = {pair: PathSettings() for pair in itertools.permutations(hosts, 2)}
    for number, table in enumerate(document.get("paths", []), 1):
        pairs = _pairs(table, hosts, groups)
        if "rtt_ms" in table:
            table["delay_ms"] = table.pop("rtt_ms") / 2
        if not isinstance(table.get("shared", False), bool):
            raise ConfigurationError(f"shared is true or false, not {table['shared']!r}.")
        if "shared" in table:
            table["shared"] *= number
        settings_text(table, {key: value for key, value in PATH_SETTINGS.items() if key != "down"})
        for pair in pairs:
            paths[pair] = replace(paths[pair], **table)

    sysctls = {key: str(value) for key, value in document.get("sysctl", {}).items()}
    for key, value in sysctls.items():
        if not re.fullmatch(r"net(\.[a-z0-9_]+)+", key) or "\n" in value:
            raise ConfigurationError(
                f"sysctl {key!r}: only net.* settings can be set in a host, quoted as one key."
            )
    return Topology(
        name=name,
        description=document.get("description", ""),
        nodes=nodes,
        paths=paths,
        sysctls=sysctls,
        mtu=int(document.get("mtu", 1500)),
        seed=int(document.get("seed", 1)),
        gateways=gateways,
    )


def _members(
    words: str | Sequence[str], hosts: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> list[str]:
    chosen: list[str] = []
    for word in [words] if isinstance(words, str) else words:
        if word == "*":
            chosen += hosts
        elif word in groups:
            chosen += groups[word]
        elif word in hosts:
            chosen.append(word)
        else:
            raise ConfigurationError(f"{word!r} is neither a host nor a group.")
    return chosen


def _pairs(
    table: dict[str, Any], hosts: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> list[tuple[str, str]]:
    """The ordered pairs that a [[paths]] table selects; removes the selecting keys from the table."""
    if "between" in table:
        first, second = (_members(words, hosts, groups) for words in table.pop("between"))
        pairs = [*itertools.product(first, second), *itertools.product(second, first)]
    else:
        sources = _members(table.pop("from", "*"), hosts, groups)
        pairs = list(itertools.product(sources, _members(table.pop("to", "*"), hosts, groups)))
    return [(a, b) for a, b in pairs if a != b]


def shipped() -> list[str]:
    """Names of the topologies in the package."""
    folder = resources.files("p2pavg.lab") / "topologies"
    return sorted(
        entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")
    )


def load(name: str) -> Topology:
    """A topology by name, or by the path of a .toml file. Raises ConfigurationError when there is none."""
    if name.endswith(".toml"):
        try:
            return parse(Path(name).read_text(), Path(name).stem)
        except OSError as error:
            raise ConfigurationError(f"Cannot read the topology {name!r}: {error.strerror}.") from None
    if name not in shipped():
        raise ConfigurationError(
            f"There is no topology {name!r}; choose from {', '.join(shipped())}, or a .toml file."
        )
    return parse((resources.files("p2pavg.lab") / "topologies" / f"{name}.toml").read_text(), name)
