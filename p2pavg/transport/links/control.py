"""A control connection: msgpack maps, each with its length and checksums, over an asyncio transport. Of all
connections, only control connections use TLS.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, cast

from p2pavg.credentials import Tls, certificate_key, check_time
from p2pavg.errors import CredentialError, ProtocolError, UnreachableError
from p2pavg.membership.table.address import normalise
from p2pavg.transport import tcp_info
from p2pavg.transport.links import handshake
from p2pavg.transport.links.carried import CountedSocket

logger = logging.getLogger("p2pavg.transport")

MAX_MESSAGE_BYTES = 1 << 20
MAX_QUEUED_BYTES = 8 << 20
TLS_HANDSHAKE_S = 10.0
_MOST_UNTRUSTED_BYTES = 2 * handshake.MAX_HELLO_BYTES  # nobody sends more than a hello in a handshake


class ControlConnection(asyncio.Protocol):
    """Messages are read one by one with `read` until `start` names who gets them."""

    def __init__(self) -> None:
        self.last_heard = time.monotonic()
        self.local_host = ""  # the address of this side; empty: the system does not know it
        self._transport: asyncio.Transport | None = None
        self._sock: socket.socket | None = None
        self._acked = 0  # bytes, when they last became more
        self._moved_at = self.last_heard  # when that was, or when nothing was under way
        self._buffer = bytearray()
        self._limit = handshake.MAX_HELLO_BYTES
        self._inbox: deque[dict[str, Any]] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._on_message: Callable[[dict[str, Any]], None] | None = None
        self._on_lost: Callable[[str], None] | None = None
        self._pause_s: Callable[[int], float] = lambda nbytes: 0.0
        self._paused = False
        self._lost: str | None = None
        self._given_up = False
        self._anonymous = False  # whether the other side may do without a certificate

    @classmethod
    async def over(
        cls, sock: socket.socket, *, dialled: bool, credentials: Tls | None = None
    ) -> ControlConnection:
        """Take over a connected socket on which both preambles have passed; with credentials, TLS begins. The
        socket is closed with the connection, and when this fails or is cancelled: nobody else may close it.

        Raises CredentialError when the other side has no right certificate, or accepts none of this side's,
        UnreachableError when the handshake fails otherwise, for example over damaged bytes.
        """
        loop = asyncio.get_running_loop()
        connection = cls()
        connection._sock = sock
        if isinstance(sock, CountedSocket):
            sock.owned = True
        connection._anonymous = credentials is not None and not credentials.mutual and not dialled
        tls: dict[str, Any] = {}
        if credentials is not None:
            context = credentials.client_context if dialled else credentials.server_context
            tls = {"ssl": context, "ssl_handshake_timeout": TLS_HANDSHAKE_S}
        try:
            if dialled:
                if tls:
                    tls["server_hostname"] = "p2pavg"  # not checked: members are identified by their keys
                await loop.create_connection(lambda: connection, sock=sock, **tls)
            else:
                await loop.connect_accepted_socket(lambda: connection, sock, **tls)
        except BaseException as error:
            connection._give_up()
            if not isinstance(error, ssl.SSLError):
                raise
            if not _is_about_certificates(error):
                raise UnreachableError(f"the TLS handshake failed ({error.reason or error})") from None
            raise CredentialError(
                f"the other side's credentials are not of this run ({error.reason or error}); "
                "check credentials= on both sides"
            ) from None
        return connection

    def proven_key(self) -> bytes | None:
        """The public key of the other side's certificate, which is valid now; None without a certificate.

        Raises CredentialError.
        """
        assert self._transport is not None
        tls = self._transport.get_extra_info("ssl_object")
        if tls is None or self._anonymous:
            return None
        certificate = tls.getpeercert(binary_form=True)
        if certificate is None:
            raise CredentialError("the other side showed no certificate")
        key = certificate_key(certificate)
        check_time(certificate)
        return key

    @property
    def stuck_s(self) -> float:
        """Seconds since the other side's kernel acknowledged more of what this side sent, or nothing of it
        was under way, as far as this was looked at.
        """
        now = time.monotonic()
        acked = 0 if self._sock is None else tcp_info.acked_bytes(self._sock)
        if acked != self._acked or self._sock is None or not tcp_info.queued_bytes(self._sock):
            self._acked, self._moved_at = acked, now
        return now - self._moved_at

    # -- use

    async def read(self) -> dict[str, Any]:
        """The next message, before `start`. Raises ProtocolError, UnreachableError."""
        while not self._inbox:
            if self._lost is not None:
                raise UnreachableError(f"the other side broke off the handshake ({self._lost})")
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._inbox.popleft()

    def trust(self) -> None:
        """The other side has proved who it is: messages may be longer than a hello."""
        self._limit = MAX_MESSAGE_BYTES

    def start(
        self,
        on_message: Callable[[dict[str, Any]], None],
        on_lost: Callable[[str], None],
        pause_s: Callable[[int], float],
    ) -> None:
        """Call on_message(message) for each message from now on, and on_lost(reason) once when the connection
        is lost, unless this side closes it.

        pause_s(bytes of a message): for how many seconds reading pauses after the message. Whatever the other
        side goes on sending waits in its queue and in the sockets' buffers.
        """
        self.trust()
        self._on_message, self._on_lost, self._pause_s = on_message, on_lost, pause_s
        if self._lost is not None:
            asyncio.get_running_loop().call_soon(on_lost, self._lost)
        self._deliver()

    def write(self, message: Mapping[str, Any]) -> bool:
        """Queue a message. False: too much is queued already, or the connection is gone."""
        data = handshake.pack(message)
        if len(data) - handshake.HEAD_BYTES > MAX_MESSAGE_BYTES:
            raise ValueError(f"a control message of {len(data)} bytes, more than {MAX_MESSAGE_BYTES}")
        if self._transport is None or self._transport.is_closing():
            return False
        if self._transport.get_write_buffer_size() + len(data) > MAX_QUEUED_BYTES:
            return False
        self._transport.write(data)
        return True

    def close(self) -> None:
        """Close the connection once all written messages have gone out; no event follows."""
        self._on_message = self._on_lost = None
        if self._transport is not None:
            self._transport.close()

    def _give_up(self) -> None:
        """A TLS transport that was made and not begun goes on when whoever made it is cancelled, over the
        descriptor of the socket: it ends by itself, or when it says that it is there.
        """
        self._given_up = True
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has its methods
        if self._given_up:
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=MAX_QUEUED_BYTES)
        if name := transport.get_extra_info("sockname"):
            self.local_host = normalise(name)[0]

    def data_received(self, data: bytes) -> None:
        self.last_heard = time.monotonic()
        self._buffer += data
        if not self._paused:
            self._take()

    def _take(self) -> None:
        try:
            if self._limit <= handshake.MAX_HELLO_BYTES and len(self._buffer) > _MOST_UNTRUSTED_BYTES:
                raise ProtocolError("more than a hello before it has proved itself")
            self._parse()
        except ProtocolError as error:
            self._fail(str(error))
        else:
            self._deliver()

    def connection_lost(self, error: Exception | None) -> None:
        if isinstance(self._sock, CountedSocket):
            self._sock.settle()
        self._fail("closed by the other side" if error is None else str(error))

    def _parse(self) -> None:
        at = 0
        while not self._paused and len(self._buffer) - at >= handshake.HEAD_BYTES:
            begin = at + handshake.HEAD_BYTES
            length, crc = handshake.parse_head(self._buffer[at:begin], self._limit)
            if len(self._buffer) < begin + length:
                break
            body = bytes(self._buffer[begin : begin + length])
            handshake.check_body(body, crc)
            self._inbox.append(handshake.unpack(body))
            at = begin + length
            self._pause(self._pause_s(length))
        del self._buffer[:at]

    def _pause(self, seconds: float) -> None:
        if seconds > 0 and self._transport is not None and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self._paused = False
        if self._lost is None and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            self._take()

    def _deliver(self) -> None:
        while self._on_message is not None and self._inbox:
            try:
                self._on_message(self._inbox.popleft())
            except ProtocolError as error:
                self._fail(str(error))
                return
            except Exception:  # an unforeseen message costs its sender the link, and nobody else
                logger.exception("a control message could not be handled")
                self._fail("a message could not be handled")
                return
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _fail(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
            on_lost = self._on_lost
            self.close()
            self._wake()
            if on_lost is not None:
                on_lost(reason)


def _is_about_certificates(error: ssl.SSLError) -> bool:
    """The reason for a TLS failure: this side's own refusal, or the alert by which the other side refused."""
    words = error.reason or ""
    return isinstance(error, ssl.SSLCertVerificationError) or "CERT" in words or "UNKNOWN_CA" in words
