"""AES-256-GCM over the frames of a data stream, one key per direction; the native pump's twin.

On an encrypted stream the 8 bytes of a header's checksums hold the first 8 bytes of a tag over the other 32,
so that nothing acts on a forged header. The body is encrypted, with the header as associated data, and its
tag of 16 bytes follows it. The nonce is u32 purpose (0 body, 1 header) and u64 number of the frame in its
stream; keys are never used for a second stream, nor for more than 2^32 frames.
"""

from __future__ import annotations

import hmac

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from p2pavg.errors import ProtocolError
from p2pavg.transport.frames import HEADER_BYTES

TAG_BYTES = 16
KEY_BYTES = 32
MOST_FRAMES = 1 << 32
_SIGNED_BYTES = 32
_BODY, _HEADER = 0, 1


def _nonce(purpose: int, frame: int) -> bytes:
    return purpose.to_bytes(4, "little") + frame.to_bytes(8, "little")


class Sealer:
    """Encrypts the frames that one side sends over one stream."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._frames = 0

    def seal(self, header: bytes, body: memoryview) -> tuple[bytes, memoryview]:
        """The frame as it travels: (header, body with tag). Raises ProtocolError when the key is used up."""
        frame = self._frames
        if frame >= MOST_FRAMES:
            raise ProtocolError("its keys are used up")
        self._frames += 1
        sealed = sign(self._cipher, frame, header)
        return sealed, memoryview(self._cipher.encrypt(_nonce(_BODY, frame), body, sealed))


class Opener:
    """Decrypts the frames of one stream: call `header`, then `body` unless the body is dropped, and so on."""

    def __init__(self, key: bytes) -> None:
        self._key = algorithms.AES(key)
        self._cipher = AESGCM(key)
        self._frames = 0
        self._head = b""

    def header(self, header: memoryview) -> None:
        """Check a header. Raises ProtocolError unless it is authentic, and the next one of the stream."""
        head, frame = bytes(header), self._frames
        if frame >= MOST_FRAMES or not hmac.compare_digest(head, sign(self._cipher, frame, head)):
            raise ProtocolError("a frame header that is not authentic")
        self._frames += 1
        self._head = head

    def body(self, view: memoryview, tag: memoryview) -> None:
        """Decrypt a body in place. Raises ProtocolError, with `view` unchanged, unless it is authentic."""
        mode = modes.GCM(_nonce(_BODY, self._frames - 1), bytes(tag))
        decryptor = Cipher(self._key, mode).decryptor()
        decryptor.authenticate_additional_data(self._head)
        plain = decryptor.update(view)
        try:
            decryptor.finalize()
        except InvalidTag:
            raise ProtocolError("a frame body that is not authentic") from None
        view[:] = plain


def sign(cipher: AESGCM, frame: int, header: bytes) -> bytes:
    """The header with the tag in place of its checksums."""
    signed = header[:_SIGNED_BYTES]
    tag = cipher.encrypt(_nonce(_HEADER, frame), b"", signed)
    return signed + tag[: HEADER_BYTES - _SIGNED_BYTES]
