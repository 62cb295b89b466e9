"""bench net on the loopback: handshake, bounds, and what strangers get."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from p2pavg.bench.net.protocol import CONTROL, DATA, MAGIC, Client, MeasurementServer
from p2pavg.bench.net.streams import SendBudget
from p2pavg.bench.net.sweep import Limits, LinkError, measure
from p2pavg.bench.net.verb import parse_address, table
from p2pavg.errors import ConfigurationError, IncompatiblePeerError, UnreachableError

DEADLINE_S = 10


@pytest.fixture
def server() -> Iterator[MeasurementServer]:
    server = MeasurementServer("127.0.0.1", 0, gigabytes=2.0)
    threading.Thread(target=server.serve, daemon=True).start()
    yield server
    server.close()


def received_until_closed(sock: socket.socket) -> bytes:
    data = b""
    sock.settimeout(DEADLINE_S)
    try:
        while more := sock.recv(65536):
            data += more
    except ConnectionResetError:
        pass
    return data


def test_streams_carry_bytes_both_ways_and_count_them(server: MeasurementServer) -> None:
    """What one side sends on all streams the other one counts, each way, and no more than the budget."""
    with closing(Client("127.0.0.1", server.port, 3_000_000)) as client, closing(client.open(3)) as bundle:
        client.ask("restart")
        bundle.send(SendBudget(1_000_000))
        got = 0
        while got < 1_000_000:
            got = client.ask("samples")["samples"][-1][1]
        assert got == 1_000_000
        client.ask("send", 10**9)
        while (back := bundle.samples()[-1][1]) < 3_000_000:
            pass
        assert back == 3_000_000
        assert client.ask("samples")["left"] == 0


def test_a_measurement_keeps_its_bounds(server: MeasurementServer) -> None:
    """Seconds and bytes are not exceeded, and the result has what the command line promises."""
    with closing(Client("127.0.0.1", server.port, 2_000_000_000)) as client:
        result = measure(client, Limits(seconds=6.0, bytes=2_000_000_000))
    assert result["bytes_sent"] <= 2_000_000_000
    assert result["seconds"] < 6.0 + 2.0
    assert result["rtt_ms"] > 0
    assert result["rate_gbps"] > 0
    assert result["window_bytes"] > 0
    assert result["best_streams"] >= 1
    assert {"streams", "gbps"} <= set(result["sweep"][0])
    assert result["words"][0] in table(result)
    assert result["words"][0].startswith("Both sides are on this machine")  # where nothing is advised
    assert result["advice_lines"] == []
    assert "void_reason" in result
    json.dumps(result, allow_nan=False)


def test_bytes_that_are_over_at_once_tell_no_rate(
    server: MeasurementServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a budget that a step uses up before the link is at its speed, the user is told to raise it, and
    gets no figure.
    """
    with closing(Client("127.0.0.1", server.port, 2_000_000)) as client:
        monkeypatch.setattr(type(client), "is_here", False)
        with pytest.raises(LinkError, match=r"2\.0 MB in all are 143 kB a step.* raise --gigabytes"):
            measure(client, Limits(seconds=6.0, bytes=2_000_000))


def test_a_stranger_that_does_not_answer_the_handshake_gets_nothing() -> None:
    """A server that accepts and says nothing, or something else, receives the hello and not a byte more."""
    for answer in (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"{}\n[1]\n"):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            seen: list[bytes] = []

            def serve(
                answer: bytes = answer, listener: socket.socket = listener, seen: list[bytes] = seen
            ) -> None:
                sock, _ = listener.accept()
                with sock:
                    sock.sendall(answer)
                    sock.shutdown(socket.SHUT_WR)
                    seen.append(received_until_closed(sock))

            thread = threading.Thread(target=serve)
            thread.start()
            with pytest.raises(UnreachableError, match="--listen"):
                Client("127.0.0.1", listener.getsockname()[1], 10**9)
            thread.join(DEADLINE_S)
            assert seen[0].startswith(MAGIC + CONTROL)
            assert len(seen[0]) < 200


def test_nobody_listening_is_one_clear_sentence() -> None:
    """A closed port is named, and what to run there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(UnreachableError, match=f"127.0.0.1:{port} does not answer"):
        Client("127.0.0.1", port, 10**9)


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        MAGIC + b"X",
        MAGIC + DATA + bytes(24),
        MAGIC + CONTROL + b"not json\n",
        MAGIC + CONTROL + b'{"bytes":"many"}\n',
        MAGIC + CONTROL + b"{}\n",
    ],
)
def test_the_listening_side_closes_on_strangers(server: MeasurementServer, greeting: bytes) -> None:
    """Bytes that no correct client sends, and a stream without a token, are answered by closing."""
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(greeting)
        assert received_until_closed(sock) == b""
    with closing(Client("127.0.0.1", server.port, 1000)) as client:
        assert client.ping() > 0


def test_one_measurement_at_a_time(server: MeasurementServer) -> None:
    """A second client is told that the other side is busy, and may come when the first one has gone."""
    with closing(Client("127.0.0.1", server.port, 1000)), pytest.raises(IncompatiblePeerError, match="later"):
        Client("127.0.0.1", server.port, 1000)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("h:1", ("h", 1)),
        (":31400", ("0.0.0.0", 31400)),
        ("[::1]:7", ("::1", 7)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    """HOST:PORT, with brackets around IPv6."""
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["h", "h:", "h:99999", "::1:7", "h:x"])
def test_bad_addresses(text: str) -> None:
    """Anything else is refused with the right form."""
    with pytest.raises(ConfigurationError, match="HOST:PORT"):
        parse_address(text)
