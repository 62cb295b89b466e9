"""UPnP-IGD: ports of the gateways that speak neither PCP nor NAT-PMP. Needs `miniupnpc` (p2pavg[upnp])."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import ipaddress
import random
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from p2pavg.membership.reach.leases import LEASE_S, GatewayRefusal, Mapped

T = TypeVar("T")

INSTALL = "pip install 'p2pavg[upnp]' lets it be asked by UPnP as well"
SEARCH_MS = 300  # that devices have to answer each of the library's searches
PORTS_TRIED = 4  # outside ports: others may have the first
_EPHEMERAL = (49152, 65535)
_ABOUT = "p2pavg"


class Upnp:
    """The gateway that a search finds on this machine's network. The library blocks, and gets threads."""

    def __init__(self) -> None:
        self._device: Any = None
        self._turn = threading.Lock()  # a request whose asker is gone goes on: a removal comes after it
        self._given: dict[tuple[str, int], int] = {}  # (protocol, inside port) -> outside port

    async def lease(
        self, protocol: str, inside_port: int, outside_port: int, lease_s: int = LEASE_S
    ) -> Mapped:
        """As of `Gateway.lease`."""
        return await _in_thread(lambda: self._lease(protocol.upper(), inside_port, outside_port, lease_s))

    def _lease(self, protocol: str, inside: int, outside: int, lease_s: int) -> Mapped:
        with self._turn:
            return self._asked(protocol, inside, outside, lease_s)

    def _asked(self, protocol: str, inside: int, outside: int, lease_s: int) -> Mapped:
        try:
            library = importlib.import_module("miniupnpc")
        except ImportError:
            raise GatewayRefusal(f"miniupnpc is not installed; {INSTALL}") from None
        try:
            if self._device is None:
                self._device = _find(library)
            if not lease_s:
                outside = self._given.pop((protocol, inside), outside)
                self._device.deleteportmapping(outside, protocol)
                return Mapped("", outside, 0.0, 0)
            given = self._given[protocol, inside] = self._map(protocol, inside, outside, lease_s)
            return Mapped(outside_address(self._device.externalipaddress()), given, lease_s, 0)
        except GatewayRefusal:
            raise
        except Exception as error:  # the library raises nothing narrower
            self._device = None
            raise GatewayRefusal(f"no gateway gives a port by UPnP ({error})") from None

    def _map(self, protocol: str, inside: int, outside: int, lease_s: int) -> int:
        """The outside port. Some gateways refuse leases that end, and some the port that was asked for."""
        host, failure = self._device.lanaddr, Exception("refused")
        for port in (outside, *(random.randint(*_EPHEMERAL) for _ in range(PORTS_TRIED - 1))):
            for seconds in (lease_s, 0):
                try:
                    if self._device.addportmapping(port, protocol, host, inside, _ABOUT, "", seconds):
                        return port
                except Exception as error:
                    failure = error
        raise failure


def outside_address(said: object) -> str:
    """The numeric address that a gateway tells as its outside one. Raises GatewayRefusal for anything else:
    a peer would announce it.
    """
    try:
        return str(ipaddress.ip_address(said if isinstance(said, str) else ""))
    except ValueError:
        raise GatewayRefusal("the gateway tells no address of its outside by UPnP") from None


def _find(library: Any) -> Any:
    device = library.UPnP()
    device.discoverdelay = SEARCH_MS
    with contextlib.suppress(Exception):  # it raises "Success" when it found nothing
        device.discover()
    device.selectigd()
    return device


async def _in_thread(work: Callable[[], T]) -> T:
    """The result of `work`, in a thread that nobody waits for when the loop ends."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            result, error = work(), None
        except GatewayRefusal as refusal:
            result, error = None, refusal
        with contextlib.suppress(RuntimeError):  # the loop ended meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="p2pavg-upnp", daemon=True).start()
    return await done
