"""Credentials of a run: who may take part, and the keys that its traffic is protected with.

The run's authority is a certificate authority (Ed25519, X.509). Every member has a certificate for its own
key, signed by the authority, with its peer id as the subject's alternative name, and the run key, a shared
secret under which the run's records in the table are found and encrypted. A shared-secret run derives the
authority's key from the secret, so that every holder of the secret makes its own certificate.
"""

from __future__ import annotations

import datetime
import functools
import os
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from p2pavg.credentials import certificates, statements, texts
from p2pavg.credentials.secret_file import secret_file
from p2pavg.errors import CredentialError
from p2pavg.identity import PEER_ID_BYTES, Identity, peer_id_of

DEFAULT_LIFETIME = datetime.timedelta(days=30)
KEY_BYTES = 32
X509_V_FLAG_NO_CHECK_TIME = 0x200000  # of OpenSSL; Python has no name for it


@dataclass(frozen=True)
class Authority:
    """The authority of a run, which lets members in. Whoever has its file can let anybody in."""

    run_id: str
    key: Ed25519PrivateKey = field(repr=False)
    certificate: bytes = field(repr=False)
    run_key: bytes = field(repr=False)
    revoked: bytes = field(default=b"", repr=False)  # revocations, one after the other, see `statements`

    @classmethod
    def new(cls, run_id: str) -> Authority:
        """A new authority, for a new run."""
        key = Ed25519PrivateKey.generate()
        return cls(
            run_id,
            key,
            certificates.authority_certificate(key, run_id, certificates.now()),
            os.urandom(KEY_BYTES),
        )

    @classmethod
    def load(cls, source: str | os.PathLike[str]) -> Authority:
        """Read an authority from a file or text. Raises CredentialError."""
        kind, fields = texts.read(source)
        if kind != "authority":
            raise CredentialError(
                f"this is a p2pavg {kind}, not the run's authority; name the authority's file"
            )
        key = Ed25519PrivateKey.from_private_bytes(texts.field(fields, "key", bytes, KEY_BYTES))
        certificate = texts.field(fields, "certificate", bytes)
        certificates.check_issued(certificate, certificate)
        return cls(
            texts.field(fields, "run", str),
            key,
            certificate,
            texts.field(fields, "run_key", bytes, KEY_BYTES),
            texts.field(fields, "revoked", bytes),
        )

    def to_text(self) -> str:
        """The secret line that holds this authority."""
        fields = {
            "run": self.run_id,
            "key": self.key.private_bytes_raw(),
            "certificate": self.certificate,
            "run_key": self.run_key,
            "revoked": self.revoked,
        }
        return texts.to_text("authority", fields)

    def invite(self, request: str, lifetime: datetime.timedelta = DEFAULT_LIFETIME) -> str:
        """An invitation that only the maker of `request` can use. Raises CredentialError."""
        kind, fields = texts.from_text(request)
        if kind != "request":
            raise CredentialError(f"this is a p2pavg {kind}, not a request; ask the newcomer for its request")
        public_key = texts.field(fields, "key", bytes, KEY_BYTES)
        sealing_key = texts.field(fields, "sealing_key", bytes, KEY_BYTES)
        try:
            Ed25519PublicKey.from_public_bytes(public_key).verify(
                texts.field(fields, "signature", bytes), b"p2pavg request" + sealing_key
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
            "certificate": certificates.member_certificate(self.key, self.certificate, public_key, lifetime),
            "authority": self.certificate,
            "sealing_key": ours.public_key().public_bytes_raw(),
            "sealed": sealed,
            "word": statements.vouch(self.key, peer_id_of(public_key)),
        }
        return texts.to_text("invitation", invitation)

    def member(self, lifetime: datetime.timedelta = DEFAULT_LIFETIME) -> Credentials:
        """Credentials of a new member, its private key included."""
        identity = Identity.generate()
        certificate = certificates.member_certificate(
            self.key, self.certificate, identity.public_key, lifetime
        )
        word = statements.vouch(self.key, identity.peer_id)
        return Credentials(self.run_id, identity, certificate, self.certificate, self.run_key, word)

    def revoke(self, peer_ids: Iterable[bytes]) -> Authority:
        """This authority with these peers (ids of 20 bytes) revoked as well."""
        known = {statement[:PEER_ID_BYTES] for statement in statements.split(self.revoked)}
        new = dict.fromkeys(peer_id for peer_id in peer_ids if peer_id not in known)
        return replace(
            self, revoked=self.revoked + b"".join(statements.revoke(self.key, peer_id) for peer_id in new)
        )


