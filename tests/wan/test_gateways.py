"""Gateways of the lab: mappings, filters, hairpins, ports asked for; IPv6; addresses that change."""

from __future__ import annotations

import itertools
import json
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from p2pavg.errors import ConfigurationError
from p2pavg.lab import Lab
from p2pavg.lab.topology import parse

pytestmark = pytest.mark.wan

KINDS = ("independent", "address", "port")
TOPOLOGY = """
hosts = ["a", "b", "six", "dual", "desk", "laptop", "mobile", "refused"]
[gateways.home]
hosts = ["desk", "laptop"]
port_mapping = true
[gateways.carrier]
nat = "independent/independent"
port_mapping = "pcp"
[gateways.tethered]
hosts = ["mobile"]
behind = "carrier"
[gateways.loud]
hosts = ["refused"]
nat = "port/port"
early_syn = "reset"
hairpin = false
[[nodes]]
hosts = "six"
family = "6"
[[nodes]]
hosts = "dual"
family = "both"
[[paths]]
rtt_ms = 10
"""

# Tells every caller, by UDP, from where it was called.
TELL = """
import json, socket
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind(("", 7))
print("ready", flush=True)
while True:
    asked, caller = sock.recvfrom(100)
    answer = json.dumps(caller).encode()
    sock.sendto(answer, caller)
"""

# Calls each HOST:PORT from one socket, and prints what each answered.
ASK = """
import json, socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind(("", int(sys.argv[1])))
sock.settimeout(float(sys.argv[2]))
found = []
for target in sys.argv[3:]:
    host, port = target.split(":")
    sock.sendto(b"ask", (host, int(port)))
    try:
        found.append(json.loads(sock.recv(200)))
    except TimeoutError:
        found.append(None)
print(json.dumps(found))
"""

# Opens a mapping by calling A:7 from port 6000, then says "open" and waits for one datagram.
WAIT = """
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind(("", 6000))
sock.settimeout(5)
sock.sendto(b"ask", (sys.argv[1], 7))
print(sock.recv(200).decode(), flush=True)
sock.settimeout(float(sys.argv[2]))
try:
    print(sock.recv(200).decode(), flush=True)
except TimeoutError:
    print("nothing", flush=True)
"""

SEND = """
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind(("", int(sys.argv[3])))
sock.sendto(b"knock", (sys.argv[1], int(sys.argv[2])))
"""

# Counts the bytes of each connection and tells the sender, with the address that it came from.
SINK = """
import hashlib, json, socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
server = socket.create_server((sys.argv[1], 8080), family=family)
print("ready", flush=True)
while True:
    connection, caller = server.accept()
    digest = hashlib.sha256()
    while data := connection.recv(1 << 20):
        digest.update(data)
    connection.sendall(json.dumps([caller[0], digest.hexdigest()]).encode())
    connection.close()
"""

POUR = """
import hashlib, json, os, socket, sys
data = os.urandom(1 << 20)
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), 2) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        caller, digest = json.loads(connection.recv(1000))
    print(json.dumps([caller, digest == hashlib.sha256(data).hexdigest()]))
except OSError as error:
    print(json.dumps([type(error).__name__, False]))
"""

# TCP simultaneous open from port 7000 to HOST:PORT, tried for five seconds.
PUNCH = """
import socket, sys, time
end = time.monotonic() + 5
while time.monotonic() < end:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", 7000))
        sock.settimeout(0.5)
        try:
            sock.connect((sys.argv[1], int(sys.argv[2])))
            sock.sendall(b"x")
            if sock.recv(1) == b"x":
                print("met")
                break
        except OSError:
            continue
else:
    print("missed")
"""

