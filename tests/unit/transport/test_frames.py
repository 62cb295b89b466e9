"""Frames: headers and heartbeats."""

from __future__ import annotations

import math
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.errors import ProtocolError
from p2pavg.transport.frames import HEADER_BYTES, MAX_BODY_BYTES, Header, Heartbeat, Kind, pack, parse

U32 = st.integers(0, 2**32 - 1)


def sealed(raw: bytes) -> bytes:
    """raw with its header CRC put right."""
    return raw[:36] + struct.pack("<I", zlib.crc32(raw[:36]))


@given(
    st.sampled_from([Kind.CONTRIBUTION, Kind.RESULT, Kind.BLOB]),
    st.integers(0, MAX_BODY_BYTES),
    st.integers(0, 255),
    st.integers(0, 1),
    st.integers(0, 2**64 - 1),
    st.tuples(U32, U32, U32, U32, U32),
)
def test_header_round_trip(kind, length, codec, flags, transfer, rest):
    """A packed header parses to itself, and its 40 bytes lie as the table says."""
    header = Header(kind, length, codec, flags, transfer, *rest)
    raw = pack(header)
    assert len(raw) == HEADER_BYTES
    assert parse(raw) == header
    assert parse(memoryview(bytearray(raw))) == header
    assert struct.unpack_from("<I", raw, 4) == (length,)
    assert struct.unpack_from("<Q", raw, 8) == (transfer,)
    assert struct.unpack_from("<IIIII", raw, 16) == rest


@given(st.binary(max_size=80))
def test_garbage_is_refused(raw):
    """Random bytes raise ProtocolError and nothing else."""
    with pytest.raises(ProtocolError):
        parse(raw)


@given(st.binary(min_size=40, max_size=40))
def test_sealed_garbage_is_bounded(raw):
    """Random bytes under a right checksum are refused, or ask for no more than the largest body."""
    try:
        header = parse(sealed(raw))
    except ProtocolError:
        return
    assert header.length <= MAX_BODY_BYTES
    assert pack(header) == sealed(raw)


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_one_flipped_bit_is_seen(bit):
    """A header with any one bit flipped is refused."""
    raw = bytearray(pack(Header(Kind.RESULT, 1000, 1, 0, 77, 1, 2, 500, 3, 12345)))
    raw[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(ProtocolError):
        parse(raw)


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, 0), (0, 6), (2, 4), (4, MAX_BODY_BYTES + 1)],
    ids=["kind 0", "kind 6", "unknown flag", "too long"],
)
def test_what_no_peer_sends(at, value):
    """Unknown kinds, unknown flags and bodies over 4 MiB are refused though the checksum is right."""
    raw = bytearray(pack(Header(Kind.BLOB, 10)))
    struct.pack_into("<I" if at == 4 else "<B", raw, at, value)
    with pytest.raises(ProtocolError):
        parse(sealed(bytes(raw)))


def test_heartbeat_of_wrong_length():
    """A PING whose body is not a heartbeat's size is refused at its header."""
    with pytest.raises(ProtocolError):
        parse(pack(Header(Kind.PING, 15)))


@given(
    st.integers(0, 2**64 - 1), st.floats(0, 1e6, width=32), st.just(math.inf) | st.floats(0, 1e6, width=32)
)
def test_heartbeat_round_trip(stamp, loop_age, trainer_age):
    """A heartbeat parses to itself, infinite ages included."""
    beat = Heartbeat(stamp, loop_age, trainer_age)
    assert Heartbeat.parse(beat.pack()) == beat


@pytest.mark.parametrize(
    "body", [b"", b"x" * 15, struct.pack("<Qff", 1, math.nan, 0), struct.pack("<Qff", 1, 0, -1)]
)
def test_impossible_heartbeats(body):
    """Heartbeats of wrong size, or with negative or NaN ages, are refused."""
    with pytest.raises(ProtocolError):
        Heartbeat.parse(body)
