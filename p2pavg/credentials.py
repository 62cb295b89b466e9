"""Credentials of a run: who may take part, and the keys that its traffic is protected with.

The run's authority is a certificate authority (Ed25519, X.509). Every member has a certificate for its own
key, signed by the authority, with its peer id as the subject's alternative name, and the run key, a shared
secret under which the run's records in the table are found and encrypted. A shared-secret run derives the
authority's key from the secret, so that every holder of the secret makes its own certificate.

Credentials travel as one line of text, "p2pavg-KIND:" and base64 of a msgpack map, or as a file with that
line.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import functools
import os
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
from cryptography import x509
from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

from p2pavg.errors import ConfigurationError, CredentialError
from p2pavg.identity import Identity, peer_id_of

CLOCK_TOLERANCE = datetime.timedelta(minutes=10)
AUTHORITY_LIFETIME = datetime.timedelta(days=3650)
DEFAULT_LIFETIME = datetime.timedelta(days=30)
KEY_BYTES = 32
MAX_TEXT = 1 << 16
URI_PREFIX = "p2pavg:"
KINDS = ("authority", "secret", "request-key", "request", "invitation", "member")


# ------------------------------------------------------------------------------------------------ texts


def to_text(kind: str, fields: Mapping[str, Any]) -> str:
    """One line that carries `fields`."""
    return f"p2pavg-{kind}:" + base64.urlsafe_b64encode(msgpack.packb(dict(fields))).decode()


def from_text(text: str) -> tuple[str, dict[str, Any]]:
    """(kind, fields) of such a line. Raises CredentialError when it is none."""
    head, _, body = text.strip().partition(":")
    kind = head.removeprefix("p2pavg-")
    if not head.startswith("p2pavg-") or kind not in KINDS or len(text) > MAX_TEXT:
        raise CredentialError(
            "these are not credentials of p2pavg; give the file, or the text, that 'p2pavg credentials' made"
        )
    try:
        fields = msgpack.unpackb(base64.b64decode(body, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, msgpack.UnpackException):
        fields = None
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise CredentialError(f"the {kind} is damaged; copy the whole line again")
    return kind, fields


def read(source: str | os.PathLike[str]) -> tuple[str, dict[str, Any]]:
    """From a file, or the text itself. A file that others can read is refused."""
    text = os.fspath(source)
    if any(text.strip().startswith(f"p2pavg-{kind}:") for kind in KINDS):
        return from_text(text)
    path = Path(text).expanduser()
    try:
        mode = path.stat().st_mode
        content = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CredentialError(f"cannot read the credentials file {path} ({error})") from None
    if mode & 0o077 and from_text(content)[0] not in ("request", "invitation"):
        raise CredentialError(f"others can read {path}; run 'chmod 600 {path}' first")
    return from_text(content)


def write(path: str | os.PathLike[str], text: str) -> None:
    """Store a secret line, readable by its owner only. Raises ConfigurationError; never overwrites."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigurationError(f"{path} exists already; name another file, or remove it first") from None
    except OSError as error:
        raise ConfigurationError(f"cannot write {path} ({error.strerror}); name a writable file") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(text + "\n")


def _field(fields: Mapping[str, Any], name: str, kind: type, size: int | None = None) -> Any:
    value: Any = fields.get(name)
    if type(value) is not kind or (size is not None and len(fields[name]) != size):
        raise CredentialError("these credentials are damaged, or of another version of p2pavg; make new ones")
    return value


# ----------------------------------------------------------------------------------------- certificates


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)


