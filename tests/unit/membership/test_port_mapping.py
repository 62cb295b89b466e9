"""Asking a gateway for a port: gateways that refuse, keep silent, restart, or answer nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from p2pavg.membership.reach import gateway_talk, pcp, pmp
from p2pavg.membership.reach.gateway import default_gateway
from p2pavg.membership.reach.gateway_talk import Gateway
from p2pavg.membership.reach.leases import GatewayRefusal, Mapped
from p2pavg.membership.reach.port_mapping import PortMapping

DEADLINE_S = 20.0


@pytest.fixture(autouse=True)
def _gateways_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_talk, "FIRST_TRY_S", 0.02)


OUTSIDE = "203.0.113.7"


@dataclass
class FakeGateway(asyncio.DatagramProtocol):
    """speaks: "pmp", "old" (the same, and silent about all else), "pcp", "both" or "" (says nothing).
    strict: keeps a port for the nonce that it was asked for with, as RFC 6887 asks.
    """

    speaks: str
    result: int = 0
    outside: str = OUTSIDE
    taken: frozenset[int] = frozenset()
    leased: dict[tuple[str, int], int] = field(default_factory=dict)
    spoil: Callable[[bytes], bytes] = lambda data: data
    drop: int = 0
    strict: bool = False
    nonces: dict[tuple[int, int], bytes] = field(default_factory=dict)
    heard: list[int] = field(default_factory=list)  # versions

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.changed = asyncio.Event()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if self.drop > 0:
            self.drop -= 1
            return
        answer = self.answer(data, addr[0])
        if answer:
            self.transport.sendto(self.spoil(answer), addr)  # type: ignore[attr-defined]

    def answer(self, data: bytes, client: str) -> bytes:
        self.heard.append(data[0])
        if not self.speaks or (data[0] == 2 and self.speaks == "old"):
            return b""
        if data[0] == 2 and self.speaks != "pmp":
            return self.by_pcp(data, client)
        if data[0] == 2:
            return struct.pack("!BBHI", 0, 128 | data[1], 1, 5)
        if self.speaks == "pcp":
            return struct.pack("!BBBBII12x", 2, 0x81, 0, 1, 0, 5)
        if data[1] == 0:
            return struct.pack("!BBHI4s", 0, 128, self.result, 5, ipaddress.IPv4Address(self.outside).packed)
        _, opcode, _, inside, outside, lease = struct.unpack("!BBHHHI", data)
        port = self.lease("udp" if opcode == 1 else "tcp", inside, outside, lease)
        return struct.pack("!BBHIHHI", 0, 128 + opcode, self.result, 5, inside, port, lease)

    def by_pcp(self, data: bytes, client: str) -> bytes:
        _, _, _, lease, own, nonce, number, inside, outside, _ = pcp._REQUEST.unpack(data)
        assert own == pcp._mapped(client)
        if self.strict and self.nonces.setdefault((number, inside), nonce) != nonce:
            head = struct.pack("!BBBBII12x", 2, 0x81, 0, pcp.NOT_AUTHORIZED, lease, 5)
            return head + struct.pack("!12sB3xHH16s", nonce, number, inside, outside, bytes(16))
        port = self.lease("tcp" if number == 6 else "udp", inside, outside, lease)
        where = pcp._mapped(self.outside)
        head = struct.pack("!BBBBII12x", 2, 0x81, 0, self.result, lease, 5)
        return head + struct.pack("!12sB3xHH16s", nonce, number, inside, port, where)

    def lease(self, protocol: str, inside: int, outside: int, lease: int) -> int:
        if not lease:
            self.leased.pop((protocol, inside), None)
            self.changed.set()
            return 0
        while outside in self.taken:
            outside += 1
        self.leased[protocol, inside] = outside
        self.changed.set()
        return outside


@asynccontextmanager
async def gateway(
    speaks: str, *, secret: bytes = b"secret", **options: object
) -> AsyncIterator[tuple[FakeGateway, Gateway]]:
    loop = asyncio.get_running_loop()
    transport, fake = await loop.create_datagram_endpoint(
        lambda: FakeGateway(speaks, **options),  # type: ignore[arg-type]
        local_addr=("127.0.0.1", 0),
    )
    try:
        yield fake, Gateway("127.0.0.1", transport.get_extra_info("sockname")[1], secret=secret)
    finally:
        transport.close()


async def until(fake: FakeGateway, fact: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not fact():
            fake.changed.clear()
            await fake.changed.wait()


@pytest.mark.parametrize("speaks", ["pmp", "old", "pcp", "both"])
async def test_a_port_is_asked_for_kept_and_given_back(speaks: str) -> None:
    """TCP and UDP lead to the same outside port; close() removes both."""
    async with gateway(speaks, taken=frozenset({31330})) as (fake, asked):
        told: list[tuple[str, int] | None] = []
        mapping = PortMapping(asked, 31330, told.append)
        assert await mapping.start() == (OUTSIDE, 31331)
        assert told == [(OUTSIDE, 31331)]
        assert fake.leased == {("tcp", 31330): 31331, ("udp", 31330): 31331}
        await mapping.close()
        assert fake.leased == {}


async def test_a_gateway_that_is_silent_about_pcp_costs_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked by NAT-PMP at the same time, and by that alone from then on: the port is there, and gone,
    before a first try would be over.
    """
    monkeypatch.setattr(gateway_talk, "FIRST_TRY_S", DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S / 2), gateway("old") as (fake, asked):
        mapping = PortMapping(asked, 31330, lambda where: None)
        await mapping.start()
        assert fake.heard.count(2) == 1
        await mapping.close()
        assert fake.leased == {}
        assert fake.heard.count(2) == 1


