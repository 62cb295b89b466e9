"""What a relay costs and gives: `python -m bench.relay [--cap-mbps 100] [--seconds 5] [--json PATH]`.

Two connections of this process are joined by a relay in another one, over the loopback, and both sides send
all they can. Prints which share of the cap passes, how much CPU time the relay takes for it, and how much
slower a thread that computes in Python gets beside it: the most that a relay can cost its own training.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import statistics
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from p2pavg.bench.machine import environment
from p2pavg.identity import Identity
from p2pavg.transport.engine import NoEvents
from p2pavg.transport.links import raw_socket as wire
from p2pavg.transport.links.carried import Carried, CountedSocket
from p2pavg.transport.links.endpoint import Endpoint
from p2pavg.transport.links.handshake import Party
from p2pavg.transport.links.link import Link, Message
from p2pavg.transport.python.engine import PythonEngine
from p2pavg.transport.ways import relay as relaying
from p2pavg.transport.ways.relay import Relay, enter

RUN = "relay"
TURNS = 5  # with and without load, of which the median counts
PARTY = Party.of(RUN, closed=False)


class _Alone:
    """Endpoint events of a relay without links."""

    def link_up(self, link: Link) -> None: ...

    def link_down(self, link: Link, reason: str) -> None: ...

    def message(self, link: Link, message: Message) -> None: ...


class _Trainer(threading.Thread):
    """Computes in Python, as no training does: it wants the interpreter all the time."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.steps = 0

    def run(self) -> None:
        while True:
            sum(range(2000))
            self.steps += 1

    def rate(self, seconds: float) -> float:
        """Steps a second, for so long."""
        before, began = self.steps, time.monotonic()
        time.sleep(seconds)
        return (self.steps - before) / (time.monotonic() - began)


async def _serve(pipe: Connection, bytes_per_second: float) -> None:
    endpoint = await Endpoint.start(
        Identity.generate(),
        run_id=RUN,
        listen_host="127.0.0.1",
        listen_port=0,
        port_is_default=False,
        engine=PythonEngine(NoEvents()),
        hello={"data": False},
        streams=1,
        events=_Alone(),
    )
    relaying.CLAIM_S = 600.0  # all tunnels are opened at once
    relay = Relay(PARTY, lambda: bytes_per_second)
    endpoint.reception.tunnels = relay.claim
    pipe.send((endpoint.port, [relay.open(b"1" * 20, b"2" * 20) for _ in range(1 + TURNS)]))
    before, loop = _cpu_s(), asyncio.get_running_loop()
    await loop.run_in_executor(None, pipe.recv)
    pipe.send((relay.passed_on, _cpu_s() - before))
    trainer = _Trainer()
    trainer.start()
    while (seconds := await loop.run_in_executor(None, pipe.recv)) is not None:
        pipe.send(await loop.run_in_executor(None, trainer.rate, seconds))
    relay.close()
    await endpoint.close()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(pipe: Connection, bytes_per_second: float) -> None:
    """The relay's process."""
    uvloop.run(_serve(pipe, bytes_per_second))


async def pour(port: int, tokens: tuple[bytes, bytes], seconds: float) -> int:
    """Send both ways for so long; how many bytes came."""
    carried, came = Carried(), 0

    async def end(token: bytes) -> CountedSocket:
        sock = await wire.dial("127.0.0.1", port, carried.socket)
        await enter(sock, token, PARTY)
        return sock

    async def send(sock: CountedSocket) -> None:
        while True:
            await wire.send(sock, bytes(1 << 16))

    async def take(sock: CountedSocket) -> None:
        nonlocal came
        while True:
            data = await asyncio.get_running_loop().sock_recv(sock, 1 << 16)
            came += len(data)

    socks = await asyncio.gather(*(end(token) for token in tokens))
    tasks = [asyncio.create_task(work(sock)) for sock in socks for work in (send, take)]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for sock in socks:
        sock.close()
    return came


def _slowed(pipe: Connection, port: int, tokens: tuple[bytes, bytes], seconds: float) -> float:
    """The speed of the training thread while bytes are relayed, as a share of that while none are."""

    async def loaded() -> float:
        pouring = asyncio.create_task(pour(port, tokens, seconds + 0.5))
        await asyncio.sleep(0.25)
        pipe.send(seconds)
        rate: float = await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        await pouring
        return rate

    pipe.send(seconds)
    alone: float = pipe.recv()
    return asyncio.run(loaded()) / alone


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.relay", description=__doc__)
    parser.add_argument("--cap-mbps", type=float, default=100.0, help="default: %(default)g")
    parser.add_argument("--seconds", type=float, default=5.0, help="default: %(default)g")
    parser.add_argument("--json", metavar="PATH", type=Path)
    args = parser.parse_args(argv)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=serve, args=(there, args.cap_mbps * 1e6 / 8))
    process.start()
    port, (tokens, *spare) = here.recv()
    began = time.monotonic()
    came = asyncio.run(pour(port, tokens, args.seconds))
    seconds = time.monotonic() - began
    here.send(None)
    passed, cpu = here.recv()
    slowed = statistics.median(_slowed(here, port, tokens, args.seconds) for tokens in spare)
    here.send(None)
    process.join()
    result = {
        "environment": environment(),
        "cap_mbps": args.cap_mbps,
        "seconds": seconds,
        "share_of_cap": 8 * came / seconds / (args.cap_mbps * 1e6),
        "cpu_seconds_per_gb": cpu / (passed / 1e9),
        "cpu_share": cpu / seconds,
        "training_ratio": slowed,
    }
    print(
        f"{result['share_of_cap']:.2f} of the cap of {args.cap_mbps:g} Mb/s; the relay took "
        f"{cpu / seconds:.1%} of a core; a thread that computes in Python beside it went at {slowed:.3f} "
        f"of its speed; {result['cpu_seconds_per_gb']:.2f} CPU seconds per GB"
    )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