def _derive(secret: bytes, info: bytes) -> bytes:
    return HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)


def new_request() -> tuple[str, str]:
    """The two lines of a request: the secret one that the newcomer keeps, and the one for the authority."""
    identity, sealing = Ed25519PrivateKey.generate(), X25519PrivateKey.generate()
    kept = {"key": identity.private_bytes_raw(), "sealing": sealing.private_bytes_raw()}
    return texts.to_text("request-key", kept), _request(identity, sealing)


def request_again(kept: str) -> str:
    """The request of a key that `new_request` made: the same line. Raises CredentialError."""
    own = _own(kept)
    identity = Ed25519PrivateKey.from_private_bytes(texts.field(own, "key", bytes, KEY_BYTES))
    return _request(
        identity, X25519PrivateKey.from_private_bytes(texts.field(own, "sealing", bytes, KEY_BYTES))
    )


def _request(identity: Ed25519PrivateKey, sealing: X25519PrivateKey) -> str:
    sealing_key = sealing.public_key().public_bytes_raw()
    sent = {
        "key": identity.public_key().public_bytes_raw(),
        "sealing_key": sealing_key,
        "signature": identity.sign(b"p2pavg request" + sealing_key),
    }
    return texts.to_text("request", sent)


def _own(kept: str) -> dict[str, Any]:
    kind, own = texts.from_text(kept)
    if kind != "request-key":
        raise CredentialError(f"this is a p2pavg {kind}, not what 'credentials request' stored")
    return own


def accept(kept: str, invitation: str) -> Credentials:
    """The newcomer's credentials. Raises CredentialError when the invitation is not for this key."""
    own = _own(kept)
    kind, fields = texts.from_text(invitation)
    if kind != "invitation":
        raise CredentialError(f"this is a p2pavg {kind}, not an invitation")
    identity = Identity(Ed25519PrivateKey.from_private_bytes(texts.field(own, "key", bytes, KEY_BYTES)))
    certificate = texts.field(fields, "certificate", bytes)
    if certificates.certificate_key(certificate) != identity.public_key:
        raise CredentialError("this invitation is for another key; use the one made for your own request")
    sealing = X25519PrivateKey.from_private_bytes(texts.field(own, "sealing", bytes, KEY_BYTES))
    theirs = X25519PublicKey.from_public_bytes(texts.field(fields, "sealing_key", bytes, KEY_BYTES))
    try:
        shared = sealing.exchange(theirs)
        run_key = AESGCM(_derive(shared, b"p2pavg invitation" + identity.public_key)).decrypt(
            b"\0" * 12, texts.field(fields, "sealed", bytes), identity.public_key
        )
    except (InvalidTag, ValueError):
        raise CredentialError("this invitation is damaged; copy the whole line again") from None
    authority = texts.field(fields, "authority", bytes)
    certificates.check_issued(certificate, authority)
    word = texts.field(fields, "word", bytes)
    return Credentials(texts.field(fields, "run", str), identity, certificate, authority, run_key, word)


def new_secret(run_id: str) -> str:
    """The secret line of a shared-secret run. Every holder is a full member, and can let others in."""
    return texts.to_text("secret", {"run": run_id, "secret": os.urandom(KEY_BYTES)})


