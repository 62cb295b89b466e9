"""What can go wrong, in one tree. Every message is one sentence that says what to do next."""

from __future__ import annotations


class P2PAvgError(Exception):
    """Root of everything that p2pavg raises on purpose."""


class ConfigurationError(P2PAvgError, ValueError):
    """An argument, file or address that cannot work; the message names the fix."""


class IdentityInUseError(ConfigurationError):
    """Another live process has this peer's identity; every process needs its own.

    Args:
        text: the message.
        since: when that process began, in nanoseconds of its wall clock; 0: unknown.
    """

    def __init__(self, text: str, since: int = 0) -> None:
        super().__init__(text)
        self.since = since


class UnreachableError(P2PAvgError, ConnectionError):
    """None of the named peers answered."""


class AddressInUseError(P2PAvgError, OSError):
    """A port that was asked for explicitly is taken."""


class IncompatiblePeerError(P2PAvgError):
    """The swarm trains another model, or speaks another version."""


class CredentialError(P2PAvgError):
    """Credentials are missing, expired, or of another run."""


class ProtocolError(P2PAvgError):
    """A peer sent bytes that no correct peer sends; its connection is closed."""


class RoundFailedError(P2PAvgError):
    """An averaging round failed for good; the message names who failed."""


class StateError(P2PAvgError):
    """A snapshot could not be taken, downloaded, verified or applied."""


class InternalError(P2PAvgError):
    """Something in p2pavg failed that should not; the message says how to go on, the cause is what failed."""


class ClosedError(P2PAvgError):
    """The peer was closed."""
