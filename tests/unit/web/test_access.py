"""Who may look at the page."""

from __future__ import annotations

import pytest

from p2pavg.errors import ConfigurationError
from p2pavg.web.access import Place, is_allowed, is_meant, place_of


@pytest.mark.parametrize("text", ["127.0.0.1:8033", "[::1]:8033", "localhost:8033", "127.8.8.8:1"])
def test_on_loopback_no_token_is_needed(text: str) -> None:
    """Whoever can reach the page is on this machine."""
    place = place_of(text, None)
    assert place.token == ""
    assert "token" not in place.url
    assert is_allowed(place, None)


@pytest.mark.parametrize(
    "text", ["0.0.0.0:8033", "192.0.2.1:8033", "[::]:8033", "example.org:80", "127.0.0.1.example.org:1"]
)
def test_elsewhere_a_token_is_made(text: str) -> None:
    """An address that others can reach has a long token, another one each time."""
    place, other = place_of(text, None), place_of(text, None)
    assert len(place.token) >= 32
    assert place.token != other.token
    assert place.url.endswith(f"/?token={place.token}")
    assert is_allowed(place, place.token)
    for given in (None, "", place.token[:-1], other.token, "\u00e9", "\ud800"):
        assert not is_allowed(place, given)


def test_a_token_of_ones_own() -> None:
    """The user's token counts on loopback too; a short or strange one is refused."""
    assert place_of("127.0.0.1:1", "abcdefgh12345678").token == "abcdefgh12345678"
    for chosen in ("short", "x" * 20 + "&", "\u00e9" * 20):
        with pytest.raises(ConfigurationError, match="P2PAVG_WEB_TOKEN"):
            place_of("127.0.0.1:1", chosen)


@pytest.mark.parametrize(
    "text", ["8033", ":8033", "host", "host:", "host:x", "host:70000", "host:-1", "host:\u0661"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    """One sentence, with an example."""
    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1:8033"):
        place_of(text, None)


def test_other_names_of_this_machine_get_no_page() -> None:
    """A website that points a name of its own at loopback cannot read the page in a visitor's browser."""
    place = Place("127.0.0.1", 8033)
    for host in ("127.0.0.1:8033", "localhost:8033", "localhost", "[::1]:8033", "[::1]"):
        assert is_meant(place, host)
    for host in ("evil.example:8033", "evil.example", "127.0.0.1.evil.example:8033", "", "192.0.2.1:8033"):
        assert not is_meant(place, host)
    assert is_meant(Place("0.0.0.0", 8033, "secret"), "any.example:8033")
