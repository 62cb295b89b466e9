"""The protocol between the two sides of `bench net`: a control connection with lines of JSON, and data
streams.

Every connection begins with a magic word. The listening side answers the control connection's hello with a
token; a data stream that does not present the token is closed. So no measurement sends to an address that did
not answer.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import select
import socket
import struct
import threading
import time
from typing import Any

from p2pavg.bench.machine import tcp_sysctls
from p2pavg.bench.net.streams import Bundle, SendBudget
from p2pavg.errors import IncompatiblePeerError, P2PAvgError, ProtocolError, UnreachableError

MAGIC = b"p2pavg-net/1 "
CONTROL, DATA = b"C", b"D"
MOST_STREAMS = 256
MOST_SECONDS = 600.0
_LONGEST_LINE = 1 << 20
_PREAMBLE = struct.Struct("!16sIHH")  # token, step, stream, streams of the step
_GREETING_S = 5.0
_SILENCE_S = 30.0


class JsonLines:
    """JSON objects, one a line, over a socket. Raises ProtocolError on anything else."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._reader = sock.makefile("rb")

    def write(self, message: dict[str, Any]) -> None:
        self.sock.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def read(self) -> dict[str, Any]:
        line = self._reader.readline(_LONGEST_LINE)
        if not line:
            raise ConnectionResetError("the other side closed the connection")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict) or not line.endswith(b"\n"):
            raise ProtocolError(
                "The other side does not speak the protocol of 'bench net'; check the address."
            )
        return message

    def close(self) -> None:
        self._reader.close()
        self.sock.close()


def read_exactly(sock: socket.socket, count: int) -> bytes:
    """Read exactly `count` bytes. Raises ConnectionResetError when the other side closes before."""
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionResetError("the other side closed the connection")
        data += more
    return data