# One request of NAT-PMP or PCP to the gateway, as hex.
GATEWAY = """
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.settimeout(2)
sock.sendto(bytes.fromhex(sys.argv[2]), (sys.argv[1], 5351))
print(sock.recv(1100).hex())
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(parse(TOPOLOGY, "gateways")) as lab:
        yield lab


def python(code: str, *args: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, args)]


def serve(lab: Lab, host: str, code: str, *args: object) -> subprocess.Popen[str]:
    process = lab.spawn(host, python(code, *args), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def ask(lab: Lab, host: str, port: int, *targets: str, wait_s: float = 2.0) -> list[Any]:
    answer: list[Any] = json.loads(lab.run(host, python(ASK, port, wait_s, *targets)))
    return answer


def pour(lab: Lab, host: str, address: str, port: int = 8080) -> list[Any]:
    answer: list[Any] = json.loads(lab.run(host, python(POUR, address, port)))
    return answer


def request(lab: Lab, host: str, gateway: str, data: bytes) -> bytes:
    return bytes.fromhex(lab.run(host, python(GATEWAY, gateway, data.hex())))


@pytest.mark.parametrize("mapping", KINDS)
def test_a_mapping_depends_on_what_its_kind_says(mapping: str) -> None:
    """One port towards all, one for each address, or one for each address and port."""
    shape = (
        f'hosts = ["a", "b", "h"]\n[[nodes]]\nhosts = "h"\nnat = "{mapping}/port"\n[[paths]]\nrtt_ms = 4\n'
    )
    with Lab(parse(shape, mapping)) as lab:
        there, elsewhere = serve(lab, "a", TELL), serve(lab, "b", TELL)
        serve(lab, "a", TELL.replace("7))", "8))"))
        a, b = lab.address("a"), lab.address("b")
        answers = ask(lab, "h", 6000, f"{a}:7", f"{a}:8", f"{b}:7", f"{a}:7")
        assert {address for address, _ in answers} == {lab.outside("h-gateway")}
        ports = [port for _, port in answers]
        assert ports[0] == ports[3]
        assert (ports[0] == ports[1]) == (mapping != "port")
        assert (ports[0] == ports[2]) == (mapping == "independent")
        assert (ports[0] == 6000) == (mapping == "independent")
        there.kill()
        elsewhere.kill()


@pytest.mark.parametrize("filtering", KINDS)
def test_a_filter_lets_in_whom_its_kind_says(filtering: str) -> None:
    """Everybody, the address that was called, or the very port of that address."""
    shape = f'hosts = ["a", "b", "h"]\n[[nodes]]\nhosts = "h"\nnat = "independent/{filtering}"\n[[paths]]\n'
    with Lab(parse(shape + "rtt_ms = 4\n", filtering)) as lab:
        serve(lab, "a", TELL)
        cases = {("a", 9): filtering != "port", ("b", 9): filtering == "independent"}
        for (stranger, source), open_ in cases.items():
            waiting = lab.spawn(
                "h", python(WAIT, lab.address("a"), 5 if open_ else 0.5), stdout=subprocess.PIPE, text=True
            )
            assert waiting.stdout is not None
            address, port = json.loads(waiting.stdout.readline())
            lab.run(stranger, python(SEND, address, port, source))
            assert waiting.communicate(timeout=10)[0] == ("knock\n" if open_ else "nothing\n")


def test_hosts_behind_one_gateway_see_each_other_and_nobody_sees_them(lab: Lab) -> None:
    """TCP passes a gateway intact, both ways; a LAN address leads nowhere from outside."""
    serve(lab, "a", SINK, "0.0.0.0")
    serve(lab, "laptop", SINK, "0.0.0.0")
    assert pour(lab, "desk", lab.address("a")) == [lab.outside("home"), True]
    assert pour(lab, "desk", lab.address("laptop")) == [lab.address("desk"), True]
    assert pour(lab, "a", lab.address("laptop")) == ["TimeoutError", False]
    assert pour(lab, "a", lab.outside("home")) == ["TimeoutError", False]
    assert pour(lab, "a", lab.outside("loud")) == ["ConnectionRefusedError", False]
    assert pour(lab, "mobile", lab.address("a")) == [lab.outside("carrier"), True]


def test_a_gateway_gives_ports_by_nat_pmp(lab: Lab) -> None:
    """A port asked for leads in, from outside and by hairpin, until it is given back."""
    serve(lab, "desk", SINK, "0.0.0.0")
    gateway = "192.168.1.1"
    answer = request(lab, "desk", gateway, b"\0\0")
    assert struct.unpack("!BBH", answer[:4]) == (0, 128, 0)
    assert ".".join(map(str, answer[8:])) == lab.outside("home")
    asked = struct.pack("!BBHHHI", 0, 2, 0, 8080, 9090, 600)
    assert struct.unpack("!BBHIHHI", request(lab, "desk", gateway, asked))[4:] == (8080, 9090, 600)
    leased = [mapped for mapped in lab.mappings("home") if mapped.leased]
    assert [(mapped.outside_port, mapped.inside) for mapped in leased] == [
        (9090, f"{lab.address('desk')}:8080")
    ]
    assert pour(lab, "a", lab.outside("home"), 9090) == [lab.address("a"), True]
    assert pour(lab, "laptop", lab.outside("home"), 9090) == [lab.outside("home"), True]
    request(lab, "desk", gateway, struct.pack("!BBHHHI", 0, 2, 0, 8080, 0, 0))
    assert not any(mapped.leased for mapped in lab.mappings("home"))
    assert request(lab, "desk", gateway, b"\x05\0")[:4] in (b"\2\x80\0\1", b"\0\x80\0\1")


def test_thousands_of_mappings_fit_into_an_answer(lab: Lab) -> None:
    """A gateway that has seen many flows tells all of them: an answer longer than a socket's usual buffer."""
    script = """import socket, sys
for _ in range(4000):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.sendto(b"x", (sys.argv[1], 9))
"""
    lab.run("desk", [sys.executable, "-c", script, lab.address("a")])
    assert len(lab.mappings("home")) > 3000


