"""`p2pavg reach HOST:PORT`."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from p2pavg.errors import AddressInUseError, ConfigurationError
from p2pavg.identity import Identity
from p2pavg.membership.reach.leases import SECRET, GatewayRefusal
from p2pavg.membership.reach.lessors import Lessors
from p2pavg.membership.table.address import (
    Address,
    format_host_port,
    interface_addresses,
    is_loopback,
    parse_host_port,
    wildcard,
)
from p2pavg.membership.table.dht import DHT
from p2pavg.peer.settings import DEFAULT_PORT
from p2pavg.transport.links.listening import TablePort

PORTS_TRIED = 64
ASKED = 4  # members, for where they see this machine
DYNAMIC_PORTS = (49152, 65535)
LEASE_S = 60  # of a port that is asked for to see whether the gateway gives one

Nat = Literal["none", "independent", "by destination", "unknown"]
Reach = Literal["open", "mapped", "out only", "unknown"]


@dataclass
class Found:
    """How others reach this machine.

    reach: "open": they open connections to its port; "mapped": they do once the gateway leads one here; "out
    only": they do not; "unknown": nobody could try. udp: whether UDP gets through. nat: what a router makes
    of this machine's ports: "none", the same for every destination ("independent"), or another for each ("by
    destination"). addresses: where others see it, "host:port". gateway: what it said about a port.
    """

    reach: Reach = "unknown"
    udp: bool = True
    nat: Nat = "unknown"
    addresses: list[str] = field(default_factory=list)
    gateway: str = ""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line's sub-parsers."""
    reach = subparsers.add_parser(
        "reach",
        description="Tells how others reach this machine: members of a swarm open a connection to it. Stop "
        "the peer that has the port first, or name another port that is open alike.",
        epilog="example: p2pavg reach 203.0.113.5:31330",
    )
    add = reach.add_argument
    add("member", metavar="HOST:PORT", help="any member of any run, or a bootstrap node")
    add("--port", type=int, default=DEFAULT_PORT, help="the port to try; default: %(default)d")
    add("--json", metavar="PATH", help="write what was found as JSON; - is stdout")
    reach.set_defaults(func=run_reach)


def run_reach(args: argparse.Namespace) -> int:
    """Ask, and tell."""
    member = parse_host_port(args.member)
    if not 0 <= args.port < 65536:
        raise ConfigurationError(
            f"--port {args.port} is no port; ports are 1 to 65535, and 0 is any free one"
        )
    found = look(member, args.port)
    if args.json is not None:
        document = json.dumps(asdict(found), indent=2)
        if args.json == "-":
            print(document)
            return 0
        try:
            Path(args.json).write_text(document + "\n")
        except OSError as error:
            raise ConfigurationError(f"{args.json} cannot be written: {error.strerror}") from None
    for line in told(found):
        print(line)
    return 0


def look(member: Address, port: int) -> Found:
    """Ask members how they reach `port` here. Raises UnreachableError, AddressInUseError."""
    return asyncio.run(_look(member, port))


async def _look(member: Address, port: int) -> Found:
    listening = _listen("127.0.0.1" if is_loopback(member[0]) else wildcard(), port)
    try:
        dht = await DHT.start(
            Identity.generate(),
            host=listening.host,
            port=listening.port,
            initial_peers=[member],
            attach=listening.attach,
        )
        try:
            return await _ask(dht)
        finally:
            await dht.stop()
    finally:
        await listening.close()


def _listen(host: str, port: int) -> TablePort:
    """There, or at the next free port."""
    for candidate in range(port, min(port + PORTS_TRIED, 65536)):
        try:
            return TablePort(host, candidate)
        except AddressInUseError:
            if not port:
                raise
    raise AddressInUseError(f"ports {port} and above are taken; name another one with --port")


