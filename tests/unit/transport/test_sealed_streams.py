"""Encrypted data streams, both engines against the same bytes."""

from __future__ import annotations

import asyncio
import os
import zlib

import pytest

from p2pavg.peer import runtime as place
from p2pavg.transport import frames, pump_engine, sealing
from p2pavg.transport.engine import Engine, StreamKeys
from p2pavg.transport.frames import HEADER_BYTES, Header, Kind
from p2pavg.transport.links import proofs
from p2pavg.transport.sealing import TAG_BYTES, Sealer
from tests.unit.transport.engine_swarm import ENGINES, Recorder, stream_keys, tcp_pair

CHUNK = 1000
LINK, STREAM, TRANSFER = 1, 0, 7


class Target:
    """An engine that receives a blob, on a stream whose other end the test holds."""

    def __init__(self, kind: str) -> None:
        self.events = Recorder()
        self.engine: Engine = ENGINES[kind](self.events)
        self.buffer = bytearray(3 * CHUNK)
        self.engine.open_blob(TRANSFER, memoryview(self.buffer), CHUNK)
        self.mine, self.keys = stream_keys()
        self.wire, other = tcp_pair()
        self.engine.attach(LINK, STREAM, other, self.keys)
        self.sealer = Sealer(self.mine.sending)

    def frame(self, chunk: int, body: bytes, sealer: Sealer | None = None) -> bytes:
        header = Header(Kind.BLOB, len(body), transfer=TRANSFER, chunk=chunk)
        sealed, rest = (sealer or self.sealer).seal(frames.pack(header), memoryview(body))
        return sealed + bytes(rest)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.wire, data)

    async def receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            data += await asyncio.get_running_loop().sock_recv(self.wire, count - len(data))
        return data


@pytest.fixture(params=list(ENGINES))
async def target(request: pytest.FixtureRequest):
    made = Target(request.param)
    yield made
    made.engine.close()
    made.wire.close()


def body() -> bytes:
    return os.urandom(CHUNK)


async def test_what_is_sealed_arrives(target: Target) -> None:
    """Sealed chunks land as they were, in whatever pieces, with empty and dropped ones between."""
    first, second, third = body(), body(), body()
    unknown = Header(Kind.BLOB, CHUNK, transfer=99)
    data = target.frame(0, first)
    dropped, rest = target.sealer.seal(frames.pack(unknown), memoryview(body()))
    data += dropped + bytes(rest)
    empty, tag = target.sealer.seal(frames.pack(Header(Kind.BLOB, 0, transfer=99)), memoryview(b""))
    data += empty + bytes(tag)
    data += target.frame(2, third) + target.frame(1, second)
    for at in range(0, len(data), 37):
        await target.send(data[at : at + 37])
        await asyncio.sleep(0)
    await target.events.until(lambda: len(target.events.chunks) == 3)
    assert bytes(target.buffer) == first + second + third
    assert not target.events.closed


@pytest.mark.parametrize("at", [0, 4, 20, 32, 39, HEADER_BYTES, HEADER_BYTES + CHUNK - 1, -TAG_BYTES, -1])
async def test_a_changed_byte_closes_the_stream(target: Target, at: int) -> None:
    """One bit flipped in header, body or tag: nothing lands, and the stream is closed."""
    data = bytearray(target.frame(0, body()))
    data[at] ^= 1
    await target.send(bytes(data))
    await target.events.until(lambda: target.events.closed)
    assert "not authentic" in target.events.closed[0][2]
    assert not target.events.chunks


async def test_a_repeated_frame_closes_the_stream(target: Target) -> None:
    """A frame recorded on the stream and played again is refused."""
    data = target.frame(0, body())
    await target.send(data + data)
    await target.events.until(lambda: target.events.closed)
    assert target.events.chunks == [(TRANSFER, 0)]


async def test_frames_cannot_be_left_out_or_swapped(target: Target) -> None:
    """A frame that comes before the one that was sealed earlier is refused."""
    target.frame(0, body())
    await target.send(target.frame(1, body()))
    await target.events.until(lambda: target.events.closed)
    assert not target.events.chunks


async def test_a_frame_of_another_stream_is_refused(target: Target) -> None:
    """Keys are of one stream: what was sealed for another one of the same link opens nothing."""
    await target.send(target.frame(0, body(), Sealer(stream_keys()[0].sending)))
    await target.events.until(lambda: target.events.closed)
    assert not target.events.chunks


async def test_a_plain_frame_is_refused(target: Target) -> None:
    """A frame with checksums instead of tags, as an open run has it, is refused."""
    content = body()
    header = Header(Kind.BLOB, CHUNK, transfer=TRANSFER, body_crc=zlib.crc32(content))
    await target.send(frames.pack(header) + content + bytes(TAG_BYTES))
    await target.events.until(lambda: target.events.closed)
    assert not target.events.chunks


async def test_what_a_peer_sent_cannot_be_sent_back_to_it(target: Target) -> None:
    """A frame reflected to its sender is refused: each direction has its own key."""
    content = body()
    target.engine.send_blob(LINK, TRANSFER, 0, memoryview(content))
    data = await target.receive(HEADER_BYTES + CHUNK + TAG_BYTES)
    assert content not in data
    await target.send(data)
    await target.events.until(lambda: target.events.closed)
    assert not target.events.chunks


async def test_both_engines_seal_alike(target: Target) -> None:
    """What an engine sends is, to the byte, what the other would send, and does not show what is in it."""
    content = body()
    twin = Sealer(target.keys.sending)
    for chunk in range(3):
        target.engine.send_blob(LINK, TRANSFER, chunk, memoryview(content))
        got = await target.receive(HEADER_BYTES + CHUNK + TAG_BYTES)
        assert got == target.frame(chunk, content, twin)
        assert content[:16] not in got


async def test_keys_are_used_up(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key seals more than 2^32 frames: the stream is closed, and another opened with new keys."""
    monkeypatch.setattr(sealing, "MOST_FRAMES", 1)
    sealer = Sealer(target.mine.sending)
    target.frame(0, body(), sealer)
    with pytest.raises(sealing.ProtocolError, match="used up"):
        target.frame(0, body(), sealer)


def test_every_stream_and_direction_has_its_own_key() -> None:
    """Both sides derive the same keys; no two directions, streams or openings of a stream share one."""
    secret = os.urandom(32)
    seen: set[bytes] = set()
    for stream in (0, 1, 1):
        hello = proofs.stream_hello(secret, stream)
        answer = proofs.stream_answer(secret, hello)
        ours = proofs.stream_keys(secret, hello, answer, dialled=True)
        theirs = proofs.stream_keys(secret, hello, answer, dialled=False)
        assert (ours.sending, ours.receiving) == (theirs.receiving, theirs.sending)
        seen |= {ours.sending, ours.receiving}
    assert len(seen) == 6
    assert all(len(key) == sealing.KEY_BYTES for key in seen)


def test_keys_are_not_shown() -> None:
    """The repr of a stream's keys shows nothing of them."""
    keys = StreamKeys(b"secret one", b"secret two")
    assert "secret" not in repr(keys)


async def test_without_libcrypto_closed_runs_take_the_python_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pump serves encrypted streams only where libcrypto can be opened."""
    monkeypatch.setattr(pump_engine, "can_encrypt", lambda: False)
    engine = place.make_engine(Recorder(), encrypted=True)
    assert type(engine).__name__ == "PythonEngine"
    engine.close()
