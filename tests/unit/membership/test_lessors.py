"""Who is asked for a port: the gateway, then UPnP; and what is said when none gives one."""

from __future__ import annotations

import asyncio
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from p2pavg.membership.reach import port_mapping
from p2pavg.membership.reach.leases import GatewayRefusal, Mapped
from p2pavg.membership.reach.lessors import Lessors
from p2pavg.membership.reach.port_mapping import PortMapping
from p2pavg.membership.reach.upnp import Upnp, outside_address


class FakeLessor:
    """Gives the port that is asked for, or refuses with `refusal`."""

    def __init__(self, address: str, refusal: str = "") -> None:
        self.address = address
        self.refusal = refusal
        self.asked: list[tuple[str, int, int]] = []

    async def lease(self, protocol: str, inside_port: int, outside_port: int, lease_s: int = 600) -> Mapped:
        self.asked.append((protocol, outside_port, lease_s))
        if self.refusal:
            raise GatewayRefusal(self.refusal)
        return Mapped(self.address, outside_port, lease_s, 1)


class FakeDevice:
    """Acts as miniupnpc.UPnP does: raises bare exceptions, and blocks."""

    def __init__(self, taken: tuple[int, ...] = (), permanent: bool = False, found: bool = True) -> None:
        self.taken, self.permanent, self.found = taken, permanent, found
        self.ports: dict[tuple[int, str], tuple[str, int, int]] = {}
        self.lanaddr = "192.168.1.5"
        self.threads: set[threading.Thread] = set()

    def discover(self) -> int:
        if not self.found:
            raise Exception("Success")
        return 1

    def selectigd(self) -> str:
        if not self.found:
            raise Exception("No UPnP device discovered")
        return "http://192.168.1.1/igd.xml"

    def externalipaddress(self) -> str:
        return "203.0.113.9"

    def addportmapping(
        self, outside: int, protocol: str, host: str, inside: int, about: str, remote: str, lease: int
    ) -> bool:
        self.threads.add(threading.current_thread())
        if outside in self.taken:
            raise Exception("ConflictInMappingEntry")
        if self.permanent and lease:
            raise Exception("OnlyPermanentLeasesSupported")
        self.ports[outside, protocol] = (host, inside, lease)
        return True

    def deleteportmapping(self, outside: int, protocol: str) -> bool:
        del self.ports[outside, protocol]
        return True


def install(monkeypatch: pytest.MonkeyPatch, device: FakeDevice) -> None:
    monkeypatch.setitem(sys.modules, "miniupnpc", SimpleNamespace(UPnP=lambda: device))  # type: ignore[arg-type]


async def test_upnp_maps_and_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both protocols lead to the same outside port, off the loop's thread, and are gone after close()."""
    device = FakeDevice()
    install(monkeypatch, device)
    mapping = PortMapping(Upnp(), 31330, lambda where: None)
    assert await mapping.start() == ("203.0.113.9", 31330)
    assert device.ports == {(31330, p): ("192.168.1.5", 31330, 600) for p in ("TCP", "UDP")}
    assert threading.current_thread() not in device.threads
    await mapping.close()
    assert device.ports == {}


async def test_upnp_removes_what_a_request_under_way_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for its thread any more: the removal does."""
    asked, answers = threading.Event(), threading.Event()

    class Slow(FakeDevice):
        def addportmapping(self, *arguments: Any) -> bool:
            self.threads.add(threading.current_thread())
            asked.set()
            assert answers.wait(20)
            return super().addportmapping(*arguments)

    device = Slow()
    install(monkeypatch, device)
    mapping = PortMapping(Upnp(), 31330, lambda where: None)
    first = asyncio.create_task(mapping.start())
    assert await asyncio.to_thread(asked.wait, 20)
    first.cancel()
    await asyncio.wait([first])
    closing = asyncio.create_task(mapping.close())
    await asyncio.wait([closing], timeout=0.2)
    answers.set()
    await closing
    for thread in tuple(device.threads):
        await asyncio.to_thread(thread.join, 20)
    assert device.ports == {}


async def test_upnp_takes_another_port_and_a_lease_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that is taken, and a gateway that knows only lasting mappings, are no obstacle."""
    device = FakeDevice(taken=(7,), permanent=True)
    install(monkeypatch, device)
    mapped = await Upnp().lease("tcp", 7, 7)
    assert mapped.port != 7
    assert device.ports == {(mapped.port, "TCP"): ("192.168.1.5", 7, 0)}