async def _ask(dht: DHT) -> Found:
    seen = await _where(dht)
    tried = await dht.check_reachability()
    found = Found(udp=not dht.is_deaf, nat=_nat(dht, seen))
    found.addresses = [format_host_port(*address) for address in dht.external_addresses()]
    if tried.reachable:
        found.reach = "open"
        found.addresses = list(dict.fromkeys([tried.address, *found.addresses]))
    elif tried.reachable is False:
        found.reach = "out only"
        await _try_gateway(dht, found)
    return found


async def _try_gateway(dht: DHT, found: Found) -> None:
    """Ask the gateway for a port, have others try it, and give it back."""
    lessors = Lessors(secret=dht.identity.secret(SECRET))
    try:
        # Members remember for seconds that they did not get through to this node's own port.
        mapped = await lessors.lease("tcp", dht.port, random.randint(*DYNAMIC_PORTS), LEASE_S)
    except GatewayRefusal as refusal:
        found.gateway = str(refusal)
        return
    try:
        dht.mapped = mapped.address, mapped.port
        found.gateway = f"it leads {format_host_port(*dht.mapped)} here when asked"
        tried = (await dht.check_reachability()).tried
        led = [format_host_port(*a) for a, works in tried.items() if works and a[1] == mapped.port]
        if led:
            found.reach = "mapped"
            found.addresses = list(dict.fromkeys([*led, *found.addresses]))
        else:
            found.gateway += ", and others do not get through: another router stands before it"
    finally:
        try:
            await lessors.lease("tcp", dht.port, mapped.port, 0)
        except GatewayRefusal:
            found.gateway += f"; it did not confirm that the port is given back, which ends in {LEASE_S} s"


async def _where(dht: DHT) -> list[Address]:
    """At which addresses a few members see this node's UDP port, or its connections."""
    await dht.node.find(dht.identity.peer_id)
    members = [*dht.ways_in, *dht.node.contacts.nearest(dht.identity.peer_id, ASKED)]
    asked = list(dict.fromkeys(contact.address for contact in members))[:ASKED]
    answers = await asyncio.gather(*(dht.node.meet(address, tries=2) for address in asked))
    return [seen for _, seen in answers if seen is not None]


def _nat(dht: DHT, seen: list[Address]) -> Nat:
    if any(host in interface_addresses() for host, _ in seen):
        return "none"
    if dht.is_deaf or len(seen) < 2:
        return (
            "unknown"  # a connection's port tells nothing of the next one's, nor one member's word of others
        )
    return "independent" if len(set(seen)) == 1 else "by destination"


def told(found: Found) -> list[str]:
    """For people: how it is, and what to do."""
    where = found.addresses[0] if found.addresses else "this machine"
    lines = [_REACH[found.reach].format(where=where)]
    if found.reach == "open" and is_loopback(parse_host_port(where)[0]):
        return ["this machine alone was asked, which tells nothing of others: name a member elsewhere."]
    if found.reach == "out only":
        port = where.rpartition(":")[2]
        lines.append(f"To be reached, open or forward port {port} for TCP, and if possible for UDP.")
    if found.gateway:
        lines.append(f"The gateway: {found.gateway}.")
    if not found.udp:
        lines.append("UDP does not get through: the table of members travels over TCP, at a few bytes more.")
    if found.nat != "none":
        lines.append(_NAT[found.nat])
    return lines


_REACH: dict[Reach, str] = {
    "open": "open: others open connections to {where}. Nothing is to be done.",
    "mapped": "mapped: others open connections to {where}, which the gateway leads here when it is asked. "
    "Peers of closed runs ask by themselves; in an open run pass map_port=True.",
    "out only": "out only: others see this machine at {where} and cannot open connections to it. It takes "
    "part by dialling out; links to others in the same position are punched through, or relayed.",
    "unknown": "unknown: nobody could try to open a connection to this machine; try another member.",
}
_NAT: dict[Nat, str] = {
    "independent": "A router translates addresses, with one port for all: punching works with most others.",
    "by destination": "A router draws a new port for each destination: punching works with some others.",
    "unknown": "What a router makes of this machine's ports is not known: too few members could tell.",
}
