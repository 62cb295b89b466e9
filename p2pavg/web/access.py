"""Who may look at the page: decisions about hosts and tokens. Pure."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from dataclasses import dataclass

from p2pavg.errors import ConfigurationError

TOKEN_BYTES = 16
LEAST_TOKEN = 16  # characters of one that a user chose
COOKIE = "p2pavg_token"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the page is served. token: needed by whoever looks; empty: by nobody."""

    host: str
    port: int
    token: str = ""

    @property
    def url(self) -> str:
        """The address for a browser, with the token where one is needed."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/" + (f"?token={self.token}" if self.token else "")


def place_of(text: str, chosen: str | None) -> Place:
    """The place that "host:port" names; chosen: the user's own token. Raises ConfigurationError."""
    host, colon, port = text.rpartition(":")
    if not host or not colon or not port.isascii() or not port.isdigit() or not int(port[:9]) <= 65535:
        raise ConfigurationError(f"--web takes host:port, such as 127.0.0.1:8033, not {text!r}")
    if chosen and (len(chosen) < LEAST_TOKEN or not chosen.isascii() or not chosen.isalnum()):
        raise ConfigurationError(
            f"P2PAVG_WEB_TOKEN must be {LEAST_TOKEN} letters and digits or more; unset it to get one made"
        )
    host = host.removeprefix("[").removesuffix("]")
    token = chosen or ("" if is_loopback(host) else secrets.token_hex(TOKEN_BYTES))
    return Place(host, int(port), token)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_meant(place: Place, asked: str) -> bool:
    """Whether a request for the host `asked` (the Host header) is meant for this page.

    A page without a token answers to names of loopback alone: else any website could point a name of its own
    here, and read the page from a visitor's browser.
    """
    if place.token:
        return True
    host = (
        asked.rpartition(":")[0] if asked.rpartition(":")[2].isdigit() and not asked.endswith("]") else asked
    )
    host = host.removeprefix("[").removesuffix("]").lower()
    return is_loopback(host) or host == place.host.lower()


def is_allowed(place: Place, given: str | None) -> bool:
    """Whether the token that came with a request opens the page."""
    return not place.token or (
        given is not None and hmac.compare_digest(given.encode("utf-8", "replace"), place.token.encode())
    )
