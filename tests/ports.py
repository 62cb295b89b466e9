"""Port numbers for what must be told one: all else listens on port 0, and says where."""

from __future__ import annotations

import random
import socket
from pathlib import Path

FIRST = 10000
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A number that no TCP or UDP socket of this machine holds, and that the system gives to nobody who
    asks for any port.
    """
    last = int(EPHEMERAL.read_text().split()[0]) if EPHEMERAL.exists() else 32768
    while True:
        port = random.SystemRandom().randrange(FIRST, last)
        with socket.socket() as stream, socket.socket(type=socket.SOCK_DGRAM) as datagram:
            try:
                stream.bind(("0.0.0.0", port))
                datagram.bind(("0.0.0.0", port))
            except OSError:
                continue
            return port