def _authority_certificate(key: Ed25519PrivateKey, run_id: str, start: datetime.datetime) -> bytes:
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(run_id))
        .issuer_name(_name(run_id))
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(start - CLOCK_TOLERANCE)
        .not_valid_after(start + AUTHORITY_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(ca=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return builder.sign(key, None).public_bytes(serialization.Encoding.DER)


def _usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=ca,
        crl_sign=ca,
        encipher_only=False,
        decipher_only=False,
    )


def _member_certificate(
    authority_key: Ed25519PrivateKey, authority: bytes, public_key: bytes, lifetime: datetime.timedelta
) -> bytes:
    issuer = x509.load_der_x509_certificate(authority)
    start = _now()
    peer_id = peer_id_of(public_key)
    subject = Ed25519PublicKey.from_public_bytes(public_key)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(peer_id.hex()))
        .issuer_name(issuer.subject)
        .public_key(subject)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - CLOCK_TOLERANCE)
        .not_valid_after(start + lifetime + CLOCK_TOLERANCE)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(ca=False), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(URI_PREFIX + peer_id.hex())]),
            critical=True,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
        )
    )
    return builder.sign(authority_key, None).public_bytes(serialization.Encoding.DER)


_BAD_CERTIFICATE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.ExtensionNotFound,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
    x509.InvalidVersion,
)


def certificate_key(certificate: bytes) -> bytes:
    """The Ed25519 public key (32 bytes) of a member's certificate, checked against its peer id.

    Raises CredentialError for a certificate of another shape.
    """
    try:
        parsed = x509.load_der_x509_certificate(certificate)
        key = parsed.public_key()
        names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except _BAD_CERTIFICATE:
        uris, key = [], None
    if isinstance(key, Ed25519PublicKey):
        raw = key.public_bytes_raw()
        if uris == [URI_PREFIX + peer_id_of(raw).hex()]:
            return raw
    raise CredentialError("a certificate is not one of a p2pavg member")


def _check_issued(certificate: bytes, authority: bytes) -> None:
    """Raises CredentialError unless the authority signed the certificate."""
    try:
        issuer = x509.load_der_x509_certificate(authority)
        x509.load_der_x509_certificate(certificate).verify_directly_issued_by(issuer)
    except (*_BAD_CERTIFICATE, InvalidSignature):
        raise CredentialError("the certificates in these credentials are damaged; make new ones") from None


def certificate_end(certificate: bytes) -> datetime.datetime:
    """When a member's certificate ends, without the tolerance for wrong clocks."""
    try:
        return x509.load_der_x509_certificate(certificate).not_valid_after_utc - CLOCK_TOLERANCE
    except _BAD_CERTIFICATE:
        raise CredentialError("a certificate is not one of a p2pavg member") from None


# ------------------------------------------------------------------------------------------ the authority


@dataclass(frozen=True)
class Authority:
    """Who lets members in. Its file is the most precious one of the run."""

    run_id: str
    key: Ed25519PrivateKey
    certificate: bytes
    run_key: bytes

    @classmethod
    def new(cls, run_id: str) -> Authority:
        """For a run that begins."""
        key = Ed25519PrivateKey.generate()
        return cls(run_id, key, _authority_certificate(key, run_id, _now()), os.urandom(KEY_BYTES))

    @classmethod
    def load(cls, source: str | os.PathLike[str]) -> Authority:
        """Raises CredentialError."""
        kind, fields = read(source)
        if kind != "authority":
            raise CredentialError(
                f"this is a p2pavg {kind}, not the run's authority; name the authority's file"
            )
        key = Ed25519PrivateKey.from_private_bytes(_field(fields, "key", bytes, KEY_BYTES))
        certificate = _field(fields, "certificate", bytes)
        _check_issued(certificate, certificate)
        return cls(_field(fields, "run", str), key, certificate, _field(fields, "run_key", bytes, KEY_BYTES))

    def to_text(self) -> str:
        """The secret line."""
        fields = {
            "run": self.run_id,
            "key": self.key.private_bytes_raw(),
            "certificate": self.certificate,
            "run_key": self.run_key,
        }
        return to_text("authority", fields)

    def invite(self, request: str, lifetime: datetime.timedelta = DEFAULT_LIFETIME) -> str:
        """An invitation that only the maker of `request` can use. Raises CredentialError."""
        kind, fields = from_text(request)
        if kind != "request":
            raise CredentialError(f"this is a p2pavg {kind}, not a request; ask the newcomer for its request")
        public_key = _field(fields, "key", bytes, KEY_BYTES)
        sealing_key = _field(fields, "sealing_key", bytes, KEY_BYTES)
        try:
            Ed25519PublicKey.from_public_bytes(public_key).verify(
                _field(fields, "signature", bytes), b"p2pavg request" + sealing_key
            )
            ours = X25519PrivateKey.generate()
            shared = ours.exchange(X25519PublicKey.from_public_bytes(sealing_key))
        except (InvalidSignature, ValueError):
            raise CredentialError("the request's signature is wrong; copy the whole line again") from None
        sealed = AESGCM(_derive(shared, b"p2pavg invitation" + public_key)).encrypt(
            b"\0" * 12, self.run_key, public_key
        )
        invitation = {
            "run": self.run_id,
            "certificate": _member_certificate(self.key, self.certificate, public_key, lifetime),
            "authority": self.certificate,
            "sealing_key": ours.public_key().public_bytes_raw(),
            "sealed": sealed,
        }
        return to_text("invitation", invitation)

    def member(self, lifetime: datetime.timedelta = DEFAULT_LIFETIME) -> Credentials:
        """A whole identity: whoever holds it is that member."""
        identity = Identity.generate()
        certificate = _member_certificate(self.key, self.certificate, identity.public_key, lifetime)
        return Credentials(self.run_id, identity, certificate, self.certificate, self.run_key)


