"""Statements of a run's authority about one peer, in the 64 bytes of a signature: member, or revoked.

Statements need no clock. A certificate states membership too, and until when, but is too long for the table.
Revocations form a list that only grows: it is the same in whatever order its parts arrive, and nobody but the
authority can add to it.
"""

from __future__ import annotations

from collections.abc import Iterable

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2pavg.identity import PEER_ID_BYTES, SIGNATURE_BYTES

_MEMBER = b"p2pavg member\0"
_REVOKED = b"p2pavg revoked\0"
REVOCATION_BYTES = PEER_ID_BYTES + SIGNATURE_BYTES


def vouch(authority: Ed25519PrivateKey, peer_id: bytes) -> bytes:
    """The authority's signature over the peer's membership."""
    return authority.sign(_MEMBER + peer_id)


def is_vouched(authority: Ed25519PublicKey, peer_id: bytes, word: bytes) -> bool:
    """Whether `word` is the authority's signature over this peer's membership."""
    return _is_signed(authority, word, _MEMBER + peer_id)


def revoke(authority: Ed25519PrivateKey, peer_id: bytes) -> bytes:
    """The authority's revocation of a peer, `REVOCATION_BYTES` bytes: the peer's id, and a signature."""
    return peer_id + authority.sign(_REVOKED + peer_id)


def is_revocation(authority: Ed25519PublicKey, statement: bytes) -> bool:
    """Whether `statement` is a revocation that the authority signed."""
    peer_id, word = statement[:PEER_ID_BYTES], statement[PEER_ID_BYTES:]
    return len(statement) == REVOCATION_BYTES and _is_signed(authority, word, _REVOKED + peer_id)


def split(statements: bytes) -> Iterable[bytes]:
    """Take apart revocations that stand one after the other."""
    return (statements[at : at + REVOCATION_BYTES] for at in range(0, len(statements), REVOCATION_BYTES))


def _is_signed(authority: Ed25519PublicKey, signature: bytes, message: bytes) -> bool:
    try:
        authority.verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