class MeasurementServer:
    """The listening side: serves one measurement at a time. `gigabytes` bounds the bytes sent in each."""

    def __init__(self, host: str, port: int, gigabytes: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=MOST_STREAMS)
        self._gigabytes = gigabytes
        self._session: _Session | None = None
        self._lock = threading.Lock()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def serve(self) -> None:
        """Serve until close()."""
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                threading.Thread(target=self._greet, args=(sock,), daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _greet(self, sock: socket.socket) -> None:
        kept = False
        with contextlib.suppress(OSError, P2PAvgError):
            sock.settimeout(_GREETING_S)
            if read_exactly(sock, len(MAGIC)) == MAGIC:
                kind = read_exactly(sock, 1)
                if kind == CONTROL:
                    self._control(JsonLines(sock))
                elif kind == DATA:
                    kept = self._data(sock)
        if not kept:
            sock.close()

    def _data(self, sock: socket.socket) -> bool:
        token, step, stream, streams = _PREAMBLE.unpack(read_exactly(sock, _PREAMBLE.size))
        session = self._session
        if session is None or not secrets.compare_digest(token, session.token):
            return False
        sock.settimeout(None)
        return session.join(sock, step, stream, streams)

    def _control(self, lines: JsonLines) -> None:
        limit = lines.read().get("bytes")
        if not isinstance(limit, int) or limit < 0:
            raise ProtocolError("The hello must say how many bytes may be sent.")
        session = _Session(SendBudget(min(limit, int(self._gigabytes * 1e9))))
        with self._lock:
            if self._session is not None:
                lines.write({"error": "busy"})
                return
            self._session = session
        try:
            lines.write({"token": session.token.hex(), "sysctls": tcp_sysctls()})
            lines.sock.settimeout(_SILENCE_S)
            deadline = time.monotonic() + MOST_SECONDS
            while time.monotonic() < deadline:
                lines.write(session.answer(lines.read()))
        finally:
            self._session = None
            session.end()


class _Session:
    """One measurement, on the listening side."""

    def __init__(self, budget: SendBudget) -> None:
        self.token = secrets.token_bytes(16)
        self._budget = budget
        self._step = -1
        self._arrived: dict[int, socket.socket] = {}
        self._wanted = 0
        self._bundle: Bundle | None = None
        self._changed = threading.Condition()

    def join(self, sock: socket.socket, step: int, stream: int, streams: int) -> bool:
        """Add a stream to a step's bundle; the first stream of a later step ends the step before."""
        with self._changed:
            if step < self._step or not 0 <= stream < streams <= MOST_STREAMS:
                return False
            if step > self._step:
                self._drop()
                self._step, self._wanted = step, streams
            if stream in self._arrived or streams != self._wanted:
                return False
            self._arrived[stream] = sock
            if len(self._arrived) == streams:
                self._bundle = Bundle(list(self._arrived.values()))
                self._changed.notify_all()
        return True

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request of the other side. Raises ProtocolError for an invalid one."""
        do = request.get("do")
        if do == "ping":
            return {}
        step = request.get("step")
        if not isinstance(step, int):
            raise ProtocolError("The request names no step.")
        bundle = self._wait(step)
        if do == "send":
            allowance = request.get("bytes")
            if not isinstance(allowance, int) or allowance < 0:
                raise ProtocolError("The request does not say how many bytes to send.")
            left = self._budget.left
            bundle.send(self._budget, SendBudget(allowance))
            return {"left": left}
        if do == "stop":
            bundle.stop()
        elif do == "restart":
            bundle.restart()
        elif do != "samples":
            raise ProtocolError(f"There is no request {do!r}.")
        asked = do == "samples"
        return {
            "samples": _short(bundle.samples()) if asked else [],
            "deliveries": _short(bundle.deliveries()) if asked else [],
            "info": vars_of(bundle.infos()[0]),
            "left": self._budget.left,
        }

    def _wait(self, step: int) -> Bundle:
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._step == step and self._bundle is not None, _GREETING_S
            ):
                raise ProtocolError("Not all streams of a step arrived.")
            assert self._bundle is not None
            return self._bundle

    def _drop(self) -> None:
        if self._bundle is not None:
            self._bundle.close()
        else:
            for sock in self._arrived.values():
                sock.close()
        self._bundle = None
        self._arrived = {}

    def end(self) -> None:
        with self._changed:
            self._step = 1 << 32
            self._drop()


def _short(samples: list[tuple[float, int]]) -> list[tuple[float, int]]:
    return [(round(at, 4), count) for at, count in samples]


def vars_of(info: Any) -> dict[str, Any]:
    """The fields of a dataclass by name."""
    return {name: getattr(info, name) for name in info.__dataclass_fields__}


class Client:
    """The connecting side of the control connection. Raises UnreachableError or IncompatiblePeerError."""

    def __init__(self, host: str, port: int, limit_bytes: int) -> None:
        try:
            sock = socket.create_connection((host, port), timeout=_GREETING_S)
            sock.sendall(MAGIC + CONTROL)
            self._lines = JsonLines(sock)
            self._lines.write({"bytes": limit_bytes})
            answer = self._lines.read()
            if "error" not in answer:
                self._token = bytes.fromhex(answer["token"])
                self.sysctls: dict[str, str] = dict(answer["sysctls"])
        except (OSError, ProtocolError, KeyError, TypeError, ValueError) as error:
            raise UnreachableError(
                f"{host}:{port} does not answer ({error}); run 'p2pavg bench net --listen' there."
            ) from None
        if "error" in answer:
            raise IncompatiblePeerError(f"{host}:{port} is measuring with somebody else; try again later.")
        self._address = sock.getpeername()[:2]
        self._step = -1
        sock.settimeout(_SILENCE_S)

    def ping(self) -> float:
        """Seconds of one round trip of the control connection."""
        begin = time.perf_counter()
        self.ask("ping")
        return time.perf_counter() - begin

    @property
    def is_here(self) -> bool:
        """Whether the other side is on this machine."""
        return str(self.socket.getsockname()[0]) == str(self._address[0])

    @property
    def socket(self) -> socket.socket:
        return self._lines.sock

    def ask(self, do: str, count: int | None = None) -> dict[str, Any]:
        """Send a request about this step, with `count` bytes if the request needs them; returns the answer.

        Raises UnreachableError when no answer comes.
        """
        try:
            self._lines.write({"do": do, "step": self._step, "bytes": count})
            return self._lines.read()
        except OSError as error:
            raise UnreachableError(
                f"The other side went away ({error}); start 'bench net --listen' again."
            ) from None

    def open(self, streams: int, congestion: str | None = None) -> Bundle:
        """New streams to the address that answered, all at once, for the next step.

        congestion: the congestion control to use here. Raises OSError when the kernel refuses it.
        """
        self._step += 1
        family = self._lines.sock.family
        sockets: list[socket.socket] = []
        try:
            for _ in range(streams):
                sock = socket.socket(family, socket.SOCK_STREAM)
                sockets.append(sock)
                if congestion is not None:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
                sock.setblocking(False)
                sock.connect_ex(self._address)
            for i, sock in enumerate(sockets):
                sock.settimeout(_GREETING_S)
                _finish_connect(sock)
                sock.sendall(MAGIC + DATA + _PREAMBLE.pack(self._token, self._step, i, streams))
                sock.settimeout(None)
        except TimeoutError:
            for sock in sockets:
                sock.close()
            raise UnreachableError("The other side took no new streams within 5 s; start it again.") from None
        except OSError:
            for sock in sockets:
                sock.close()
            raise
        return Bundle(sockets)

    def close(self) -> None:
        self._lines.close()


def _finish_connect(sock: socket.socket) -> None:
    """Wait until a non-blocking connect has finished."""
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    if not poll.poll(_GREETING_S * 1e3):
        raise TimeoutError
    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, "cannot connect")
