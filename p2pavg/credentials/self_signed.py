"""TLS between two peers of an open run whose words somebody else carries.

The listener shows a certificate that it has signed for itself, and the dialler compares its key with the peer
id that it looks for. The dialler needs none: inside, it signs both sides' nonces and the listener's key, so
whoever stands between the two can neither be the listener nor repeat what a dialler has signed elsewhere.
"""

from __future__ import annotations

import functools
import ssl

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2pavg.credentials import certificates
from p2pavg.credentials.secret_file import secret_file
from p2pavg.identity import Identity


class SelfSigned:
    """The contexts of a peer without credentials."""

    mutual = False

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    @functools.cached_property
    def server_context(self) -> ssl.SSLContext:
        """For connections that others open."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        key = Ed25519PrivateKey.from_private_bytes(self._identity.private_bytes())
        chain = certificates.pem(certificates.self_signed(key)) + self._identity.private_pem()
        with secret_file(chain) as path:
            context.load_cert_chain(path)
        return context

    @functools.cached_property
    def client_context(self) -> ssl.SSLContext:
        """For connections that this peer opens; the key of the certificate is looked at afterwards."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
