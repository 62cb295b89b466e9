"""Credentials of a run: who may take part, and the keys that its traffic is protected with.

May import the floors below it, `identity` above all. Start reading at docs/security.md, then `members`.
"""

from __future__ import annotations

from p2pavg.credentials.certificates import certificate_key, check_time
from p2pavg.credentials.environment import from_environment
from p2pavg.credentials.members import (
    DEFAULT_LIFETIME,
    Authority,
    Credentials,
    accept,
    new_request,
    new_secret,
    request_again,
)
from p2pavg.credentials.self_signed import SelfSigned

Tls = Credentials | SelfSigned  # whose TLS contexts a connection may use

__all__ = [
    "DEFAULT_LIFETIME",
    "Authority",
    "Credentials",
    "SelfSigned",
    "Tls",
    "accept",
    "certificate_key",
    "check_time",
    "from_environment",
    "new_request",
    "new_secret",
    "request_again",
]
