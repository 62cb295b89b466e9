"""The frames on a data stream: a 40-byte little-endian header, and a body.

```
0  u8  kind        20 u32 chunk       index inside the part or blob
1  u8  codec       24 u32 count       float32 elements (CONTRIBUTION, RESULT), else 0
2  u16 flags       28 u32 sender      rank of the sender (CONTRIBUTION, RESULT), else 0
4  u32 length      32 u32 body_crc    CRC-32 (zlib's polynomial) of the body
8  u64 transfer    36 u32 header_crc  CRC-32 of bytes 0..35
16 u32 part        index into the job's parts (CONTRIBUTION, RESULT), else 0
```

A PING's body is a `Heartbeat`; the PONG that answers it carries the same `stamp` back, with the answerer's
own ages. A PING with the stamp `NO_ANSWER` is not answered.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

from p2pavg.errors import ProtocolError

HEADER_BYTES = 40
MAX_BODY_BYTES = 4 << 20
REPEAT = 1  # flag: the sender knows that it has sent this chunk before
PACKED = 2  # flag: the body is an LZ4 block of the chunk; without a body, all bytes of the chunk are zero

_HEADER = struct.Struct("<BBHIQIIIIII")
_HEARTBEAT = struct.Struct("<Qff")
HEARTBEAT_BYTES = _HEARTBEAT.size
NO_ANSWER = 0
_CRC_AT = HEADER_BYTES - 4


class Kind(IntEnum):
    CONTRIBUTION = 1
    RESULT = 2
    BLOB = 3
    PING = 4
    PONG = 5


_KINDS = {int(kind): kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Header:
    kind: Kind
    length: int  # bytes of the body, <= MAX_BODY_BYTES
    codec: int = 0
    flags: int = 0
    transfer: int = 0
    part: int = 0
    chunk: int = 0
    count: int = 0
    sender: int = 0
    body_crc: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Body of a PING or PONG, 16 bytes: u64 stamp, f32 loop_age_s, f32 trainer_age_s (inf: never)."""

    stamp: int  # the pinger's clock, opaque to the other side, which sends it back unless it is NO_ANSWER
    loop_age_s: float
    trainer_age_s: float

    def pack(self) -> bytes:
        return _HEARTBEAT.pack(self.stamp, self.loop_age_s, self.trainer_age_s)

    @classmethod
    def parse(cls, body: bytes | bytearray | memoryview) -> Heartbeat:
        """Raises ProtocolError when the size is wrong or an age is negative or NaN."""
        if len(body) != HEARTBEAT_BYTES:
            raise ProtocolError(f"a heartbeat of {len(body)} bytes, not {HEARTBEAT_BYTES}")
        stamp, loop_age, trainer_age = _HEARTBEAT.unpack(body)
        if not (loop_age >= 0.0 and trainer_age >= 0.0):
            raise ProtocolError("a heartbeat with an impossible age")
        return cls(stamp, loop_age, trainer_age)


def pack(header: Header) -> bytes:
    """The header's 40 bytes, with its CRC."""
    raw = _HEADER.pack(
        header.kind,
        header.codec,
        header.flags,
        header.length,
        header.transfer,
        header.part,
        header.chunk,
        header.count,
        header.sender,
        header.body_crc,
        0,
    )
    head = raw[:_CRC_AT]
    return head + zlib.crc32(head).to_bytes(4, "little")


def parse(raw: bytes | bytearray | memoryview, *, checked: bool = False) -> Header:
    """Read a header of exactly 40 bytes. checked: it was authenticated, and holds no checksums.

    Raises ProtocolError for anything that no correct peer sends.
    """
    if len(raw) != HEADER_BYTES:
        raise ProtocolError(f"a frame header of {len(raw)} bytes, not {HEADER_BYTES}")
    number, codec, flags, length, transfer, part, chunk, count, sender, body_crc, header_crc = _HEADER.unpack(
        raw
    )
    if not checked and zlib.crc32(raw[:_CRC_AT]) != header_crc:
        raise ProtocolError("a frame header whose checksum is wrong")
    kind = _KINDS.get(number)
    if kind is None:
        raise ProtocolError(f"a frame of unknown kind {number}")
    known = REPEAT if kind in (Kind.PING, Kind.PONG) else REPEAT | PACKED
    if flags & ~known:
        raise ProtocolError(f"a frame with unknown flags {flags:#x}")
    if length > MAX_BODY_BYTES:
        raise ProtocolError(f"a frame body of {length} bytes, more than {MAX_BODY_BYTES}")
    if kind in (Kind.PING, Kind.PONG) and length != HEARTBEAT_BYTES:
        raise ProtocolError(f"a heartbeat of {length} bytes, not {HEARTBEAT_BYTES}")
    return Header(kind, length, codec, flags, transfer, part, chunk, count, sender, body_crc)
