"""Common members: those to which both this peer and one that it cannot dial have links."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from p2pavg.errors import UnreachableError
from p2pavg.membership.table.address import family_of, is_numeric
from p2pavg.peer.reach.errands import KNOWS
from p2pavg.peer.reach.rota import Rota
from p2pavg.transport.links.carried import Way
from p2pavg.transport.links.endpoint import Endpoint
from p2pavg.transport.links.link import Link, Message
from p2pavg.transport.ways import punching

ANSWER_S = 2.0

Hosts = tuple[str, str]  # where a member sees this peer, and where it sees the other one


@dataclass(frozen=True, slots=True)
class CommonMember:
    """A member to which both sides have links."""

    link: Link
    rtt_s: float  # from this peer to the other one and back, through it
    relays: bool
    hosts: Hosts | None = None

    @property
    def families(self) -> list[int]:
        """Of addresses, 4 and 6, in the order in which a meeting is worth a try: by that of the other side's
        link first.
        """
        return [4, 6] if self.hosts is None or family_of(self.hosts[1]) == 4 else [6, 4]


class CommonMembers:
    """Finds them. On the loop thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._rota = Rota()

    def observers(self) -> list[Link]:
        """Members that this peer can dial, the nearest first."""
        links = self._endpoint.links.values()
        straight = [link for link in links if link.way is Way.DIRECT and not link.hello.get("client_only")]
        return sorted(straight, key=lambda link: link.rtt)

    async def to(self, peer: bytes) -> list[CommonMember]:
        """Members through which a word to the peer gets, the quickest first."""
        asked = self._rota.next(peer, self.observers())
        answers = await asyncio.gather(*(self._ask(link, peer) for link in asked))
        return sorted((found for found in answers if found is not None), key=lambda found: found.rtt_s)

    async def _ask(self, link: Link, peer: bytes) -> CommonMember | None:
        try:
            told = await link.request({"t": KNOWS, "peer": peer}, ANSWER_S)
        except (TimeoutError, UnreachableError):
            told = {}
        found = read(link, told)
        self._rota.told(peer, link.peer_id, knows=found is not None)
        return found


def read(link: Link, told: Message) -> CommonMember | None:
    """What a member answered when it was asked about a peer; None: it has no link to it, or says no sense."""
    rtt, hosts = told.get("rtt"), told.get("hosts")
    if told.get("linked") is not True or not isinstance(rtt, float) or not rtt >= 0:
        return None
    rtt_s = min(link.rtt + rtt, punching.MOST_RTT_S)
    return CommonMember(link, rtt_s, told.get("relays") is True, _hosts(hosts))


def _hosts(told: object) -> Hosts | None:
    if not isinstance(told, list) or len(told) != 2:
        return None
    mine, theirs = told
    if not (isinstance(mine, str) and isinstance(theirs, str) and is_numeric(mine) and is_numeric(theirs)):
        return None
    return mine, theirs


def hosts_of(members: Iterable[CommonMember]) -> frozenset[Hosts]:
    """Where all of them see the two peers."""
    return frozenset(member.hosts for member in members if member.hosts is not None)