_EPOCH = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True)
class Credentials:
    """One member's own key and certificate, the authority's certificate, and the run key."""

    run_id: str
    identity: Identity
    certificate: bytes  # DER
    authority: bytes  # DER
    run_key: bytes
    word: bytes  # the authority's signature over this peer's membership
    mutual: ClassVar[bool] = True  # both sides of its TLS connections show certificates

    @classmethod
    def load(cls, source: str | os.PathLike[str]) -> Credentials:
        """From a file or text of a member, or of a shared secret (then with a fresh identity). Raises
        CredentialError.
        """
        kind, fields = texts.read(source)
        if kind == "secret":
            run_id, secret = texts.field(fields, "run", str), texts.field(fields, "secret", bytes, KEY_BYTES)
            key = Ed25519PrivateKey.from_private_bytes(_derive(secret, b"p2pavg authority"))
            certificate = certificates.authority_certificate(key, run_id, _EPOCH)
            return Authority(run_id, key, certificate, _derive(secret, b"p2pavg run key")).member(
                certificates.AUTHORITY_LIFETIME / 2
            )
        if kind != "member":
            hint = {
                "authority": "make a member of it with 'p2pavg credentials invite --count 1'",
                "invitation": "combine it with your request: 'p2pavg credentials accept'",
                "request": "send it to the run's owner, who answers with an invitation",
                "request-key": "combine it with the invitation: 'p2pavg credentials accept'",
            }
            raise CredentialError(f"this is a p2pavg {kind}, with which nobody can train; {hint[kind]}")
        identity = Identity(
            Ed25519PrivateKey.from_private_bytes(texts.field(fields, "key", bytes, KEY_BYTES))
        )
        loaded = cls(
            texts.field(fields, "run", str),
            identity,
            texts.field(fields, "certificate", bytes),
            texts.field(fields, "authority", bytes),
            texts.field(fields, "run_key", bytes, KEY_BYTES),
            texts.field(fields, "word", bytes),
        )
        certificates.check_issued(loaded.certificate, loaded.authority)
        if certificates.certificate_key(loaded.certificate) != identity.public_key:
            raise CredentialError("the certificate in these credentials is for another key; make new ones")
        if not statements.is_vouched(loaded.authority_key, identity.peer_id, loaded.word):
            raise CredentialError(certificates.DAMAGED)
        certificates.check_own_time(loaded.certificate)
        loaded.server_context  # noqa: B018  (what OpenSSL cannot read is to be known now)
        return loaded

    @property
    def expires(self) -> datetime.datetime:
        """The time at which the certificate ends, without the tolerance for wrong clocks."""
        return certificates.certificate_end(self.certificate)

    def to_text(self) -> str:
        """The secret line of this member."""
        fields = {
            "run": self.run_id,
            "key": self.identity.private_bytes(),
            "certificate": self.certificate,
            "authority": self.authority,
            "run_key": self.run_key,
            "word": self.word,
        }
        return texts.to_text("member", fields)

    @functools.cached_property
    def authority_key(self) -> Ed25519PublicKey:
        """The public key with which the authority's statements are checked."""
        return certificates.authority_key(self.authority)

    def key_for(self, purpose: bytes) -> bytes:
        """32 bytes derived from the run key: all members get the same."""
        return _derive(self.run_key, b"p2pavg " + purpose)

    @functools.cached_property
    def server_context(self) -> ssl.SSLContext:
        """The TLS context for connections that others open. Made once, as strangers may come in thousands."""
        return self.context(server=True)

    @functools.cached_property
    def client_context(self) -> ssl.SSLContext:
        """The TLS context for connections that this peer opens."""
        return self.context(server=False)

    def context(self, *, server: bool) -> ssl.SSLContext:
        """TLS 1.3, both sides with certificates of this run's authority. Raises CredentialError.

        TLS does not look at the times of certificates: `certificates.check_time` does after the handshake, so
        that both sides can be told of a wrong clock.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # members are known by their keys: see certificates.certificate_key
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= X509_V_FLAG_NO_CHECK_TIME
        if server:
            context.num_tickets = (
                0  # no tickets: a resumed session shows no certificate, which may have ended
            )
        chain = certificates.pem(self.certificate) + self.identity.private_pem()
        try:
            context.load_verify_locations(cadata=self.authority)
            with secret_file(chain) as path:
                context.load_cert_chain(path)
        except ssl.SSLError:  # OpenSSL reads some of them more strictly
            raise CredentialError(certificates.DAMAGED) from None
        return context

    def __repr__(self) -> str:
        return f"Credentials({self.run_id!r}, {self.identity!r})"
