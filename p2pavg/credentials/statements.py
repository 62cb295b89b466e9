"""What a run's authority says of one peer, in the 64 bytes of a signature: it is a member, or no more.

They need no clock. A certificate says the first as well, and until when, but is too long for the table. Of
the second there is a list, which only grows: it is the same in whatever order its parts arrive, and nobody
but the authority adds to it.
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
    """The authority's word that the peer is a member."""
    return authority.sign(_MEMBER + peer_id)


def is_vouched(authority: Ed25519PublicKey, peer_id: bytes, word: bytes) -> bool:
    """Whether the authority said so of this peer."""
    return _is_signed(authority, word, _MEMBER + peer_id)


def revoke(authority: Ed25519PrivateKey, peer_id: bytes) -> bytes:
    """The authority's word that the peer is no member any more, which names it: `REVOCATION_BYTES` bytes."""
    return peer_id + authority.sign(_REVOKED + peer_id)


def is_revocation(authority: Ed25519PublicKey, statement: bytes) -> bool:
    """Whether the authority said that the peer at the beginning of `statement` is no member any more."""
    peer_id, word = statement[:PEER_ID_BYTES], statement[PEER_ID_BYTES:]
    return len(statement) == REVOCATION_BYTES and _is_signed(authority, word, _REVOKED + peer_id)


def split(statements: bytes) -> Iterable[bytes]:
    """One revocation after the other, of those that stand there in a row."""
    return (statements[at : at + REVOCATION_BYTES] for at in range(0, len(statements), REVOCATION_BYTES))


def _is_signed(authority: Ed25519PublicKey, signature: bytes, message: bytes) -> bool:
    try:
        authority.verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