def test_a_gateway_gives_ports_by_pcp(lab: Lab) -> None:
    """A mapping belongs to the nonce that asked for it, and to the address that asks."""
    own = lab.address("laptop")
    head = struct.pack("!BBHI", 2, 1, 0, 600) + bytes(10) + b"\xff\xff" + bytes(map(int, own.split(".")))
    body = bytes(range(12)) + bytes([6, 0, 0, 0]) + struct.pack("!HH", 8080, 9191) + bytes(16)
    answer = request(lab, "laptop", "192.168.1.1", head + body)
    assert answer[:4] == b"\2\x81\0\0"
    assert struct.unpack("!HH", answer[40:44]) == (8080, 9191)
    assert ".".join(map(str, answer[56:60])) == lab.outside("home")
    other = bytes(12) + body[12:]
    assert request(lab, "laptop", "192.168.1.1", head[:4] + bytes(4) + head[8:] + other)[3] == 2
    assert request(lab, "desk", "192.168.1.1", head + body)[3] == 12
    assert request(lab, "laptop", "192.168.1.1", head[:4] + bytes(4) + head[8:] + body)[3] == 0
    assert not any(mapped.leased for mapped in lab.mappings("home"))


def test_ipv6_hosts_meet_over_ipv6(lab: Lab) -> None:
    """A megabyte passes intact between an IPv6-only host and one that has both, and not from IPv4."""
    serve(lab, "dual", SINK, lab.address6("dual"))
    assert lab.address("six") == lab.address6("six") == "fd77::3"
    assert pour(lab, "six", lab.address6("dual")) == [lab.address6("six"), True]
    assert pour(lab, "a", lab.address6("dual"))[1] is False


