"""Sealing: what a closed run's records say is readable by its members only."""

from __future__ import annotations

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

NONCE_BYTES = 12
OVERHEAD_BYTES = NONCE_BYTES + 16


class Seal:
    """AES-256-GCM under a key of the run, with a random nonce; bound to the peer that the record is of."""

    def __init__(self, key: bytes) -> None:
        """key: 32 bytes."""
        self._cipher = AESGCM(key)

    def close(self, value: bytes, peer_id: bytes) -> bytes:
        """The sealed value, `OVERHEAD_BYTES` longer."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, value, peer_id)

    def open(self, sealed: bytes, peer_id: bytes) -> bytes | None:
        """The value; None when it was not sealed by a member, or for another peer's record."""
        if len(sealed) < OVERHEAD_BYTES:
            return None
        try:
            return self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], peer_id)
        except InvalidTag:
            return None
