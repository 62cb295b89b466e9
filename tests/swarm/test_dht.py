"""The table and the view between real processes, and the commands that people use them with."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from p2pavg.identity import Identity
from p2pavg.membership import DHT, PeerInfo, View, key_of
from tests.ports import free_port

pytestmark = pytest.mark.swarm

ROOT = Path(__file__).parents[2]
MEMBER = """
import asyncio, sys
from p2pavg.identity import Identity
from p2pavg.membership import DHT, PeerInfo, View
from p2pavg.membership.table.address import parse_addresses

async def main():
    named = parse_addresses([sys.argv[1]])
    node = await DHT.start(Identity.generate(), host="127.0.0.1", port=0, initial_peers=named)
    view = View(node, "r", lifetime=float(sys.argv[2]))
    await view.refresh_now()
    await view.announce(PeerInfo(node.identity.peer_id, (("127.0.0.1", node.port),), region="lab"))
    print(node.identity.peer_id.hex(), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await view.leave()
    await node.stop()

asyncio.run(main())
"""


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process with pipes; killed at the end, when it still runs."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()


def first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "p2pavg", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


async def until(view: View, condition: Callable[[], bool], seconds: float) -> None:
    """Return when `condition` holds, looked at after each change of the view; fail after `seconds`."""
    changed = asyncio.Event()
    view.on_change = changed.set
    async with asyncio.timeout(seconds):
        while not condition():
            changed.clear()
            await changed.wait()


def test_bootstrap_prints_its_address_keeps_its_identity_and_exits_cleanly(tmp_path: Path) -> None:
    """The first line is an address that works; after a restart the same identity answers there."""
    port = free_port()
    arguments = (
        "-m",
        "p2pavg",
        "bootstrap",
        "--listen",
        f"127.0.0.1:{port}",
        "--identity",
        str(tmp_path / "key"),
    )

    async def who_answers() -> bytes:
        node = await DHT.start(
            Identity.generate(),
            host="127.0.0.1",
            port=0,
            initial_peers=[("127.0.0.1", port)],
        )
        (contact,) = list(node.node.contacts)
        await node.stop()
        return contact.id

    seen = []
    for number in (signal.SIGTERM, signal.SIGINT):
        with process(*arguments) as child:
            assert first_line(child) == f"127.0.0.1:{port}"
            seen.append(asyncio.run(who_answers()))
            child.send_signal(number)
            _, errors = child.communicate(timeout=10)
            assert child.returncode == 0
            assert errors == ""
    assert seen[0] == seen[1] == Identity.load_or_create(tmp_path / "key").peer_id


def test_peers_lists_who_is_in_a_run() -> None:
    """`p2pavg peers` shows the members of the run that it is asked for, as a table and as JSON."""

    async def scenario() -> None:
        node = await DHT.start(Identity.generate(), host="127.0.0.1", port=0)
        view = View(node, "my-run")
        address = ("127.0.0.1", node.port)
        info = PeerInfo(node.identity.peer_id, (address,), region="eu-west", epoch=7, samples_per_second=12.5)
        await view.announce(info)
        way_in = ("--initial-peers", f"127.0.0.1:{node.port}")
        table = await asyncio.to_thread(command, "peers", "my-run", *way_in)
        document = await asyncio.to_thread(command, "peers", "my-run", *way_in, "--json", "-")
        nobody = await asyncio.to_thread(command, "peers", "another", *way_in)
        view.close()
        await node.stop()
        assert table.returncode == 0
        assert f"127.0.0.1:{node.port}" in table.stdout
        assert "eu-west" in table.stdout
        (peer,) = json.loads(document.stdout)["peers"]
        assert peer["peer_id"] == node.identity.peer_id.hex()
        assert (peer["epoch"], peer["samples_per_second"], peer["role"]) == (7, 12.5, "trainer")
        assert nobody.returncode == 1
        assert "nobody is in run 'another'" in nobody.stderr

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bootstrap", "--listen", "nonsense"), "host:port"),
        (("bootstrap", "--listen", "127.0.0.1:{taken}", "--identity", "{folder}/key"), "taken"),
        (("bootstrap", "--listen", "127.0.0.1:0x1"), "host:port"),
        (("peers", "r"), "--initial-peers"),
        (("peers", "r", "--initial-peers", "127.0.0.1:9"), "none of the initial peers answered"),
    ],
)
def test_a_users_mistake_is_one_clear_line(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    """A malformed, taken, missing or silent address ends the command with code 1 and one clear line."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        taken = other.getsockname()[1]
        result = command(*(part.format(taken=taken, folder=tmp_path) for part in arguments))
    assert result.returncode == 1
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_killed_stopped_and_leaving_processes() -> None:
    """A killed process leaves the view within its lifetime and a second, a departing one within a second."""
    lifetime = 3.0

    async def scenario() -> None:
        node = await DHT.start(Identity.generate(), host="127.0.0.1", port=0)
        view = View(node, "r", lifetime=lifetime)
        await view.announce(PeerInfo(node.identity.peer_id, (("127.0.0.1", node.port),)))
        loop = asyncio.get_running_loop()
        arguments = ("-c", MEMBER, f"127.0.0.1:{node.port}", str(lifetime))
        with process(*arguments) as killed, process(*arguments) as stopped, process(*arguments) as departing:
            ids = [
                bytes.fromhex(await asyncio.to_thread(first_line, child))
                for child in (killed, stopped, departing)
            ]
            await until(view, lambda: set(ids) == view.peers.keys(), 5.0)
            assert departing.stdin is not None
            departing.stdin.close()
            await until(view, lambda: ids[2] not in view.peers, 1.0)
            start = loop.time()
            killed.kill()
            stopped.send_signal(signal.SIGSTOP)
            await until(view, lambda: not view.peers, lifetime + 1.0)
            assert loop.time() - start <= lifetime + 1.0
            stopped.send_signal(signal.SIGCONT)
            await until(view, lambda: view.peers.keys() == {ids[1]}, 10.0)
        view.close()
        await node.stop()

    asyncio.run(scenario())


def test_the_benchmark_finds_everything(tmp_path: Path) -> None:
    """`bench dht` with deaths finds every living record and no dead one, and reports the promised fields."""
    path = tmp_path / "dht.json"
    result = subprocess.run(
        [
            *(sys.executable, "-m", "p2pavg.bench", "dht", "--nodes", "24", "--publishers", "8"),
            *("--kill", "0.25", "--lifetime", "4", "--json", str(path), "--plot", str(tmp_path / "dht.svg")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(path.read_text())
    assert found["found_fraction"] == 1.0
    assert found["stale_fraction"] == 0.0
    assert 0 < found["get_ms_p50"] <= found["get_ms_p99"]
    assert found["store_ms_p50"] > 0
    assert (tmp_path / "dht.svg").stat().st_size > 0


def test_a_table_may_span_address_families() -> None:
    """A node that listens on [::] is reached over IPv4 and IPv6, and by name."""
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")

    async def scenario() -> None:
        node = await DHT.start(Identity.generate(), host="::", port=0)
        over4 = await DHT.start(
            Identity.generate(),
            host="0.0.0.0",
            port=0,
            initial_peers=[("localhost", node.port)],
        )
        try:
            over6 = await DHT.start(
                Identity.generate(), host="::1", port=0, initial_peers=[("::1", node.port)]
            )
        except OSError:
            await asyncio.gather(node.stop(), over4.stop())
            pytest.skip("this machine has no IPv6 loopback")
        await over4.store(key_of("k"), b"four", 10.0)
        await over6.store(key_of("k"), b"six", 10.0)
        assert {record.value for record in (await node.get(key_of("k"))).values()} == {b"four", b"six"}
        await asyncio.gather(node.stop(), over4.stop(), over6.stop())

    asyncio.run(scenario())


def test_others_dial_back() -> None:
    """A peer whose TCP port is open to others learns so; one whose port is closed is told what to do."""

    async def scenario() -> None:
        first = await DHT.start(Identity.generate(), host="127.0.0.1", port=0)
        second = await DHT.start(
            Identity.generate(),
            host="127.0.0.1",
            port=free_port(),  # of TCP, too: another program could listen there at a port that UDP gave
            initial_peers=[("127.0.0.1", first.port)],
        )
        closed = await second.check_reachability()
        assert closed.reachable is False
        assert f"127.0.0.1:{second.port}" in closed.advice
        third = await DHT.start(
            Identity.generate(),
            host="127.0.0.1",
            port=free_port(),  # of TCP, too: another program could listen there at a port that UDP gave
            initial_peers=[("127.0.0.1", first.port)],
        )
        listener = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", third.port)
        opened = await third.check_reachability()
        assert opened.reachable is True
        assert opened.address == f"127.0.0.1:{third.port}"
        listener.close()
        await asyncio.gather(first.stop(), second.stop(), third.stop())

    asyncio.run(scenario())


def test_a_process_that_was_stopped_believes_nobody_dead() -> None:
    """A process stopped for longer than a lifetime has everybody in view when it goes on, without a gap."""
    lifetime = 2.0
    program = MEMBER.replace(
        "    print(node", "    view.on_change = lambda: print(len(view.peers), flush=True)\n    print(node"
    )

    async def scenario() -> None:
        node = await DHT.start(Identity.generate(), host="127.0.0.1", port=0)
        view = View(node, "r", lifetime=lifetime)
        await view.announce(PeerInfo(node.identity.peer_id, (("127.0.0.1", node.port),)))
        with process("-c", program, f"127.0.0.1:{node.port}", str(lifetime)) as child:
            peer_id = bytes.fromhex(await asyncio.to_thread(first_line, child))
            await until(view, lambda: peer_id in view.peers, 5.0)
            child.send_signal(signal.SIGSTOP)
            await until(view, lambda: peer_id not in view.peers, lifetime + 1.0)
            await asyncio.sleep(lifetime)  # not to wait for something: the stop must outlast every record
            child.send_signal(signal.SIGCONT)
            await until(view, lambda: peer_id in view.peers, 5.0)
            assert child.stdin is not None
            child.stdin.close()
            assert child.stdout is not None
            assert await asyncio.to_thread(child.stdout.read) == ""
        view.close()
        await node.stop()

    asyncio.run(scenario())