def test_addresses_change_while_a_lab_runs(lab: Lab) -> None:
    """A host is reached at its new address alone; a gateway's new address ends its mappings."""
    serve(lab, "b", SINK, "0.0.0.0")
    old = lab.address("b")
    lab.set_address("b", "10.77.0.200")
    assert pour(lab, "a", "10.77.0.200") == [lab.address("a"), True]
    assert pour(lab, "a", old) == ["TimeoutError", False]
    before = lab.outside("home")
    assert pour(lab, "desk", "10.77.0.200") == [before, True]
    lab.set_outside("home", "10.77.1.77")
    assert lab.mappings("home") == ()
    assert pour(lab, "desk", "10.77.0.200") == ["10.77.1.77", True]
    lab.set_outside("home", before)
    with pytest.raises(ConfigurationError, match="no gateway 'nowhere'"):
        lab.set_outside("nowhere", "10.77.1.9")


def test_datagrams_can_be_dropped(lab: Lab) -> None:
    """Of a host that drops UDP no datagram goes out; TCP does."""
    serve(lab, "a", TELL)
    lab.set_node("laptop", drop_udp=True)
    assert ask(lab, "laptop", 6100, f"{lab.address('a')}:7", wait_s=0.5) == [None]
    lab.set_node("laptop", drop_udp=False)
    assert ask(lab, "laptop", 6100, f"{lab.address('a')}:7") == [[lab.outside("home"), 6100]]


@pytest.mark.parametrize(
    ("one", "other"), [("independent/port", "independent/port"), ("port/port", "independent/address")]
)
@pytest.mark.parametrize("early_syn", ["drop", "reset"])
def test_simultaneous_open_passes_where_rfc_5382_says(one: str, other: str, early_syn: str) -> None:
    """Two independent mappings meet, whatever becomes of an early SYN; a mapping per destination does not."""
    shape = 'hosts = ["x", "y"]\n' + "".join(
        f'[gateways.g{host}]\nhosts = ["{host}"]\nnat = "{nat}"\nearly_syn = "{early_syn}"\n'
        for host, nat in (("x", one), ("y", other))
    )
    with Lab(parse(shape + "[[paths]]\nrtt_ms = 20\n", "punch")) as lab:
        both = [
            lab.spawn(here, python(PUNCH, lab.outside(f"g{there}"), 7000), stdout=subprocess.PIPE, text=True)
            for here, there in itertools.permutations(("x", "y"))
        ]
        met = {process.communicate(timeout=30)[0] for process in both}
        assert met == ({"met\n"} if one.startswith("independent") else {"missed\n"})


MAP = """
import asyncio, json, sys
from p2pavg.membership.reach.gateway_talk import Gateway
from p2pavg.membership.reach.port_mapping import PortMapping

async def main():
    told = []
    mapping = PortMapping(Gateway(sys.argv[1]), 8088, told.append, look_s=0.2)
    print(json.dumps(await mapping.start()), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print(json.dumps(told[-1]), flush=True)
    await mapping.close()

asyncio.run(main())
"""


def test_a_mapping_follows_its_gateway_and_ends_with_its_owner(lab: Lab) -> None:
    """A port is mapped by NAT-PMP and PCP, moves with the outside address, and is given back at the end."""
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    process = lab.spawn("laptop", python(MAP, "192.168.1.1"), text=True, **pipes)
    assert process.stdin is not None
    assert process.stdout is not None
    before = lab.outside("home")
    assert json.loads(process.stdout.readline()) == [before, 8088]
    assert {mapped.outside_port for mapped in lab.mappings("home") if mapped.leased} == {8088}
    lab.set_outside("home", "10.77.1.78")
    deadline = time.monotonic() + 20
    while not any(mapped.leased for mapped in lab.mappings("home")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.stdin.write("go\n")
    process.stdin.flush()
    assert json.loads(process.stdout.readline()) == ["10.77.1.78", 8088]
    assert process.wait(10) == 0
    assert not any(mapped.leased for mapped in lab.mappings("home"))
    lab.set_outside("home", before)
