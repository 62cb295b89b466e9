"""What members say of links that they lack: what to feed, and seeds."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from types import SimpleNamespace
from typing import Any

from p2pavg.errors import ProtocolError, UnreachableError
from p2pavg.membership.reach.leases import GatewayRefusal
from p2pavg.membership.reach.upnp import outside_address
from p2pavg.peer.reach import common
from p2pavg.peer.reach.errands import Errands, peer_in
from p2pavg.peer.reach.relaying import RelayDesk, Tunnels
from p2pavg.transport.links import handshake, observing
from p2pavg.transport.links.carried import CountedSocket, Way
from p2pavg.transport.ways import punching
from p2pavg.transport.ways.relay import TOKEN_BYTES, Relay, enter
from tests.fuzz import told
from tests.fuzz.target import Target

PEER, OTHER = b"p" * 20, b"o" * 20
TOKEN = b"1" * TOKEN_BYTES
PARTY = handshake.Party.of("run", closed=False)
AT = [["192.0.2.7", 31330], ["192.168.1.4", 31330]]


def _body(message: dict[str, Any]) -> bytes:
    return handshake.pack(message)[handshake.HEAD_BYTES :]


def _asked() -> list[bytes]:
    offer = {"t": "punch", "at": AT, "by": OTHER, "rtt": 0.04}
    messages = (offer, {**offer, "to": OTHER}, {**offer, "from": OTHER}, {"t": "knows", "peer": OTHER})
    return [_body(message) for message in messages]


class _Link:
    """Answers at once, with what was asked."""

    peer_id, rtt, address, quiet_s = PEER, 0.1, ("192.0.2.7", 31330), 0.0

    def __init__(self) -> None:
        self.said: list[Any] = []

    def reply(self, request: Any, message: Any) -> None:
        handshake.pack(message)
        self.said.append(message)

    async def request(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        return message


async def _take_asked(data: bytes) -> None:
    """Whatever is asked, a right offer alone is passed on, and each question has one answer at most."""
    try:
        message = handshake.unpack(data)
    except ProtocolError:
        return
    link: Any = _Link()
    errands = Errands({OTHER: link}, SimpleNamespace(open=True), {tuple(AT[0])})
    with contextlib.suppress(ProtocolError):
        errands.knows(link, message)
    with contextlib.suppress(ProtocolError):
        errands.punch(link, message)
        await asyncio.gather(*errands._tasks)
        assert link.said
    with contextlib.suppress(ProtocolError):
        offer = punching.parse_offer(message)
        assert punching.parse_offer({**offer.to_message()}) == offer
        assert offer.at[0] in punching.targets(offer.at, offer.at)
        assert 0 < punching.burst_s(offer.rtt_s) <= punching.MOST_BURST_S
    with contextlib.suppress(ProtocolError):
        assert len(peer_in(message, "from")) == 20
    assert len(link.said) <= 2


def _known() -> list[bytes]:
    answer = {"linked": True, "rtt": 0.04, "relays": True, "hosts": [AT[0][0], "2001:db8::7"]}
    return [_body(answer), _body({"linked": False}), _body({**answer, "hosts": None})]


def _read_known(data: bytes) -> None:
    """Whatever a member answers of a third, a meeting through it has a family to begin with, and an end."""
    with contextlib.suppress(ProtocolError):
        link: Any = _Link()
        found = common.read(link, handshake.unpack(data))
        if found is not None:
            assert sorted(found.families) == [4, 6]
            assert 0 <= punching.relay_after_s(found.rtt_s) <= punching.RELAYED_S
            assert len(common.hosts_of([found])) <= 1


def _observed() -> list[bytes]:
    return [_body({"at": AT[0]})]


def _parse_observed(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        host, port = observing.parse(handshake.unpack(data))
        assert handshake.is_address(host, port)


def _tunnels() -> list[bytes]:
    asked = {"t": "relay", "to": OTHER}
    return [
        _body(message) for message in (asked, {"t": "tunnel", "from": OTHER, "token": TOKEN}, {"t": "knows"})
    ]


async def _take_tunnel(data: bytes) -> None:
    """What is asked of a relay, and what a relay says of a tunnel: one answer each, at most one dial."""
    try:
        message = handshake.unpack(data)
    except ProtocolError:
        return
    dialled: list[None] = []

    def make_socket(*_: Any) -> Any:
        dialled.append(None)
        raise OSError("there is no network here")

    link: Any = _Link()
    link.way, link.address = Way.DIRECT, ("127.0.0.1", 9)
    other: Any = _Link()
    other.peer_id, other.way = OTHER, Way.DIRECT
    endpoint: Any = SimpleNamespace(
        links={OTHER: other}, party=PARTY, reception=SimpleNamespace(), make_socket=make_socket
    )
    desk, ends = RelayDesk(endpoint, lambda: 1e6, lambda: False), Tunnels(endpoint)
    for take in (desk.asked, ends.asked):
        with contextlib.suppress(ProtocolError):
            take(link, message)
    await asyncio.gather(*desk._tasks, *ends._tasks)
    desk.close()
    assert len(link.said) <= 2
    assert len(dialled) <= 1


def _claims() -> list[bytes]:
    return [
        handshake.pack({"token": TOKEN}),
        handshake.pack({"ok": True}),
        handshake.pack({"token": TOKEN[:4]}),
    ]


class _Pipe(CountedSocket):
    """A pair of sockets is no TCP."""

    def setsockopt(self, *_: Any) -> None:
        pass


async def _take_claim(data: bytes) -> None:
    """The first words on an end of a tunnel, at the relay and at the end: nothing passes without a token."""
    relay = Relay(PARTY, lambda: 1e6)
    relay.open(PEER, OTHER)
    (tunnel,) = set(relay._tunnels.values())
    tunnel.tokens = TOKEN, b"2" * TOKEN_BYTES
    relay._tunnels = dict.fromkeys(tunnel.tokens, tunnel)
    for answered in (False, True):
        here, there = socket.socketpair()
        with _Pipe(fileno=here.detach()) as sock, there:
            sock.setblocking(False)
            there.sendall((handshake.preamble(handshake.TUNNEL, PARTY) if answered else b"") + data[:4096])
            there.shutdown(socket.SHUT_WR)
            work = enter(sock, TOKEN, PARTY) if answered else relay.claim(sock)
            with contextlib.suppress(ProtocolError, UnreachableError, handshake.Refusal, TimeoutError):
                async with asyncio.timeout(0 if TOKEN in data and not answered else None):
                    await work
            if tunnel.ends:
                assert TOKEN in data
    relay.close()


def _upnp() -> list[bytes]:
    return [b"203.0.113.9", b"2001:db8::1", b"", b"0.0.0.0 <script>"]


def _take_upnp(data: bytes) -> None:
    """What a gateway says by UPnP of its address: one, or a refusal."""
    for said in (data, data.decode("latin-1"), data.decode(errors="ignore")):
        with contextlib.suppress(GatewayRefusal):
            assert ipaddress.ip_address(outside_address(said))


TARGETS = (
    Target("meeting", told.in_loop(_take_asked), _asked),
    Target("tunnel", told.in_loop(_take_tunnel), _tunnels),
    Target("tunnel-end", told.in_loop(_take_claim), _claims),
    Target("upnp", _take_upnp, _upnp),
    Target("known", _read_known, _known),
    Target("observed", _parse_observed, _observed),
)
