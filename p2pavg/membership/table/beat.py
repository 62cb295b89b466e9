"""A heartbeat: one small datagram that shows the next link of its sender's record, and which peers it sees.

```
0 u8 mark   1 3s run   4 4s sender  8 u16 sequence   10 u8 step   11 10s link   21 u8 flags   22 3s digest
```
It needs no signature, because only the sender knows the next link. `digest` combines the records in its view:
peers that see the same send the same. In a closed run a tag of 8 bytes follows, under a key of the run, so
that nobody else can change the flags or the digest.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import NamedTuple

from p2pavg.membership.table.record import LINK_BYTES, Refresh

BEAT_MARK = b"\xb1"
RUN_TAG_BYTES = 3
SENDER_BYTES = 4
DIGEST_BYTES = 3
_BEAT = struct.Struct(f">c{RUN_TAG_BYTES}s{SENDER_BYTES}sHB{LINK_BYTES}sB{DIGEST_BYTES}s")
BEAT_BYTES = _BEAT.size
TAG_BYTES = 8

NEWS = 1  # the sender learnt of a peer a moment ago
SAMPLED = 2  # the sender does not try to see everybody: its digest tells nothing


class Beat(NamedTuple):
    run: bytes
    sender: bytes
    sequence: int
    refresh: Refresh
    flags: int
    digest: bytes
    tag: bytes = b""  # as it came

    def encode(self, key: bytes | None = None) -> bytes:
        """key: of a closed run."""
        step, link = self.refresh
        sequence = self.sequence & 0xFFFF
        data = _BEAT.pack(BEAT_MARK, self.run, self.sender, sequence, step, link, self.flags, self.digest)
        return data if key is None else data + _tag(key, data)

    def is_authentic(self, key: bytes) -> bool:
        """Whether a member of the closed run made its tag."""
        return hmac.compare_digest(self.tag, _tag(key, self.encode()))


def _tag(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, hashlib.sha256)[:TAG_BYTES]


def decode_beat(data: bytes) -> Beat | None:
    """The beat in a datagram, or None when it is none."""
    if len(data) not in (BEAT_BYTES, BEAT_BYTES + TAG_BYTES) or data[:1] != BEAT_MARK:
        return None
    _, run, sender, sequence, step, link, flags, digest = _BEAT.unpack(data[:BEAT_BYTES])
    return Beat(run, sender, sequence, Refresh(step, link), flags, digest, data[BEAT_BYTES:])