def _derive(secret: bytes, info: bytes) -> bytes:
    return HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)


# ----------------------------------------------------------------------------------- requests and members


def new_request() -> tuple[str, str]:
    """(what the newcomer keeps, what it sends to the authority)."""
    identity, sealing = Ed25519PrivateKey.generate(), X25519PrivateKey.generate()
    sealing_key = sealing.public_key().public_bytes_raw()
    kept = {"key": identity.private_bytes_raw(), "sealing": sealing.private_bytes_raw()}
    sent = {
        "key": identity.public_key().public_bytes_raw(),
        "sealing_key": sealing_key,
        "signature": identity.sign(b"p2pavg request" + sealing_key),
    }
    return to_text("request-key", kept), to_text("request", sent)


def accept(kept: str, invitation: str) -> Credentials:
    """The newcomer's credentials. Raises CredentialError when the invitation is not for this key."""
    kind, own = from_text(kept)
    if kind != "request-key":
        raise CredentialError(f"this is a p2pavg {kind}, not what 'credentials request' stored")
    kind, fields = from_text(invitation)
    if kind != "invitation":
        raise CredentialError(f"this is a p2pavg {kind}, not an invitation")
    identity = Identity(Ed25519PrivateKey.from_private_bytes(_field(own, "key", bytes, KEY_BYTES)))
    certificate = _field(fields, "certificate", bytes)
    if certificate_key(certificate) != identity.public_key:
        raise CredentialError("this invitation is for another key; use the one made for your own request")
    sealing = X25519PrivateKey.from_private_bytes(_field(own, "sealing", bytes, KEY_BYTES))
    theirs = X25519PublicKey.from_public_bytes(_field(fields, "sealing_key", bytes, KEY_BYTES))
    try:
        shared = sealing.exchange(theirs)
        run_key = AESGCM(_derive(shared, b"p2pavg invitation" + identity.public_key)).decrypt(
            b"\0" * 12, _field(fields, "sealed", bytes), identity.public_key
        )
    except (InvalidTag, ValueError):
        raise CredentialError("this invitation is damaged; copy the whole line again") from None
    authority = _field(fields, "authority", bytes)
    _check_issued(certificate, authority)
    return Credentials(_field(fields, "run", str), identity, certificate, authority, run_key)


def new_secret(run_id: str) -> str:
    """The line of a shared-secret run: every holder is a full member, and can let others in."""
    return to_text("secret", {"run": run_id, "secret": os.urandom(KEY_BYTES)})


