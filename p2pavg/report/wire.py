"""Wire: bytes as the network carries, and clouds bill, them. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wire:
    """IP bytes: headers, acknowledgements and what was sent again included."""

    sent: int = 0
    received: int = 0
    sent_here: int = 0  # of `sent`: to processes of this machine

    def __add__(self, other: Wire) -> Wire:
        return Wire(self.sent + other.sent, self.received + other.received, self.sent_here + other.sent_here)

    def __sub__(self, other: Wire) -> Wire:
        return Wire(self.sent - other.sent, self.received - other.received, self.sent_here - other.sent_here)


TCP_HEADER, UDP_HEADER = 20, 8


def packet_header(host: str, transport_header: int) -> int:
    """Bytes of headers in a packet to or from a numeric address: of IP, and of TCP or UDP."""
    return transport_header + (40 if ":" in host and not host.startswith("::ffff:") else 20)
