"""Membership in a closed run: records are sealed, and the authority vouches for their peers."""

from __future__ import annotations

import bisect
import hashlib
import hmac
from collections.abc import Callable

from p2pavg.credentials import Credentials, statements
from p2pavg.credentials.statements import REVOCATION_BYTES
from p2pavg.identity import PEER_ID_BYTES, SIGNATURE_BYTES
from p2pavg.membership.seal import Seal

MAX_REVOKED = 65536
PAGE_BYTES = 11 * REVOCATION_BYTES  # fits a datagram
DIGEST_BYTES = 8


class Revoked:
    """The peers that the authority has revoked. The list only grows, and only by the authority's word."""

    def __init__(self, is_revocation: Callable[[bytes], bool]) -> None:
        self._is_revocation = is_revocation
        self._statements: dict[bytes, bytes] = {}
        self._order: list[bytes] = []
        self._digest = 0

    def __contains__(self, peer_id: object) -> bool:
        return peer_id in self._statements

    def __len__(self) -> int:
        return len(self._order)

    @property
    def digest(self) -> int:
        """Equal lists have equal digests, of 64 bits."""
        return self._digest

    def add(self, statements_in_a_row: bytes) -> list[bytes]:
        """Take what is rightly signed and new; the ids of these peers."""
        new = []
        for statement in statements.split(statements_in_a_row):
            peer_id = statement[:PEER_ID_BYTES]
            if peer_id in self._statements or len(self) >= MAX_REVOKED or not self._is_revocation(statement):
                continue
            self._statements[peer_id] = statement
            bisect.insort(self._order, peer_id)
            hashed = hashlib.blake2b(peer_id, digest_size=DIGEST_BYTES, person=b"revoked").digest()
            self._digest ^= int.from_bytes(hashed, "big")
            new.append(peer_id)
        return new

    def of(self, peer_ids: list[bytes]) -> bytes:
        """The statements on these peers, in a row."""
        return b"".join(self._statements[peer_id] for peer_id in peer_ids)

    def page(self, cursor: bytes) -> tuple[bytes, bytes]:
        """As many statements as fit a datagram, on peers after `cursor`; and the next cursor, empty at the
        end.
        """
        at = bisect.bisect_right(self._order, cursor)
        found = self._order[at : at + PAGE_BYTES // REVOCATION_BYTES]
        following = found[-1] if found and found[-1] != self._order[-1] else b""
        return b"".join(self._statements[peer_id] for peer_id in found), following


class ClosedRun:
    """Seals and opens the records of a closed run, for a member or a watcher."""

    def __init__(self, credentials: Credentials) -> None:
        self.run_key = credentials.key_for(b"table")
        self.beat_key = hmac.digest(self.run_key, b"beats", hashlib.sha256)
        self._seal = Seal(self.run_key)
        self._word = credentials.word
        self._authority = credentials.authority_key
        self._vouched: dict[bytes, bytes] = {}  # what was checked already
        self.revoked = Revoked(lambda statement: statements.is_revocation(self._authority, statement))

    def close(self, value: bytes, peer_id: bytes) -> bytes:
        """Seal the value of this peer's record."""
        return self._seal.close(self._word + value, peer_id)

    def open(self, sealed: bytes, peer_id: bytes) -> bytes | None:
        """What a peer's record says; None when it is not sealed by a member, for this peer, or the authority
        does not vouch for this peer, or has revoked it.
        """
        opened = self._seal.open(sealed, peer_id)
        if opened is None or peer_id in self.revoked:
            return None
        word, value = opened[:SIGNATURE_BYTES], opened[SIGNATURE_BYTES:]
        return value if self._is_vouched(peer_id, word) else None

    def _is_vouched(self, peer_id: bytes, word: bytes) -> bool:
        if self._vouched.get(peer_id) == word:
            return True
        if not statements.is_vouched(self._authority, peer_id, word):
            return False
        self._vouched[peer_id] = word
        if len(self._vouched) > MAX_REVOKED:
            self._vouched.clear()
        return True
