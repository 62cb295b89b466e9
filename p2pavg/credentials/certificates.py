"""The X.509 certificates of a run: its authority's, and one for each member's own Ed25519 key."""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import NameOID

from p2pavg.errors import CredentialError
from p2pavg.identity import peer_id_of

BEGINS_EARLIER = datetime.timedelta(days=1)  # than it was made: clocks of members are wrong by hours
ENDS_LATER = datetime.timedelta(minutes=10)  # than was promised
AUTHORITY_LIFETIME = datetime.timedelta(days=3650)
URI_PREFIX = "p2pavg:"
DAMAGED = "the certificates in these credentials are damaged; make new ones"


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def now() -> datetime.datetime:
    """The time by this machine's clock, to the second, UTC."""
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)


def authority_certificate(key: Ed25519PrivateKey, run_id: str, start: datetime.datetime) -> bytes:
    """DER of the certificate that an authority signs for itself."""
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(run_id))
        .issuer_name(_name(run_id))
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(start - BEGINS_EARLIER)
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


def member_certificate(
    authority_key: Ed25519PrivateKey, authority: bytes, public_key: bytes, lifetime: datetime.timedelta
) -> bytes:
    """DER of a member's certificate. authority: its issuer's, DER; public_key: the member's, 32 bytes."""
    issuer = x509.load_der_x509_certificate(authority)
    start = now()
    peer_id = peer_id_of(public_key)
    subject = Ed25519PublicKey.from_public_bytes(public_key)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(peer_id.hex()))
        .issuer_name(issuer.subject)
        .public_key(subject)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - BEGINS_EARLIER)
        .not_valid_after(start + lifetime + ENDS_LATER)
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


def self_signed(key: Ed25519PrivateKey) -> bytes:
    """DER of a certificate that a peer of an open run signs for itself: it shows whose key this is."""
    peer_id = peer_id_of(key.public_key().public_bytes_raw())
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(peer_id.hex()))
        .issuer_name(_name(peer_id.hex()))
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(URI_PREFIX + peer_id.hex())]),
            critical=True,
        )
    )
    return builder.sign(key, None).public_bytes(serialization.Encoding.DER)


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


def authority_key(authority: bytes) -> Ed25519PublicKey:
    """The key of an authority's certificate. Raises CredentialError for a certificate of another shape."""
    try:
        key = x509.load_der_x509_certificate(authority).public_key()
    except _BAD_CERTIFICATE:
        raise CredentialError(DAMAGED) from None
    if not isinstance(key, Ed25519PublicKey):
        raise CredentialError(DAMAGED)
    return key


def check_issued(certificate: bytes, authority: bytes) -> None:
    """Raises CredentialError unless the authority signed the certificate."""
    try:
        issuer = x509.load_der_x509_certificate(authority)
        x509.load_der_x509_certificate(certificate).verify_directly_issued_by(issuer)
    except (*_BAD_CERTIFICATE, InvalidSignature):
        raise CredentialError(DAMAGED) from None


def check_time(certificate: bytes) -> None:
    """Raises CredentialError when the certificate is not valid now, by this machine's clock."""
    parsed = x509.load_der_x509_certificate(certificate)
    begin, end, clock = parsed.not_valid_before_utc, parsed.not_valid_after_utc, now()
    if not begin <= clock <= end:
        begin, end = begin + BEGINS_EARLIER, end - ENDS_LATER
        raise CredentialError(
            f"a member's certificate holds from {_time(begin)} to {_time(end)}, and the clock of the machine "
            f"that looked at it says {_time(clock)}; set that clock right, or make new credentials"
        )


def _time(moment: datetime.datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def check_own_time(certificate: bytes) -> None:
    """`check_time` for this peer's own certificate: the CredentialError says what to do on this machine."""
    parsed, clock = x509.load_der_x509_certificate(certificate), now()
    if clock > parsed.not_valid_after_utc:
        raise CredentialError(
            f"these credentials expired at {_time(parsed.not_valid_after_utc - ENDS_LATER)}, and this "
            f"machine's clock says {_time(clock)}; ask for a new invitation, or set the clock right"
        )
    if clock < parsed.not_valid_before_utc:
        raise CredentialError(
            f"these credentials hold from {_time(parsed.not_valid_before_utc + BEGINS_EARLIER)} on, and "
            f"this machine's clock says {_time(clock)}; set the clock right"
        )


def certificate_end(certificate: bytes) -> datetime.datetime:
    """The time at which a member's certificate ends, without the tolerance for wrong clocks."""
    try:
        return x509.load_der_x509_certificate(certificate).not_valid_after_utc - ENDS_LATER
    except _BAD_CERTIFICATE:
        raise CredentialError("a certificate is not one of a p2pavg member") from None


def pem(certificate: bytes) -> bytes:
    """The certificate in PEM, which Python's ssl reads."""
    return x509.load_der_x509_certificate(certificate).public_bytes(serialization.Encoding.PEM)