async def test_upnp_without_a_device_or_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a refusal in one sentence; without the library it says how to install it."""
    install(monkeypatch, FakeDevice(found=False))
    with pytest.raises(GatewayRefusal, match="No UPnP device"):
        await Upnp().lease("tcp", 7, 7)
    monkeypatch.setitem(sys.modules, "miniupnpc", None)  # type: ignore[arg-type]
    with pytest.raises(GatewayRefusal, match=r"pip install 'p2pavg\[upnp\]'"):
        await Upnp().lease("tcp", 7, 7)


async def test_upnp_is_asked_when_the_gateway_refuses() -> None:
    """The gateway comes first; who gave a port is asked alone from then on, removal included."""
    gateway: Any = FakeLessor("192.0.2.1", "the gateway refuses")
    upnp: Any = FakeLessor("192.0.2.2")
    lessors = Lessors(lambda: "192.168.1.1", lambda address: gateway, upnp)
    assert (await lessors.lease("tcp", 5, 6)).address == "192.0.2.2"
    await lessors.lease("tcp", 5, 6, 0)
    assert gateway.asked == [("tcp", 6, 600)]
    assert upnp.asked == [("tcp", 6, 600), ("tcp", 6, 0)]


async def test_another_default_route_is_another_gateway() -> None:
    """A machine that moves to another network asks the gateway there; without any it says so."""
    routes: list[str | None] = ["192.168.1.1"]
    asked: list[str] = []

    def at(address: str) -> Any:
        asked.append(address)
        return FakeLessor(address)

    upnp: Any = FakeLessor("", "no UPnP")
    lessors = Lessors(lambda: routes[0], at, upnp)
    assert (await lessors.lease("tcp", 5, 5)).address == "192.168.1.1"
    assert (await lessors.lease("udp", 5, 5)).address == "192.168.1.1"
    routes[0] = "10.0.0.1"
    assert (await lessors.lease("tcp", 5, 5)).address == "10.0.0.1"
    assert asked == ["192.168.1.1", "10.0.0.1"]
    routes[0] = None
    with pytest.raises(GatewayRefusal, match="no gateway"):
        await lessors.lease("tcp", 5, 5)


async def test_a_refusal_says_what_each_said() -> None:
    """When none gives a port, the sentence holds both reasons."""
    lessors = Lessors(lambda: "192.168.1.1", lambda a: FakeLessor("", "first"), FakeLessor("", "second"))
    with pytest.raises(GatewayRefusal, match="first; second"):
        await lessors.lease("tcp", 5, 5)


async def test_a_gateway_that_refuses_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping that is refused at first is there once the gateway gives it."""
    monkeypatch.setattr(port_mapping, "REFUSED_LOOK_S", 0.01)
    lessor = FakeLessor("192.0.2.1", "not now")
    told: asyncio.Queue[tuple[str, int] | None] = asyncio.Queue()
    mapping = PortMapping(lessor, 5, told.put_nowait, look_s=0.01)
    with pytest.raises(GatewayRefusal):
        await mapping.start()
    lessor.refusal = ""
    async with asyncio.timeout(20):
        assert await told.get() == ("192.0.2.1", 5)
    await mapping.close()


@pytest.mark.parametrize("said", ["", None, "router.home", "1.2.3", "203.0.113.9:80", b"1.2.3.4"])
def test_a_gateway_that_tells_no_address_by_upnp_is_refused(said: object) -> None:
    """What is announced is an address."""
    with pytest.raises(GatewayRefusal, match="no address"):
        outside_address(said)
    assert outside_address("203.0.113.9") == "203.0.113.9"
