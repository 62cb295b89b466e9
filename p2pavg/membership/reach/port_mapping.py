"""Port mapping: a gateway is asked to lead a port of its outside address here, and asked again in time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from typing import TypeVar, cast

from p2pavg.membership.reach import pcp, pmp
from p2pavg.membership.reach.leases import LEASE_S, GatewayRefusal, Lessor, Mapped

logger = logging.getLogger("p2pavg.membership")
A = TypeVar("A")

PORT = 5351  # of gateways, for NAT-PMP and PCP
FIRST_TRY_S = 0.1  # gateways are a millisecond away; the wait doubles with each try
TRIES = 4
RENEW_SHARE = 0.5  # of the lease: the latest renewal, as both RFCs ask
LOOK_S = 15.0  # asked again so often, since gateways restart and providers change addresses
REFUSED_LOOK_S = 120.0  # the same, of a gateway that gives no port
CLOSE_S = 1.0  # that a gateway has to take the port back


class _Conversation(asyncio.DatagramProtocol):
    """One connected socket to the gateway; requests go one after the other."""

    def __init__(self) -> None:
        self.transport: asyncio.DatagramTransport | None = None
        self.heard: asyncio.Queue[bytes] = asyncio.Queue(16)
        self.unreachable = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: object) -> None:
        with contextlib.suppress(asyncio.QueueFull):
            self.heard.put_nowait(data)

    def error_received(self, exc: Exception) -> None:
        self.unreachable = True  # nothing listens there


class Gateway:
    """Asks one gateway: by PCP, and by NAT-PMP where it does not speak that.

    address: of the gateway. port: where it listens; another one in tests.
    """

    def __init__(self, address: str, port: int = PORT) -> None:
        self._address = (address, port)
        self._nonces: dict[tuple[str, int], bytes] = {}
        self._old = False  # the gateway speaks NAT-PMP alone

    async def lease(
        self, protocol: str, inside_port: int, outside_port: int, lease_s: int = LEASE_S
    ) -> Mapped:
        """A mapping to `inside_port` of this machine, "tcp" or "udp"; `outside_port` where that is free.

        lease_s: 0 removes the mapping. Raises GatewayRefusal when the gateway does not answer, or refuses.
        """
        loop = asyncio.get_running_loop()
        try:
            transport, talk = await loop.create_datagram_endpoint(_Conversation, remote_addr=self._address)
        except OSError as error:
            raise self._refusal(f"cannot be reached ({error.strerror})") from None
        try:
            own = transport.get_extra_info("sockname")[0]
            if not self._old:
                mapped = await self._by_pcp(talk, own, protocol, inside_port, outside_port, lease_s)
                if mapped is not None:
                    return mapped
            return await self._by_pmp(talk, protocol, inside_port, outside_port, lease_s)
        finally:
            transport.close()

    async def _by_pcp(
        self, talk: _Conversation, own: str, protocol: str, inside: int, outside: int, lease_s: int
    ) -> Mapped | None:
        """None: this gateway does not speak PCP."""
        nonce = self._nonces.setdefault((protocol, inside), secrets.token_bytes(pcp.NONCE_BYTES))
        request = pcp.ask_port(own, protocol, inside, outside, lease_s, nonce)
        answer = await _ask(talk, request, lambda data: _either(data, request))
        if answer is None or answer.result == pcp.UNSUPPORTED_VERSION:
            self._old = answer is not None
            return None
        if answer.result:
            raise self._refusal(pcp.REASONS.get(answer.result, f"answered {answer.result}"))
        return Mapped(answer.address, answer.outside_port, answer.lease_s, answer.epoch_s)

    async def _by_pmp(
        self, talk: _Conversation, protocol: str, inside: int, outside: int, lease_s: int
    ) -> Mapped:
        asked = pmp.ask_address()
        where = await _ask(talk, asked, lambda data: pmp.read(data, asked))
        if where is None:
            raise self._refusal("does not answer requests for ports (NAT-PMP, PCP)")
        if where.result:
            raise self._refusal(pmp.REASONS.get(where.result, f"answered {where.result}"))
        request = pmp.ask_port(protocol, inside, outside, lease_s)
        answer = await _ask(talk, request, lambda data: pmp.read(data, request))
        if answer is None:
            raise self._refusal("does not answer requests for ports (NAT-PMP, PCP)")
        if answer.result:
            raise self._refusal(pmp.REASONS.get(answer.result, f"answered {answer.result}"))
        return Mapped(where.address, answer.outside_port, answer.lease_s, answer.epoch_s)

    def _refusal(self, why: str) -> GatewayRefusal:
        return GatewayRefusal(f"the gateway {self._address[0]} {why}")


def _either(data: bytes, request: bytes) -> pcp.Answer | None:
    """An answer to a PCP request, also the one by which a gateway says that it knows NAT-PMP alone."""
    if len(data) >= 4 and data[0] == pmp.VERSION and data[3] == 1:
        return pcp.Answer(pcp.UNSUPPORTED_VERSION, 0, 0)
    return pcp.read(data, request)


async def _ask(talk: _Conversation, request: bytes, read: Callable[[bytes], A | None]) -> A | None:
    """The first answer that `read` takes; None when there is none after all tries."""
    assert talk.transport is not None
    wait_s = FIRST_TRY_S
    for _ in range(TRIES):
        talk.transport.sendto(request)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while True:
                    answer = read(await talk.heard.get())
                    if answer is not None:
                        return answer
        if talk.unreachable:
            return None
        wait_s *= 2
    return None


class PortMapping:
    """Keeps one port mapped for as long as it runs, under TCP and UDP alike.

    changed: called with (address, port) when the mapping is there or moved, and with None when it is lost.
    """

    def __init__(
        self,
        lessor: Lessor,
        port: int,
        changed: Callable[[tuple[str, int] | None], None],
        look_s: float = LOOK_S,
    ) -> None:
        self._lessor = lessor
        self._look_s = look_s
        self._port = port
        self._changed = changed
        self._where: tuple[str, int] | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> tuple[str, int]:
        """Ask for the mapping, and keep it from then on. Raises GatewayRefusal when there is none now; it is
        asked for again all the same.
        """
        try:
            mapped = await self._both(self._port)
        except GatewayRefusal:
            self._task = asyncio.get_running_loop().create_task(self._keep(None))
            raise
        self._where = (mapped.address, mapped.port)
        self._changed(self._where)
        self._task = asyncio.get_running_loop().create_task(self._keep(mapped))
        return self._where

    async def _both(self, wanted: int) -> Mapped:
        """The same outside port for both; the data connections' is the one that matters."""
        mapped = await self._lessor.lease("tcp", self._port, wanted)
        try:
            other = await self._lessor.lease("udp", self._port, mapped.port)
            if other.port != mapped.port:
                await self._lessor.lease("udp", self._port, other.port, 0)
        except GatewayRefusal as refusal:
            logger.debug("no mapping for UDP: %s", refusal)
        return mapped

    async def _keep(self, mapped: Mapped | None) -> None:
        now = asyncio.get_running_loop().time
        ends = now() + (mapped.lease_s if mapped is not None else 0.0)
        while True:
            await asyncio.sleep(
                max(self._look_s, REFUSED_LOOK_S)
                if mapped is None
                else min(self._look_s, RENEW_SHARE * mapped.lease_s)
            )
            try:
                mapped = await self._both(self._where[1] if self._where else self._port)
            except GatewayRefusal as refusal:
                if self._where is not None and now() >= ends:
                    logger.warning("the mapped port is lost: %s", refusal)
                    mapped = self._where = None
                    self._changed(None)
                continue
            ends = now() + mapped.lease_s
            if (mapped.address, mapped.port) != self._where:
                self._where = (mapped.address, mapped.port)
                self._changed(self._where)

    async def close(self) -> None:
        """Stop renewing, and give the port back, which takes a second at most."""
        if self._task is None:
            return
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._task = None
        if self._where is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    for protocol in ("tcp", "udp"):
                        with contextlib.suppress(GatewayRefusal):
                            await self._lessor.lease(protocol, self._port, self._where[1], 0)
