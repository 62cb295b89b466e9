"""Hole punching: which pairs of NATs can be passed, whom to dial, and when. Pure.

Both sides dial at the same moment, each from a port whose outside address a third member told. A NAT lets
in what its host has called, so each side's SYN opens the way for the other's (TCP simultaneous open, RFC
9293; RFC 5382 asks NATs to support it). The words for NATs are those of RFC 4787 and RFC 5382.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from p2pavg.errors import ProtocolError, UnreachableError
from p2pavg.identity import PEER_ID_BYTES
from p2pavg.membership.table.address import can_be_of_peer, is_link_local, is_loopback, plain
from p2pavg.transport.links.handshake import is_address

Address = tuple[str, int]

BURSTS = 3
LEAST_BURST_S = 0.25  # a SYN that came too early was dropped or refused: the next one is not
MOST_BURST_S = 2.0
MOST_RTT_S = 5.0
MOST_DIALS = 8  # of one address in a burst; whoever refuses so many is nobody who wants to meet
REFUSED_PAUSE_S = 0.02  # after the first early SYN that was answered by RST; half as long again each time
HEAD_START_S = 3.0
RELAYED_S = 2.7  # a relayed link is to be there so long after the two know of each other
PUNCHED_TRIPS, RELAYED_TRIPS = 6, 8  # round trips through the third member that it takes, once begun
MOST_ADDRESSES = 2  # of one side: outside, and inside of its NAT


class Dependence(StrEnum):
    """What a mapping of a port, or a filter, depends on: nothing, the other's address, or its port too."""

    INDEPENDENT = "independent"
    ADDRESS = "address"
    PORT = "port"


@dataclass(frozen=True, slots=True)
class Nat:
    """How a NAT maps ports and whom it lets in."""

    mapping: Dependence
    filtering: Dependence


def can_meet(one: Nat, other: Nat) -> bool:
    """Whether two peers behind these NATs can be connected by simultaneous open, by the logic of RFC 5382.

    A port that is mapped by destination cannot be told in advance, so at most one side may have one, and the
    other side must let in whatever port of a known address calls.
    """
    known = [nat.mapping is Dependence.INDEPENDENT for nat in (one, other)]
    if all(known):
        return True
    if not any(known):
        return False
    told = one if known[0] else other
    return told.filtering is not Dependence.PORT


@dataclass(frozen=True, slots=True)
class Offer:
    """One side of a meeting: where it can be dialled, who told it so, and how long a word takes."""

    at: tuple[Address, ...]  # outside first, then inside of its NAT
    observer: bytes  # the member that told the outside address
    rtt_s: float  # of a question to the other side and back

    def to_message(self) -> dict[str, Any]:
        return {"at": [list(address) for address in self.at], "by": self.observer, "rtt": self.rtt_s}


def parse_offer(message: dict[str, Any]) -> Offer:
    """Raises ProtocolError for what no correct peer offers."""
    observer, rtt = message.get("by"), message.get("rtt")
    if not isinstance(observer, bytes) or len(observer) != PEER_ID_BYTES:
        raise ProtocolError("a meeting without an observer")
    if not isinstance(rtt, float) or not 0 <= rtt <= MOST_RTT_S:
        raise ProtocolError("a meeting at an impossible time")
    return Offer(parse_addresses(message.get("at")), observer, rtt)


def parse_addresses(value: object) -> tuple[Address, ...]:
    """Raises ProtocolError."""
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_ADDRESSES:
        raise ProtocolError("a meeting without addresses")
    found = []
    for address in value:
        if not isinstance(address, list) or len(address) != 2 or not is_address(*address):
            raise ProtocolError("a meeting at an address that is none")
        found.append((address[0], address[1]))
    if not all(is_inside(host) for host, _ in found[1:]):
        raise ProtocolError("a meeting inside of a NAT at an address that is outside")
    return tuple(found)


def targets(mine: Sequence[Address], theirs: Sequence[Address]) -> list[Address]:
    """Whom to dial. Two peers that are seen at one outside address stand behind the same NAT: their inside
    addresses may lead to each other, and NATs that hairpin are rare.
    """
    outside, inside = theirs[0], theirs[1:]
    return [outside, *(inside if outside[0] == mine[0][0] else ())]


def on_word(found: Sequence[Address], local_host: str) -> list[Address]:
    """Those of the addresses that are dialled on the word of a member to which this side talks from
    `local_host`: none of this machine, unless the member is on it as well, and none of one link. Raises
    UnreachableError when none is left.
    """
    here = is_loopback(local_host)
    hosts = {host: plain(host) for host, _ in found}
    may = {
        host
        for host, it in hosts.items()
        if can_be_of_peer(it) and not is_link_local(it) and (here or not is_loopback(it))
    }
    left = [address for address in found if address[0] in may]
    if not left:
        raise UnreachableError("a meeting is to be at an address that nobody else can have")
    return left


def at_host(host: str, mine: Sequence[Address], theirs: Sequence[Address]) -> list[Address]:
    """Whom to dial, of these, for one more connection to a peer that a connection shows to be at `host`.
    Raises UnreachableError when it is to be dialled elsewhere.
    """
    found = [target for target in targets(mine, theirs) if target[0] == host]
    if not found:
        raise UnreachableError("a connection is to come from elsewhere than the link does")
    return found


def is_inside(host: str) -> bool:
    """Whether an address is one of a home's own network, which says nothing outside of it. Those that hold on
    one machine or one link alone are none.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_private and not address.is_loopback and not address.is_link_local


def burst_s(rtt_s: float) -> float:
    """How long both sides try before they begin anew: more than a SYN takes to the other side and back."""
    return min(max(LEAST_BURST_S, 2.5 * rtt_s), MOST_BURST_S)


def refused_pause_s(dials: int) -> float:
    """How long to wait after so many dials of one address in a burst, the last of which was refused."""
    return REFUSED_PAUSE_S * 1.5 ** (dials - 1)


def relay_after_s(rtt_s: float) -> float:
    """How long two peers may try to meet before they ask for a relay as well: as long as that mostly takes,
    or so long that the relayed link is there in time.
    """
    return max(0.0, min(PUNCHED_TRIPS * rtt_s + 2 * LEAST_BURST_S, RELAYED_S - RELAYED_TRIPS * rtt_s))


def head_start_s(me: bytes, other: bytes, *, newcomer: bool) -> float:
    """How long this peer, of two without a link, leaves it to the other one to arrange their meeting.

    newcomer: the other one may not know of us yet.
    """
    return 0.0 if newcomer or me < other else HEAD_START_S