@pytest.mark.parametrize(("before", "after"), [("old", "pcp"), ("pcp", "old")])
async def test_another_gateway_with_the_same_address_is_asked_by_what_it_speaks(
    before: str, after: str
) -> None:
    """Homes number their routers alike: what the one before has answered to holds until it does not."""
    async with gateway(before) as (fake, asked):
        await asked.lease("tcp", 5, 5)
        fake.speaks = after
        with contextlib.suppress(GatewayRefusal):
            await asked.lease("tcp", 5, 5)
        assert (await asked.lease("tcp", 5, 5)).port == 5


async def test_a_peer_that_was_killed_gets_its_port_again() -> None:
    """Its next life shows the gateway the same nonce; another peer's is another one."""
    async with gateway("pcp", strict=True) as (_, asked):
        await asked.lease("tcp", 31330, 31330)
        again = Gateway(*asked._address, secret=b"secret")
        assert (await again.lease("tcp", 31330, 31330)).port == 31330
        stranger = Gateway(*asked._address, secret=b"another")
        with pytest.raises(GatewayRefusal, match="another process had this one"):
            await stranger.lease("tcp", 31330, 31330)


async def test_a_port_that_another_nonce_holds_is_asked_for_by_nat_pmp() -> None:
    """Where the gateway speaks both; it is renewed and given back the same way."""
    async with gateway("both", strict=True) as (fake, asked):
        await Gateway(*asked._address, secret=b"an earlier life").lease("tcp", 31330, 31330)
        assert (await asked.lease("tcp", 31330, 31330)).port == 31330
        await asked.lease("tcp", 31330, 31330, 0)
        assert fake.leased == {}


class SlowLessor:
    """Gives a port at once, and answers when it is told to."""

    def __init__(self) -> None:
        self.leased: dict[str, int] = {}
        self.asked: asyncio.Queue[str] = asyncio.Queue()
        self.answers = asyncio.Semaphore(0)

    async def lease(self, protocol: str, inside: int, outside: int, lease_s: int = 600) -> Mapped:
        if lease_s:
            self.leased[protocol] = outside
            self.asked.put_nowait(protocol)
            await self.answers.acquire()
        else:
            self.leased.pop(protocol, None)
        return Mapped(OUTSIDE, outside, lease_s, 1)


@pytest.mark.parametrize("answered", [0, 1, 2, 3])
async def test_close_removes_what_is_on_its_way(answered: int) -> None:
    """Whenever it comes: nothing answered yet, or one of two, or in the middle of a renewal."""
    lessor = SlowLessor()
    mapping = PortMapping(lessor, 5, lambda where: None, look_s=0.001)
    first = asyncio.create_task(mapping.start())
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(answered):
            await lessor.asked.get()
            lessor.answers.release()
        await lessor.asked.get()
    assert lessor.leased
    first.cancel()
    await asyncio.wait([first])
    await mapping.close()
    assert lessor.leased == {}


