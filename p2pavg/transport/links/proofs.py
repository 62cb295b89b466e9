"""How peers prove themselves: signatures over both hellos, MACs and keys of the secret of a link. Pure."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from p2pavg.errors import ProtocolError
from p2pavg.identity import verify
from p2pavg.transport.engine import StreamKeys
from p2pavg.transport.links.handshake import NONCE_BYTES, Hello, Refusal
from p2pavg.transport.sealing import KEY_BYTES


def transcript(dialler: Hello, listener: Hello, signer: Hello) -> bytes:
    """The bytes that `signer`, one of the two, signs."""
    role = b"dial" if signer is dialler else b"listen"
    parts = [b"p2pavg link", role]
    for hello in (dialler, listener):
        parts += [hello.run, hello.key, hello.nonce, hello.token]
    return hashlib.sha256(b"\0".join(parts)).digest()


def check_signature(dialler: Hello, listener: Hello, signer: Hello, message: Mapping[str, Any]) -> None:
    """Raises Refusal unless message["sig"] proves that `signer` has its key."""
    signature = message.get("sig")
    if not isinstance(signature, bytes) or not verify(
        signer.key, transcript(dialler, listener, signer), signature
    ):
        raise Refusal("malformed", "a peer could not prove its identity")


def link_secret(dialler: Hello, listener: Hello) -> bytes:
    return _derive(dialler.token + listener.token, b"", b"p2pavg link")


def link_tag(secret: bytes) -> bytes:
    """The tag by which a data stream names its link."""
    return hashlib.sha256(b"p2pavg tag" + secret).digest()[:8]


def stream_hello(secret: bytes, stream: int) -> dict[str, Any]:
    """The first message of the side that opens a data stream."""
    nonce = os.urandom(NONCE_BYTES)
    return {
        "link": link_tag(secret),
        "stream": stream,
        "nonce": nonce,
        "mac": _mac(secret, b"dial", stream, nonce),
    }


def stream_answer(secret: bytes, hello: Mapping[str, Any]) -> dict[str, Any]:
    """The listener's answer to a `stream_hello`. Raises ProtocolError when the hello is wrong."""
    stream, nonce, mac = hello.get("stream"), hello.get("nonce"), hello.get("mac")
    if (
        not isinstance(stream, int)
        or not 0 <= stream < 2**31
        or not isinstance(nonce, bytes)
        or len(nonce) != NONCE_BYTES
        or not isinstance(mac, bytes)
        or not hmac.compare_digest(mac, _mac(secret, b"dial", stream, nonce))
    ):
        raise ProtocolError("a data stream that does not know its link's secret")
    own = os.urandom(NONCE_BYTES)
    return {"nonce": own, "mac": _mac(secret, b"listen", stream, nonce + own)}


def check_stream_answer(secret: bytes, hello: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    """Raises ProtocolError unless the listener knows the secret too."""
    nonce, mac = answer.get("nonce"), answer.get("mac")
    if (
        not isinstance(nonce, bytes)
        or not isinstance(mac, bytes)
        or not hmac.compare_digest(mac, _mac(secret, b"listen", hello["stream"], hello["nonce"] + nonce))
    ):
        raise ProtocolError("the other side of a data stream does not know the link's secret")


def stream_keys(
    secret: bytes, hello: Mapping[str, Any], answer: Mapping[str, Any], *, dialled: bool
) -> StreamKeys:
    """The keys of an encrypted data stream, fresh for every stream. hello, answer: checked.

    dialled: this side opened the stream.
    """
    salt = hello["nonce"] + answer["nonce"]
    info = b"p2pavg stream" + link_tag(secret) + int(hello["stream"]).to_bytes(4, "little")
    forth, back = _derive(secret, salt, info + b"dial"), _derive(secret, salt, info + b"listen")
    return StreamKeys(forth, back) if dialled else StreamKeys(back, forth)


def _derive(secret: bytes, salt: bytes, info: bytes) -> bytes:
    return HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=salt, info=info).derive(secret)


def _mac(secret: bytes, role: bytes, stream: int, nonces: bytes) -> bytes:
    return hmac.new(secret, role + stream.to_bytes(4, "little") + nonces, hashlib.sha256).digest()
