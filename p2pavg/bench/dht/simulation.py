"""Many nodes of the table in one process, in virtual time, over a network that exists only in memory."""

from __future__ import annotations

import asyncio
import functools
import random
import selectors
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from p2pavg import identity
from p2pavg.identity import Identity
from p2pavg.membership import DHT
from p2pavg.membership.table import record
from p2pavg.membership.table.address import parse_addresses
from p2pavg.membership.table.dialling_back import DIAL_SECONDS

Result = TypeVar("Result")
Address = tuple[str, int]


class _VirtualSelector(selectors.DefaultSelector):
    """A selector that never waits: where a real one would sleep, the clock jumps."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everything waits and no timer is set: the simulated nodes hang")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when every task waits."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual.now


class _Transport(asyncio.DatagramTransport):
    def __init__(self, network: Network, address: Address) -> None:
        super().__init__()
        self._network = network
        self._address = address
        self._closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._address if name == "sockname" else default

    def sendto(self, data: Any, addr: Any = None) -> None:
        self._network.send(bytes(data), self._address, addr)

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self._network.unplug(self._address)


class Network:
    """Delivers datagrams after `delay(source, destination)` seconds, or loses them.

    `loss` is the fraction lost. `reaches(source, destination)` may forbid a path, as a firewall does.
    """

    def __init__(self, *, seed: int = 0, loss: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.loss = loss
        self.delay: Callable[[Address, Address], float] = lambda source, destination: 0.001
        self.reaches: Callable[[Address, Address], bool] = lambda source, destination: True
        self.datagrams = 0
        self.dials: list[tuple[str, Address]] = []  # connections that were tried: (calling host, address)
        self._protocols: dict[Address, asyncio.DatagramProtocol] = {}
        self._next_host = 0
        self._arriving: dict[float, list[tuple[bytes, Address, Address]]] = {}  # arrival time -> datagrams

    async def start(
        self, initial_peers: Sequence[str] = (), *, address: Address | None = None, **options: Any
    ) -> DHT:
        """Start a node on a host of its own, `address` or the next of 10.0.0.0/8, port 31330.

        host="0.0.0.0" among the options: the node does not know its address.
        """
        if address is None:
            self._next_host += 1
            high, low = divmod(self._next_host, 250)
            address = (f"10.0.{high}.{low + 1}", 31330)
        place, host = address, options.pop("host", address[0])

        def open_endpoint(protocol: asyncio.DatagramProtocol) -> Address:
            self.plug(place, protocol)
            return host, place[1]

        options.setdefault("connect", functools.partial(self.connect, place))
        return await DHT.start(
            options.pop("identity", None) or Identity.generate(),
            host=host,
            port=address[1],
            initial_peers=parse_addresses(initial_peers),
            open_endpoint=open_endpoint,
            clock=asyncio.get_running_loop().time,
            **options,
        )

    def plug(self, address: Address, protocol: asyncio.DatagramProtocol) -> None:
        """Let `protocol` send from, and receive at, `address` from now on."""
        self._protocols[address] = protocol
        protocol.connection_made(_Transport(self, address))

    async def connect(self, source: Address, host: str, port: int) -> bool:
        """Whether a connection can be opened to (host, port), where each node of the network accepts
        connections.
        """
        self.dials.append((source[0], (host, port)))
        reached = (host, port) in self._protocols and self.reaches(source, (host, port))
        await asyncio.sleep(2 * self.delay(source, (host, port)) if reached else DIAL_SECONDS)
        return reached

    def send(self, data: bytes, source: Address, destination: Address) -> None:
        """Send one datagram."""
        self.datagrams += 1
        if self.rng.random() >= self.loss and self.reaches(source, destination):
            loop = asyncio.get_running_loop()
            when = round(loop.time() + self.delay(source, destination), 9)
            together = self._arriving.get(when)
            if together is None:
                together = self._arriving[when] = []
                loop.call_at(when, self._deliver, when)
            together.append((data, source, destination))

    def _deliver(self, when: float) -> None:
        for data, source, destination in self._arriving.pop(when):
            protocol = self._protocols.get(destination)
            if protocol is not None:
                protocol.datagram_received(data, source)

    def unplug(self, address: Address) -> None:
        """Remove the node at `address`."""
        self._protocols.pop(address, None)


def simulate(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` in virtual time. All nodes share one process, which need not check a signature twice."""
    vars(record)["verify"] = functools.lru_cache(maxsize=65536)(identity.verify)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