@pytest.mark.parametrize(("port", "seconds"), [(5, 0), (0, 600)])
async def test_a_lease_of_nothing_is_a_refusal(port: int, seconds: int) -> None:
    """A gateway that gives the port for zero seconds, or port 0, is asked again later, and not at once."""

    class Zero(SlowLessor):
        async def lease(self, protocol: str, inside: int, outside: int, lease_s: int = 600) -> Mapped:
            return Mapped(OUTSIDE, port, seconds, 1)

    mapping = PortMapping(Zero(), 5, lambda where: None)
    with pytest.raises(GatewayRefusal, match="no time"):
        await mapping.start()
    await mapping.close()


async def test_lost_datagrams_are_sent_again() -> None:
    """A gateway that misses the first requests still gives the port."""
    async with gateway("pcp", drop=2) as (_, asked):
        assert (await asked.lease("tcp", 5, 5)).port == 5


@pytest.mark.parametrize("speaks", ["pmp", "pcp"])
async def test_a_gateway_that_changes_is_followed(speaks: str) -> None:
    """After a restart that forgot the port, and under another outside address, the mapping is there again."""
    async with gateway(speaks) as (fake, asked):
        told: list[tuple[str, int] | None] = []
        mapping = PortMapping(asked, 7, told.append, look_s=0.01)
        await mapping.start()
        fake.leased.clear()
        await until(fake, lambda: len(fake.leased) == 2)
        fake.outside = "203.0.113.8"
        await until(fake, lambda: told[-1] == ("203.0.113.8", 7))
        await mapping.close()


@pytest.mark.parametrize(
    ("speaks", "result", "said"),
    [
        ("pmp", 2, "switched off"),
        ("pmp", 3, "no address from its provider"),
        ("pmp", 99, "answered 99"),
        ("pcp", 2, "switched off"),
        ("pcp", 12, "another translator"),
        ("pcp", 77, "answered 77"),
        ("", 0, "does not answer"),
    ],
)
async def test_a_refusal_says_why(speaks: str, result: int, said: str) -> None:
    """What the gateway says becomes a sentence that names the gateway; silence does too."""
    async with gateway(speaks, result=result) as (_, asked):
        with pytest.raises(GatewayRefusal, match=said) as raised:
            await asked.lease("tcp", 5, 5)
        assert "127.0.0.1" in str(raised.value)


async def test_nobody_listens_there() -> None:
    """A port that is closed at the gateway ends the tries at once."""
    async with gateway("pmp") as (fake, asked):
        fake.transport.close()  # type: ignore[attr-defined]
        with pytest.raises(GatewayRefusal):
            await asked.lease("tcp", 5, 5)


@pytest.mark.parametrize("speaks", ["pmp", "pcp"])
@pytest.mark.parametrize("at", [0, 1, 3, 7, 11])
async def test_damaged_answers_are_no_answers(speaks: str, at: int) -> None:
    """A truncated datagram, or one about another request, gives no mapping."""
    async with gateway(speaks, spoil=lambda data: data[:at]) as (_, asked):
        with pytest.raises(GatewayRefusal):
            await asked.lease("tcp", 5, 5)


def test_answers_to_other_requests_are_not_taken() -> None:
    """The port and, with PCP, the nonce tell whose an answer is."""
    request = pmp.ask_port("tcp", 80, 80, 60)
    answer = struct.pack("!BBHIHHI", 0, 130, 0, 5, 80, 81, 60)
    assert pmp.read(answer, request) == pmp.Answer(0, 5, "", 80, 81, 60)
    assert pmp.read(answer, pmp.ask_port("tcp", 79, 80, 60)) is None
    assert pmp.read(answer, pmp.ask_port("udp", 80, 80, 60)) is None
    request = pcp.ask_port("192.168.1.5", "tcp", 80, 80, 60, bytes(12))
    fake = FakeGateway("pcp")
    fake.changed = asyncio.Event()
    answer = fake.by_pcp(request, "192.168.1.5")
    assert pcp.read(answer, request) == pcp.Answer(0, 5, 60, OUTSIDE, 80)
    assert pcp.read(answer, pcp.ask_port("192.168.1.5", "tcp", 80, 80, 60, b"n" * 12)) is None


def test_the_default_gateway_is_that_of_the_lowest_metric() -> None:
    """Routes without a gateway, to single networks, or malformed do not count."""
    head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\n"
    routes = (
        "eth0\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\n"
        "wlan0\t00000000\t0102A8C0\t0003\t0\t0\t50\t00000000\t0\n"
        "eth0\t0001A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\n"
        "wan0\t00000000\t00000000\t0001\t0\t0\t0\t00000000\t0\nbroken\n"
    )
    assert default_gateway(head + routes) == "192.168.2.1"
    assert default_gateway(head) is None
