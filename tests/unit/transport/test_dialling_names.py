"""Dialling a name with several addresses: side by side, the families in turn, the first to answer is kept."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from p2pavg.transport.links import raw_socket

DEADLINE_S = 20.0
SIX, FOUR = socket.AF_INET6, socket.AF_INET
SILENT, REFUSED = ("192.0.2.1", 9), ("127.0.0.1", 1)


def info(family: int, address: tuple[Any, ...]) -> raw_socket.Info:
    return family, socket.SOCK_STREAM, 6, "", address


def named(monkeypatch: pytest.MonkeyPatch, found: list[raw_socket.Info]) -> None:
    """The name "peer" has these addresses."""

    async def getaddrinfo(*args: object, **options: object) -> list[raw_socket.Info]:
        return found

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)


def test_the_families_come_in_turn() -> None:
    """Beginning with that of the system's first choice."""
    sixes = [info(SIX, ("::1", port, 0, 0)) for port in (1, 2, 3)]
    fours = [info(FOUR, ("127.0.0.1", 4))]
    assert raw_socket.in_turn(sixes + fours) == [sixes[0], fours[0], sixes[1], sixes[2]]
    assert raw_socket.in_turn([]) == []


async def test_an_address_that_is_silent_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind an address that does not answer, and one that refuses, the third is connected at once."""
    hangs: list[tuple[Any, ...]] = []
    connect = asyncio.get_running_loop().sock_connect

    async def sock_connect(sock: socket.socket, address: tuple[Any, ...]) -> None:
        if address == SILENT:
            hangs.append(address)
            await asyncio.get_running_loop().create_future()
        await connect(sock, address)

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", sock_connect)
    made: list[socket.socket] = []

    def make(*args: int) -> socket.socket:
        made.append(socket.socket(*args))
        return made[-1]

    with socket.create_server(("127.0.0.1", 0)) as server:
        named(monkeypatch, [info(FOUR, SILENT), info(FOUR, REFUSED), info(FOUR, server.getsockname())])
        async with asyncio.timeout(DEADLINE_S):
            sock = await raw_socket.dial("peer", 1, make)
        assert sock.getpeername() == server.getsockname()
        assert hangs == [SILENT]
        await asyncio.sleep(0)
        assert [one.fileno() >= 0 for one in made] == [False, False, True]
        sock.close()


async def test_the_last_failure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every address refuses, and where there is none."""
    named(monkeypatch, [info(FOUR, REFUSED), info(FOUR, REFUSED)])
    with pytest.raises(ConnectionRefusedError):
        await raw_socket.dial("peer", 1, socket.socket)
    named(monkeypatch, [])
    with pytest.raises(OSError, match="has no address"):
        await raw_socket.dial("peer", 1, socket.socket)
