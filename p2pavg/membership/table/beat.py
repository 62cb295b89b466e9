"""A heartbeat: one small datagram that shows the next link of its sender's record, and which peers it sees.

```
0 u8 mark   1 3s run   4 4s sender  8 u16 sequence   10 u8 step   11 10s link   21 u8 flags   22 3s digest
```
It needs no signature, because only the sender knows the next link. `digest` combines the records in its view:
peers that see the same send the same. In runs of many a beat also carries what its sender heard from others,
18 bytes for each, with its age in tenths of a second:
```
0 4s sender   4 u16 sequence   6 u8 step   7 10s link   17 u8 age
```
In a closed run a tag of 8 bytes follows, under a key of the run, so that nobody else can change any of it.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import NamedTuple

from p2pavg.membership.table.record import LINK_BYTES, Refresh
from p2pavg.membership.table.wire import MAX_DATAGRAM

BEAT_MARK = b"\xb1"
RUN_TAG_BYTES = 3
SENDER_BYTES = 4
DIGEST_BYTES = 3
_HEARD = struct.Struct(f">{SENDER_BYTES}sHB{LINK_BYTES}sB")
_BEAT = struct.Struct(f">c{RUN_TAG_BYTES}s{SENDER_BYTES}sHB{LINK_BYTES}sB{DIGEST_BYTES}s")
BEAT_BYTES, HEARD_BYTES = _BEAT.size, _HEARD.size
TAG_BYTES = 8

MOST_HEARD = (MAX_DATAGRAM - BEAT_BYTES - TAG_BYTES) // HEARD_BYTES  # in one beat
AGES_PER_S, OLDEST = 10, 255  # of what was heard

NEWS = 1  # the sender learnt of a peer a moment ago
SAMPLED = 2  # the sender does not try to see everybody: its digest tells nothing


class Heard(NamedTuple):
    """A beat that the sender of another one heard."""

    sender: bytes
    sequence: int
    refresh: Refresh
    age: int  # tenths of a second, 255 at most


class Beat(NamedTuple):
    run: bytes
    sender: bytes
    sequence: int
    refresh: Refresh
    flags: int
    digest: bytes
    heard: tuple[Heard, ...] = ()
    tag: bytes = b""  # as it came

    def encode(self, key: bytes | None = None) -> bytes:
        """key: of a closed run."""
        step, link = self.refresh
        sequence = self.sequence & 0xFFFF
        data = _BEAT.pack(BEAT_MARK, self.run, self.sender, sequence, step, link, self.flags, self.digest)
        data += b"".join(
            _HEARD.pack(other.sender, other.sequence & 0xFFFF, *other.refresh, other.age)
            for other in self.heard
        )
        return data if key is None else data + _tag(key, data)

    def is_authentic(self, key: bytes) -> bool:
        """Whether a member of the closed run made its tag."""
        return hmac.compare_digest(self.tag, _tag(key, self.encode()))


def _tag(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, hashlib.sha256)[:TAG_BYTES]


def decode_beat(data: bytes) -> Beat | None:
    """The beat in a datagram, or None when it is none."""
    count, tag = divmod(len(data) - BEAT_BYTES, HEARD_BYTES)
    if not 0 <= count <= MOST_HEARD or tag not in (0, TAG_BYTES) or data[:1] != BEAT_MARK:
        return None
    end = len(data) - tag
    _, run, sender, sequence, step, link, flags, digest = _BEAT.unpack(data[:BEAT_BYTES])
    heard = tuple(
        Heard(other, number, Refresh(at, revealed), age)
        for other, number, at, revealed, age in _HEARD.iter_unpack(data[BEAT_BYTES:end])
    )
    return Beat(run, sender, sequence, Refresh(step, link), flags, digest, heard, data[end:])
