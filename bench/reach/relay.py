"""What a relay costs and gives: `python -m bench.reach.relay [--cap-mbps 25] [--seconds 2] [--json PATH]`.

Two connections of this process are joined by a relay in another one, over the loopback, and both sides send
all they can. Prints which share of the cap passes, how much CPU time the relay takes for it, and how fast
training goes in its process beside it: a model of torch on one thread, or a loop in Python, which wants
the interpreter all the time as no training does. Turns with and without load alternate, and their order too.
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
from collections.abc import Callable
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
TURNS = 16  # with and without load, of which the median counts
WIDTH, BATCH = 512, 64  # of the model that trains
PARTY = Party.of(RUN, closed=False)


class _Alone:
    """Endpoint events of a relay without links."""

    def link_up(self, link: Link) -> None: ...

    def link_down(self, link: Link, reason: str) -> None: ...

    def message(self, link: Link, message: Message) -> None: ...


def _python_step() -> None:
    sum(range(2000))


def _torch_step() -> Callable[[], None]:
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


class _Trainer(threading.Thread):
    """Trains, as fast as it can."""

    def __init__(self, compute: str) -> None:
        super().__init__(daemon=True)
        self.steps = 0
        self._step = _torch_step() if compute == "torch" else _python_step

    def run(self) -> None:
        while True:
            self._step()
            self.steps += 1

    def rate(self, seconds: float) -> float:
        """Steps a second, for so long."""
        before, began = self.steps, time.monotonic()
        time.sleep(seconds)
        return (self.steps - before) / (time.monotonic() - began)


async def _serve(pipe: Connection, bytes_per_second: float, compute: str) -> None:
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
    trainer = _Trainer(compute)
    trainer.start()
    while (seconds := await loop.run_in_executor(None, pipe.recv)) is not None:
        pipe.send(await loop.run_in_executor(None, trainer.rate, seconds))
    relay.close()
    await endpoint.close()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(pipe: Connection, bytes_per_second: float, compute: str) -> None:
    """The relay's process."""
    uvloop.run(_serve(pipe, bytes_per_second, compute))


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


def _slowed(
    pipe: Connection, port: int, tokens: tuple[bytes, bytes], seconds: float, *, loaded_first: bool
) -> float:
    """The speed of the training thread while bytes are relayed, as a share of that while none are."""

    def alone() -> float:
        pipe.send(seconds)
        rate: float = pipe.recv()
        return rate

    async def loaded() -> float:
        pouring = asyncio.create_task(pour(port, tokens, seconds + 0.5))
        await asyncio.sleep(0.25)
        pipe.send(seconds)
        rate: float = await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        await pouring
        return rate

    if loaded_first:
        beside = asyncio.run(loaded())
        return beside / alone()
    before = alone()
    return asyncio.run(loaded()) / before


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.reach.relay", description=__doc__)
    parser.add_argument("--cap-mbps", type=float, default=25.0, help="default: %(default)g")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn; default: %(default)g")
    parser.add_argument(
        "--compute", choices=("torch", "python"), default="torch", help="default: %(default)s"
    )
    parser.add_argument("--json", metavar="PATH", type=Path)
    args = parser.parse_args(argv)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=serve, args=(there, args.cap_mbps * 1e6 / 8, args.compute))
    process.start()
    port, (tokens, *spare) = here.recv()
    began = time.monotonic()
    came = asyncio.run(pour(port, tokens, args.seconds))
    seconds = time.monotonic() - began
    here.send(None)
    passed, cpu = here.recv()
    ratios = [
        _slowed(here, port, tokens, args.seconds, loaded_first=turn % 2 == 1)
        for turn, tokens in enumerate(spare)
    ]
    low, slowed, high = statistics.quantiles(ratios, n=4)
    here.send(None)
    process.join()
    result = {
        "environment": environment(),
        "cap_mbps": args.cap_mbps,
        "seconds": seconds,
        "share_of_cap": 8 * came / seconds / (args.cap_mbps * 1e6),
        "cpu_seconds_per_gb": cpu / (passed / 1e9),
        "cpu_share": cpu / seconds,
        "compute": args.compute,
        "training_ratio": slowed,
        "training_ratio_quartiles": [low, high],
        "training_ratios": ratios,
    }
    print(
        f"{result['share_of_cap']:.2f} of the cap of {args.cap_mbps:g} Mb/s; the relay took "
        f"{cpu / seconds:.1%} of a core; training in its process ({args.compute}) went at {slowed:.3f} of "
        f"its speed (quartiles {low:.3f}, {high:.3f}); {result['cpu_seconds_per_gb']:.2f} CPU seconds per GB"
    )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
