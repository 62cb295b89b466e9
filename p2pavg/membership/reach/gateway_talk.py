"""One gateway, asked for ports by PCP or NAT-PMP: whichever it speaks."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from enum import Enum
from typing import TypeVar, cast

from p2pavg.membership.reach import pcp, pmp
from p2pavg.membership.reach.leases import LEASE_S, GatewayRefusal, Mapped

A = TypeVar("A")

PORT = 5351  # of gateways, for NAT-PMP and PCP
FIRST_TRY_S = 0.1  # gateways are a millisecond away; the wait doubles with each try
TRIES = 4
GRACE_S = 0.05  # that PCP has to answer, once NAT-PMP has


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

    async def hear(self, read: Callable[[bytes], A | None], wait_s: float) -> A | None:
        """The first answer that `read` takes; None: there is none in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while True:
                    answer = read(await self.heard.get())
                    if answer is not None:
                        return answer
        return None

    async def ask(self, read: Callable[[bytes], A | None], *requests: bytes) -> A | None:
        """The first answer to any of the requests that `read` takes; None: there is none after all tries."""
        assert self.transport is not None
        wait_s = FIRST_TRY_S
        for _ in range(TRIES):
            for request in requests:
                self.transport.sendto(request)
            answer = await self.hear(read, wait_s)
            if answer is not None or self.unreachable:
                return answer
            wait_s *= 2
        return None


class Speaks(Enum):
    """What a gateway has answered to."""

    PCP = "PCP"
    PMP = "NAT-PMP"


class Gateway:
    """Asks one gateway. It is asked by PCP and by NAT-PMP at once as long as it has answered neither: some
    that speak one are silent about the other. From then on it is asked by what it answered to.

    address: of the gateway. port: where it listens; another one in tests. secret: of this peer, and the same
    in its next life: who shows another one does not get a port that is still leased.
    """

    def __init__(self, address: str, port: int = PORT, *, secret: bytes = b"") -> None:
        self._address = (address, port)
        self._secret = secret
        self._speaks: Speaks | None = None

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
            nonce = self._nonce(protocol, inside_port)
            request = pcp.ask_port(own, protocol, inside_port, outside_port, lease_s, nonce)
            by_pcp, where = await self._first_answers(talk, request)
            if by_pcp is not None and by_pcp.result != pcp.NOT_AUTHORIZED:
                return self._given_by_pcp(by_pcp)
            # Another nonce holds the port, of an earlier life: NAT-PMP has no nonces.
            asked = pmp.ask_port(protocol, inside_port, outside_port, lease_s)
            try:
                mapped = await self._by_pmp(talk, where, asked)
            except GatewayRefusal:
                if by_pcp is None:
                    raise
                return self._given_by_pcp(by_pcp)  # which says why
            self._speaks = Speaks.PMP  # also to renew and to remove what it gave
            return mapped
        finally:
            transport.close()

    def _nonce(self, protocol: str, inside_port: int) -> bytes:
        """Of all requests about one mapping, also those of the next life."""
        about = f"{protocol} {inside_port}".encode()
        return hashlib.blake2b(about, key=self._secret[:64], digest_size=pcp.NONCE_BYTES).digest()

    async def _first_answers(
        self, talk: _Conversation, request: bytes
    ) -> tuple[pcp.Answer | None, pmp.Answer | None]:
        """What the gateway says to a request by PCP, and, where it may speak NAT-PMP alone, to the question
        for its address.
        """
        by_pcp: pcp.Answer | None = None
        by_pmp: pmp.Answer | None = None
        if self._speaks is Speaks.PMP:
            return None, None
        if self._speaks is Speaks.PCP:
            by_pcp = await talk.ask(lambda data: pcp.read(data, request), request)
            if by_pcp is None:
                self._speaks = None  # another one may have its address by now
        else:
            asked = pmp.ask_address()

            def either(data: bytes) -> pcp.Answer | pmp.Answer | None:
                return pcp.read(data, request) or _spoken(pmp.read(data, asked))

            first: pcp.Answer | pmp.Answer | None = await talk.ask(either, request, asked)
            if isinstance(first, pmp.Answer):
                by_pmp = first
                by_pcp = await talk.hear(lambda data: pcp.read(data, request), GRACE_S)
            else:
                by_pcp = first
        if by_pcp is not None and by_pcp.result == pcp.UNSUPPORTED_VERSION:
            by_pcp, self._speaks = None, Speaks.PMP
        elif by_pcp is not None:
            self._speaks = Speaks.PCP
        elif by_pmp is not None:
            self._speaks = Speaks.PMP
        elif self._speaks is None:
            raise self._refusal("does not answer requests for ports (NAT-PMP, PCP)")
        return by_pcp, by_pmp

    def _given_by_pcp(self, answer: pcp.Answer) -> Mapped:
        if answer.result:
            raise self._refusal(pcp.REASONS.get(answer.result, f"answered {answer.result}"))
        return Mapped(answer.address, answer.outside_port, answer.lease_s, answer.epoch_s)

    async def _by_pmp(self, talk: _Conversation, where: pmp.Answer | None, request: bytes) -> Mapped:
        """where: the answer to the question for the gateway's address, where it came already."""
        if where is None:
            where = await self._ask_by_pmp(talk, pmp.ask_address())
        if where.result:
            raise self._refusal(pmp.REASONS.get(where.result, f"answered {where.result}"))
        answer = await self._ask_by_pmp(talk, request)
        if answer.result:
            raise self._refusal(pmp.REASONS.get(answer.result, f"answered {answer.result}"))
        return Mapped(where.address, answer.outside_port, answer.lease_s, answer.epoch_s)

    async def _ask_by_pmp(self, talk: _Conversation, request: bytes) -> pmp.Answer:
        answer = await talk.ask(lambda data: pmp.read(data, request), request)
        if self._speaks is Speaks.PMP and _spoken(answer) is None:
            self._speaks = None  # another gateway may have this address by now
        if answer is None:
            raise self._refusal("does not answer requests for ports (NAT-PMP, PCP)")
        return answer

    def _refusal(self, why: str) -> GatewayRefusal:
        return GatewayRefusal(f"the gateway {self._address[0]} {why}")


def _spoken(answer: pmp.Answer | None) -> pmp.Answer | None:
    """An answer by a gateway that speaks NAT-PMP."""
    return None if answer is None or answer.result == pmp.UNSUPPORTED_VERSION else answer
