"""What a meeting costs whoever is dialled: also one that never wanted to meet."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from p2pavg.errors import UnreachableError
from p2pavg.transport.links.carried import CountedSocket
from p2pavg.transport.ways import punching
from p2pavg.transport.ways.hole import Hole


@pytest.mark.parametrize("rtt_s", [0.0, punching.MOST_RTT_S])
async def test_whoever_refuses_is_dialled_a_few_times(rtt_s: float) -> None:
    """A port that answers each SYN by RST gets eight in each of three bursts at most, however far it is."""
    made: list[CountedSocket] = []

    def make(*args: Any, **options: Any) -> CountedSocket:
        made.append(CountedSocket(*args, **options))
        return made[-1]

    with socket.socket() as refuses:
        refuses.bind(("127.0.0.1", 0))
        with Hole(make, socket.AF_INET) as hole:
            made.clear()
            with pytest.raises(UnreachableError):
                await hole.meet([refuses.getsockname()], rtt_s, speaks=True)
    assert 3 <= len(made) <= 3 * punching.MOST_DIALS


async def test_an_early_refusal_is_got_over() -> None:
    """Two that dial each other, one of them a moment later than the other, meet all the same."""
    with Hole(CountedSocket, socket.AF_INET) as one, Hole(CountedSocket, socket.AF_INET) as two:
        two._listening.close()  # so that it refuses until it dials itself

        async def later() -> CountedSocket:
            await asyncio.sleep(0.1)
            return await two.meet([("127.0.0.1", one._port)], 0.1, speaks=False)

        second = asyncio.create_task(later())
        first = asyncio.create_task(one.meet([("127.0.0.1", two._port)], 0.1, speaks=True))
        sock = await asyncio.wait_for(first, 20)
        await asyncio.get_running_loop().sock_sendall(sock, b"word")
        other = await asyncio.wait_for(second, 20)
        assert await asyncio.get_running_loop().sock_recv(other, 4) == b"word"
        sock.close()
        other.close()
