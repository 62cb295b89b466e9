"""Who a peer is: an Ed25519 key pair, and the peer id derived from it."""

from __future__ import annotations

import base64
import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2pavg.errors import ConfigurationError

PEER_ID_BYTES = 20
SHORT_ID_DIGITS = 8
PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
OWN_IDENTITY = (  # what to do where two processes have one
    "give every process credentials of its own ('p2pavg credentials invite AUTHORITY --count N' makes N), "
    "or, in an open run, an identity= of its own"
)
_FILE_BYTES = 256  # more than an identity file has


def peer_id_of(public_key: bytes) -> bytes:
    """The 20-byte peer id (also the Kademlia node id) of a 32-byte Ed25519 public key."""
    return hashlib.sha256(public_key).digest()[:PEER_ID_BYTES]


def short_id(peer_id: bytes) -> str:
    """A name for people and logs: the first eight hexadecimal digits of the id, as reports begin it too."""
    return peer_id.hex()[:SHORT_ID_DIGITS]


def verify(public_key: bytes, message: bytes, signature: bytes) -> bool:
    """Whether `signature` (64 bytes) over `message` was made with the key of `public_key` (32 bytes)."""
    if len(public_key) != PUBLIC_KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


class Identity:
    """One peer's key pair. The private key never leaves this object except into the file of
    `load_or_create`.
    """

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._private_key = private_key
        self.public_key: bytes = private_key.public_key().public_bytes_raw()
        self.peer_id: bytes = peer_id_of(self.public_key)

    @classmethod
    def generate(cls) -> Identity:
        """A new random identity."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: str | os.PathLike[str]) -> Identity:
        """Load the identity stored at `path`, or make one and store it there, readable by its owner only.

        The file holds the 32 raw bytes of the private key in base64. Raises `ConfigurationError` when it
        holds anything else, cannot be read or written, or others can read it.
        """
        file = Path(path).expanduser()
        try:
            if not file.exists():
                cls.generate()._save(file)
            with file.open("rb") as stream:
                mode, content = os.fstat(stream.fileno()).st_mode, stream.read(_FILE_BYTES)
            if mode & 0o077:
                raise ConfigurationError(f"others can read {file}; run 'chmod 600 {file}' first")
            raw = base64.b64decode(content.strip(), validate=True)
            return cls(Ed25519PrivateKey.from_private_bytes(raw))
        except ConfigurationError:
            raise
        except ValueError as error:
            raise ConfigurationError(
                f"{file} does not hold a p2pavg identity; delete it to make a new one, or name another file"
            ) from error
        except OSError as error:
            raise ConfigurationError(
                f"cannot read or write the identity file {file} ({error.strerror}); name a writable path"
            ) from error

    def derived(self, name: str) -> Identity:
        """Another identity, which follows from this one and a name: the same each time."""
        return Identity(Ed25519PrivateKey.from_private_bytes(self.secret(name)))

    def secret(self, name: str) -> bytes:
        """32 bytes that follow from this identity and a name, and that nobody else can tell."""
        return hashlib.blake2b(name.encode(), key=self.private_bytes(), digest_size=32).digest()

    def sign(self, message: bytes) -> bytes:
        """The 64-byte Ed25519 signature over `message`."""
        return self._private_key.sign(message)

    def private_bytes(self) -> bytes:
        """The 32 bytes of the private key: a secret."""
        return self._private_key.private_bytes_raw()

    def private_pem(self) -> bytes:
        """The private key for OpenSSL: a secret."""
        return self._private_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def _save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f".{file.name}.{os.getpid()}.{os.urandom(4).hex()}")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as stream:
            stream.write(base64.b64encode(self._private_key.private_bytes_raw()) + b"\n")
        try:
            os.link(draft, file)  # never over a file that another process made meanwhile
        except FileExistsError:
            pass
        finally:
            draft.unlink()

    def __repr__(self) -> str:
        return f"Identity({short_id(self.peer_id)})"


def told_apart(names: Mapping[bytes, str]) -> dict[bytes, str]:
    """A name for each peer id: the peer's own, with its short id where several share a name or have none."""
    shared = Counter(names.values())
    return {
        peer: name if name and shared[name] == 1 else f"{name} {short_id(peer)}".strip()
        for peer, name in names.items()
    }
