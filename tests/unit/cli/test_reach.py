"""`p2pavg reach`: what members find of this machine, in words and as JSON."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from p2pavg.cli import main, reach
from p2pavg.cli.reach import Found, told
from p2pavg.identity import Identity
from p2pavg.membership.reach.leases import GatewayRefusal, Mapped
from p2pavg.membership.reach.lessors import Lessors
from p2pavg.membership.table import dialling_back
from p2pavg.membership.table.dht import DHT
from p2pavg.transport.links.listening import TablePort


@pytest.fixture
def member() -> Iterator[str]:
    """A node of a swarm, on a loop of its own."""
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    address: list[str] = []

    async def live() -> None:
        port = TablePort("127.0.0.1", 0)
        node = await DHT.start(Identity.generate(), host="127.0.0.1", port=port.port, attach=port.attach)
        address.append(f"127.0.0.1:{port.port}")
        ready.set()
        await stop.wait()
        await node.stop()
        await port.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(live(),))
    thread.start()
    assert ready.wait(20)
    yield address[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(20)
    loop.close()


def found(member: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main(["reach", member, "--port", "0", "--json", "-"]) == 0
    result: dict[str, object] = json.loads(capsys.readouterr().out)
    return result


def test_a_port_that_is_open(member: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A member dials back and gets through: open, over UDP, without a NAT, at an address of this machine."""
    result = found(member, capsys)
    assert (result["reach"], result["udp"], result["nat"]) == ("open", True, "none")
    addresses = result["addresses"]
    assert isinstance(addresses, list)
    assert addresses[0].startswith("127.0.0.1:")


@pytest.fixture
def shut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members get through to no port but 7777."""
    find = dialling_back._find_reachability

    async def find_reachability(node: object, port: int) -> object:
        tried = await find(node, node.bound[1])  # type: ignore[attr-defined, arg-type]
        where = {("203.0.113.7", port): port == 7777}
        return type(tried)(port == 7777, tried.address, "advice", where)

    monkeypatch.setattr(dialling_back, "_find_reachability", find_reachability)


@pytest.mark.usefixtures("shut")
def test_a_port_that_the_gateway_leads_here(
    member: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When nobody gets through, the gateway is asked, its port is tried, and given back."""
    asked: list[int] = []

    async def lease(self: Lessors, protocol: str, inside: int, outside: int, lease_s: int = 0) -> Mapped:
        asked.append(lease_s)
        return Mapped("203.0.113.7", 7777, lease_s, 1)

    monkeypatch.setattr(Lessors, "lease", lease)
    result = found(member, capsys)
    assert result["reach"] == "mapped"
    assert result["addresses"][0] == "203.0.113.7:7777"  # type: ignore[index]
    assert asked == [reach.LEASE_S, 0]


@pytest.mark.usefixtures("shut")
def test_a_gateway_that_does_not_take_its_port_back(
    member: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found is told all the same, and that the port ends by itself."""

    async def lease(self: Lessors, protocol: str, inside: int, outside: int, lease_s: int = 0) -> Mapped:
        if not lease_s:
            raise GatewayRefusal("the gateway does not answer")
        return Mapped("203.0.113.7", 7777, lease_s, 1)

    monkeypatch.setattr(Lessors, "lease", lease)
    assert main(["reach", member, "--port", "0"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("mapped: ")
    assert f"ends in {reach.LEASE_S} s" in said


@pytest.mark.usefixtures("shut")
def test_a_port_that_nobody_reaches(
    member: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a gateway that helps: out only, with the port to open and the gateway's words."""

    async def lease(self: Lessors, *args: object) -> Mapped:
        raise GatewayRefusal("the gateway refuses")

    monkeypatch.setattr(Lessors, "lease", lease)
    assert main(["reach", member, "--port", "0"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("out only: ")
    assert "open or forward port" in said
    assert "The gateway: the gateway refuses." in said


def test_nobody_is_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that does not answer is one line on stderr, and a port that is none a sentence."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = f"127.0.0.1:{server.getsockname()[1]}"
    start = DHT.start

    async def quick(*args: object, **options: object) -> DHT:
        return await start(*args, **options, join_timeout=0.3)  # type: ignore[arg-type]

    monkeypatch.setattr(DHT, "start", quick)
    assert main(["reach", silent, "--port", "0"]) == 1
    said = capsys.readouterr().err
    assert "none of the initial peers answered" in said
    assert "new swarm" not in said  # who only looks starts none
    assert main(["reach", "127.0.0.1:1", "--port", "70000"]) == 1
    assert "--port 70000 is no port" in capsys.readouterr().err


@pytest.mark.parametrize("nat", ["none", "independent", "by destination", "unknown"])
@pytest.mark.parametrize("how", ["open", "mapped", "out only", "unknown"])
@pytest.mark.parametrize("udp", [True, False])
def test_every_finding_has_its_words(how: reach.Reach, nat: reach.Nat, udp: bool) -> None:
    """The first line begins with the finding; lack of UDP is told."""
    lines = told(Found(how, udp, nat, ["203.0.113.5:31330"]))
    assert lines[0].startswith(f"{how}: ")
    assert any("UDP does not get through" in line for line in lines) is not udp
