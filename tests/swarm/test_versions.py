"""Peers of different versions: another minor version trains along, another major one is refused by name."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import pytest

from p2pavg import __version__
from p2pavg.bench.workers import Worker, WorkerError, Workers
from p2pavg.errors import IncompatiblePeerError
from p2pavg.identity import Identity
from p2pavg.membership import DHT
from p2pavg.membership.table.wire import HEADER_BYTES, NOTICE, VERSION
from p2pavg.transport.links import handshake

pytestmark = pytest.mark.cold  # the later version changes modules before others are imported
MAJOR, MINOR = handshake.WIRE_VERSION

LATER = """
import runpy
from dataclasses import replace
from p2pavg.rounds.protocol import wire
from p2pavg.rounds.protocol.fields import integer
from p2pavg.transport.links import handshake, link

handshake.WIRE_VERSION = {version}
if {talks}:  # a later minor version: a new field in every message of the rounds, and a new message
    known, read, plain, sent = dict(wire.FORMS), wire.from_dict, wire.to_dict, link.Link.send
    wire.to_dict = lambda message: {{**plain(message), "later": 1}}

    def with_later(form):
        return replace(
            form,
            kind=lambda later=1, **fields: form.kind(**fields),
            checks=(*form.checks, ("later", integer)),
            optional=frozenset(["later"]),
        )

    def from_dict(data, **versions):
        wire.FORMS.update({{name: with_later(form) for name, form in known.items()}})
        try:
            return read(data, **versions)
        finally:
            wire.FORMS.update(known)

    wire.from_dict = from_dict

    def send(self, message):
        sent(self, message)
        if message.get("t") in wire.NAMES:
            sent(self, {{"t": "later", "n": 1}})

    link.Link.send = send
runpy.run_module("p2pavg.bench.rounds.worker", run_name="__main__")
"""


def later(version: tuple[int, int], *, talks: bool) -> list[str]:
    return [sys.executable, "-c", LATER.format(version=version, talks=talks)]


def start(worker: Worker, address: str | None) -> dict[str, Any]:
    peers = [] if address is None else [address]
    worker.send(do="start", index=0, initial_peers=peers, target=20, step_seconds=0.02, epochs=5)
    return worker.receive(60.0)


@pytest.mark.parametrize("older_first", [True, False])
def test_another_minor_version_trains_along(older_first: bool) -> None:
    """A peer whose later minor version says more, in fields and messages, trains with one that knows less."""
    module = "p2pavg.bench.rounds.worker"
    with (
        Workers(1, module) as older,
        Workers(1, module, argv=later((MAJOR, MINOR + 3), talks=True)) as newer,
    ):
        first, second = (older, newer) if older_first else (newer, older)
        one, two = first.workers[0], second.workers[0]
        start(two, start(one, None)["address"])
        for worker in (one, two):
            worker.send(do="train")
        for answer in (one.receive(60.0), two.receive(60.0)):
            assert len(answer["epochs"]) >= 3
            assert not any(epoch["wrong"] for epoch in answer["epochs"])
            assert {epoch["members"] for epoch in answer["epochs"][1:]} == {2}


@pytest.mark.parametrize("older_first", [True, False])
def test_another_major_version_is_refused_by_name(older_first: bool) -> None:
    """Whichever of the two is the newcomer, it is told both versions."""
    module = "p2pavg.bench.rounds.worker"
    with (
        Workers(1, module) as older,
        Workers(1, module, argv=later((MAJOR + 1, 0), talks=False)) as newer,
    ):
        first, second = (older, newer) if older_first else (newer, older)
        address = start(first.workers[0], None)["address"]
        with pytest.raises(WorkerError) as refused:
            start(second.workers[0], address)
    theirs, ours = (MAJOR, MINOR), (MAJOR + 1, 0)
    if not older_first:
        theirs, ours = ours, theirs
    assert "speaks wire version {}.{}, ".format(*theirs) in str(refused.value)
    assert f"this one (p2pavg {__version__}) version {ours[0]}.{ours[1]}" in str(refused.value)


def test_nodes_of_another_version_of_the_table() -> None:
    """A node that hears another version says its own; a newcomer that is told so names both."""

    async def scenario() -> None:
        node = await DHT.start(Identity.generate(), host="127.0.0.1", port=0)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.bind(("127.0.0.1", 0))
            other.setblocking(False)
            loop = asyncio.get_running_loop()
            strange = NOTICE[:2] + bytes([VERSION + 1])
            await loop.sock_sendto(other, strange, ("127.0.0.1", node.port))  # a notice is not answered
            await loop.sock_sendto(other, strange.ljust(HEADER_BYTES + 9, b"\0"), ("127.0.0.1", node.port))
            data, _ = await asyncio.wait_for(loop.sock_recvfrom(other, 2000), 10)
            assert data == NOTICE
            assert len(data) < HEADER_BYTES
            with pytest.raises(BlockingIOError):
                other.recvfrom(2000)

            async def answer_all() -> None:
                while True:
                    _, address = await loop.sock_recvfrom(other, 2000)
                    await loop.sock_sendto(other, strange, address)

            task = asyncio.ensure_future(answer_all())
            port = other.getsockname()[1]
            with pytest.raises(IncompatiblePeerError, match=rf"version {VERSION + 1} .* version {VERSION};"):
                await DHT.start(
                    Identity.generate(),
                    host="127.0.0.1",
                    port=0,
                    initial_peers=[("127.0.0.1", port)],
                    join_timeout=1.0,
                )
            task.cancel()
        await node.stop()

    asyncio.run(scenario())
