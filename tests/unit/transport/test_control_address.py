"""Where a control connection ends on this machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from p2pavg.transport.links.control import ControlConnection


@pytest.mark.parametrize(
    ("name", "host"),
    [
        (("::ffff:10.77.0.1", 31330, 0, 0), "10.77.0.1"),
        (("10.77.0.1", 31330), "10.77.0.1"),
        (("fd00::7", 31330, 0, 0), "fd00::7"),
        (None, ""),
    ],
)
def test_one_address_has_one_form(name: Any, host: str) -> None:
    """IPv4 at a socket of both families is told as IPv4, so that no address seems to change."""
    transport: Any = SimpleNamespace(
        get_extra_info=lambda what: name, set_write_buffer_limits=lambda high: None
    )
    connection = ControlConnection()
    connection.connection_made(transport)
    transport.get_extra_info = None  # as of a TLS connection that has ended
    assert connection.local_host == host
