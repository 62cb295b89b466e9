"""A peer that was given no initial peers, beside another one of its run on the same machine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from p2pavg.peer import advice, entering
from p2pavg.peer.refusals import LinkRefusals
from p2pavg.peer.settings import Settings
from p2pavg.transport.links import handshake

Welcome = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


@contextlib.asynccontextmanager
async def listening(welcome: Welcome) -> AsyncIterator[int]:
    """The port of a program on this machine."""
    server = await asyncio.start_server(welcome, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def peer(run_id: str, *, closed: bool = False) -> Welcome:
    """What a peer of a run says first."""

    def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(handshake.preamble(handshake.CONTROL, handshake.Party.of(run_id, closed=closed)))

    return welcome


async def enter(port: int, listen: str = "0.0.0.0:31330", *initial_peers: str) -> None:
    """A first peer of run "digits" begins, on the port after `port`."""

    async def nobody(*_: Any) -> list[Exception]:
        return []

    refusals = LinkRefusals(set, lambda: 0, lambda error: None, proven=False)
    dialler: Any = SimpleNamespace(first_links=nobody)
    endpoint: Any = SimpleNamespace(links={}, port=port + 1)
    view: Any = SimpleNamespace(peers={})
    settings = Settings("digits", initial_peers=initial_peers, listen=listen)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(entering, "DEFAULT_PORT", port)
        patched.setattr(advice, "ask", nobody)
        await entering.first_links(dialler, refusals, endpoint, view, settings)


@pytest.mark.parametrize("closed", [False, True])
async def test_whoever_forgot_initial_peers_is_told_of_the_peer_beside(
    closed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The port before this peer's is one of the same run, which it may enter or not: its address is named."""
    async with listening(peer("digits", closed=closed)) as port:
        await enter(port)
    assert f"to train together pass initial_peers='127.0.0.1:{port}'" in caplog.text


def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Say nothing."""


def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Be another program."""
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    writer.close()


@pytest.mark.parametrize("welcome", [peer("another"), silent, other])
async def test_another_program_beside_is_nothing_to_tell_of(
    welcome: Welcome, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer of another run, and programs that are none, are not taken for one, and hold nobody up."""
    monkeypatch.setattr(advice, "BESIDE_TIMEOUT_S", 0.2)
    async with listening(welcome) as port, asyncio.timeout(10.0):
        await enter(port)
    assert "has a peer at" not in caplog.text


@pytest.mark.parametrize("words", [("127.0.0.1:0",), ("0.0.0.0:31330", "192.0.2.1:31330")])
async def test_who_chose_is_not_told(words: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    """Whoever named a port of its own, or whom to train with, knows what it does."""
    async with listening(peer("digits")) as port:
        await enter(port, *words)
    assert "has a peer at" not in caplog.text