_EPOCH = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True)
class Credentials:
    """What one member has: its own key and certificate, the authority's certificate, the run key."""

    run_id: str
    identity: Identity
    certificate: bytes  # DER
    authority: bytes  # DER
    run_key: bytes

    @classmethod
    def load(cls, source: str | os.PathLike[str]) -> Credentials:
        """From a file or text of a member, or of a shared secret (then with a fresh identity). Raises
        CredentialError.
        """
        kind, fields = read(source)
        if kind == "secret":
            run_id, secret = _field(fields, "run", str), _field(fields, "secret", bytes, KEY_BYTES)
            key = Ed25519PrivateKey.from_private_bytes(_derive(secret, b"p2pavg authority"))
            certificate = _authority_certificate(key, run_id, _EPOCH)
            return Authority(run_id, key, certificate, _derive(secret, b"p2pavg run key")).member(
                AUTHORITY_LIFETIME / 2
            )
        if kind != "member":
            hint = {
                "authority": "make a member of it with 'p2pavg credentials invite --count 1'",
                "invitation": "combine it with your request: 'p2pavg credentials accept'",
                "request": "send it to the run's owner, who answers with an invitation",
                "request-key": "combine it with the invitation: 'p2pavg credentials accept'",
            }
            raise CredentialError(f"this is a p2pavg {kind}, with which nobody can train; {hint[kind]}")
        identity = Identity(Ed25519PrivateKey.from_private_bytes(_field(fields, "key", bytes, KEY_BYTES)))
        loaded = cls(
            _field(fields, "run", str),
            identity,
            _field(fields, "certificate", bytes),
            _field(fields, "authority", bytes),
            _field(fields, "run_key", bytes, KEY_BYTES),
        )
        _check_issued(loaded.certificate, loaded.authority)
        if certificate_key(loaded.certificate) != identity.public_key:
            raise CredentialError("the certificate in these credentials is for another key; make new ones")
        if loaded.expires < _now() - CLOCK_TOLERANCE:
            raise CredentialError(
                f"these credentials expired at {loaded.expires:%Y-%m-%d %H:%M} UTC; ask for a new invitation"
            )
        return loaded

    @property
    def expires(self) -> datetime.datetime:
        """When the certificate ends, without the tolerance for wrong clocks."""
        return certificate_end(self.certificate)

    def to_text(self) -> str:
        """The secret line of this member."""
        fields = {
            "run": self.run_id,
            "key": self.identity.private_bytes(),
            "certificate": self.certificate,
            "authority": self.authority,
            "run_key": self.run_key,
        }
        return to_text("member", fields)

    def key_for(self, purpose: bytes) -> bytes:
        """32 bytes derived from the run key: all members get the same."""
        return _derive(self.run_key, b"p2pavg " + purpose)

    @functools.cached_property
    def server_context(self) -> ssl.SSLContext:
        """For connections that others open. Made once: strangers may come in thousands."""
        return self.context(server=True)

    @functools.cached_property
    def client_context(self) -> ssl.SSLContext:
        """For connections that this peer opens."""
        return self.context(server=False)

    def context(self, *, server: bool) -> ssl.SSLContext:
        """TLS 1.3, both sides with certificates of this run's authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # members are known by their keys: see certificate_key
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.authority)
        chain = _pem(self.certificate) + self.identity.private_pem()
        with _secret_file(chain) as path:
            context.load_cert_chain(path)
        return context

    def __repr__(self) -> str:
        return f"Credentials({self.run_id!r}, {self.identity!r})"


def _pem(certificate: bytes) -> bytes:
    return x509.load_der_x509_certificate(certificate).public_bytes(serialization.Encoding.PEM)


class _secret_file:
    """The path of a file with secret content, that no other user can read and that leaves no trace.

    Python's ssl takes keys by path only.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __enter__(self) -> str:
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("p2pavg", os.MFD_CLOEXEC)
            os.write(self._descriptor, self._content)
            self._path = f"/proc/self/fd/{self._descriptor}"
        else:
            self._descriptor, self._path = tempfile.mkstemp()
            os.write(self._descriptor, self._content)
        return self._path

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
        if not self._path.startswith("/proc/"):
            os.unlink(self._path)
