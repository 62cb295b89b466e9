"""The carrier of a node's datagrams: over one UDP socket and, where UDP does not get through, over TCP."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from p2pavg.membership.table.address import Address, is_loopback
from p2pavg.membership.table.carrying.streams import SYN_BYTES, Streams
from p2pavg.membership.table.carrying.ways import Carriers, Ways
from p2pavg.membership.table.ledger import AddressLedger
from p2pavg.report.wire import UDP_HEADER, Wire, packet_header

MOST_ASKED_TWICE = 512
SHORTEST_GRACE_S = 0.05  # that an answer over UDP may come later than the one over TCP


class Carrier:
    """`udp` and `streams` are there once they are opened."""

    def __init__(self, ledger: AddressLedger, clock: Callable[[], float]) -> None:
        self.bytes_sent = 0
        self.bytes_received = 0
        self.wire = Wire()  # of UDP; whoever opens TCP connections counts those
        self.is_here: Callable[[str], bool] = is_loopback  # whether an address is one of this machine
        self.ways = Ways(clock)
        self.streams: Streams | None = None
        self._ledger = ledger
        self._udp: asyncio.DatagramTransport | None = None
        self._ipv6 = False
        self._asked_twice: OrderedDict[bytes, Address] = OrderedDict()  # by transaction: over both ways

    def opened(self, udp: asyncio.DatagramTransport) -> None:
        """The UDP socket is there."""
        self._udp = udp
        self._ipv6 = len(udp.get_extra_info("sockname")) == 4

    @property
    def is_deaf(self) -> bool:
        """Whether this node has found that UDP is of no use to it."""
        return self.ways.deaf

    def received(self, data: bytes, host: str, *, by_tcp: bool) -> None:
        """Count what came."""
        self.bytes_received += len(data)
        if not by_tcp:
            self.wire += Wire(received=len(data) + packet_header(host, UDP_HEADER))

    def send(self, data: bytes, address: Address) -> bool:
        """Over UDP. Whether it went: not to an address that has not shown that it receives and has had its
        share.
        """
        assert self._udp is not None
        host, port = address
        if ":" not in host:
            host = f"::ffff:{host}" if self._ipv6 else host
        elif not self._ipv6:
            return False  # this node has no IPv6 socket
        if self._udp.is_closing() or not self._ledger.spend(address, len(data)):
            return False
        self.bytes_sent += len(data)
        size = len(data) + packet_header(host, UDP_HEADER)
        self.wire += Wire(sent=size, sent_here=size if self.is_here(address[0]) else 0)
        self._udp.sendto(data, (host, port))
        return True

    def room(self, address: Address) -> float:
        """How many bytes of UDP may go there, so that what opens a connection still may as well."""
        reserved = 0 if self.streams is None or self.streams.has(address) else SYN_BYTES
        return max(0.0, self._ledger.room(address) - reserved)

    def tell(self, data: bytes, address: Address) -> None:
        """Something that asks for no answer."""
        ways = self._ways(address, self.ways.to_tell(address))
        if ways.tcp:
            self._send_by_tcp(data, address)
        else:
            self.send(data, address)

    def ask(self, data: bytes, address: Address, attempt: int, transaction: bytes) -> tuple[bool, bool]:
        """An attempt of a question, 0 for the first: (whether it went over UDP, whether at once)."""
        ways = self._ways(address, self.ways.to_ask(address, attempt))
        if not ways.tcp or self.streams is None:
            by_udp = ways.udp and self.send(data, address)
            return by_udp, by_udp
        at_once, by_tcp = self.streams.has(address), False
        if self.ways.tcp_first:  # where there is not room for both
            by_tcp = self._send_by_tcp(data, address)
        by_udp = ways.udp and self.send(data, address)
        if by_udp:
            self._asked_twice[transaction] = address
            if len(self._asked_twice) > MOST_ASKED_TWICE:
                self._asked_twice.popitem(last=False)
        by_tcp = by_tcp or self._send_by_tcp(data, address)
        return by_udp, (by_tcp and at_once) or by_udp

    def answered_by_udp(self, transaction: bytes, address: Address) -> None:
        """An answer came over UDP, perhaps one that nobody waits for any more since TCP was faster."""
        if self._asked_twice.get(transaction) == address:
            del self._asked_twice[transaction]
            self.ways.by_udp(address)

    def answered_by_tcp(self, transaction: bytes, address: Address, after_s: float) -> None:
        """An answer came over TCP, so long after the question. The one over UDP may be about to come."""
        if self._asked_twice.get(transaction) == address:
            patience = max(SHORTEST_GRACE_S, after_s / 2)
            asyncio.get_running_loop().call_later(patience, self._judge, transaction, address)

    def _judge(self, transaction: bytes, address: Address) -> None:
        if self._asked_twice.pop(transaction, None) == address:
            self.ways.missed(address)

    def _ways(self, address: Address, wanted: Carriers) -> Carriers:
        if self.streams is None:
            return Carriers(udp=True, tcp=False)
        if self.streams.is_only_way(address):
            return Carriers(udp=False, tcp=True)
        return wanted

    def _send_by_tcp(self, data: bytes, address: Address) -> bool:
        if self.streams is None:
            return False
        proved = self._ledger.is_proved(address)
        if not (proved or self.streams.has(address) or self._ledger.spend(address, SYN_BYTES)):
            return False
        sent = self.streams.send(data, address, proved=proved)
        self.bytes_sent += (len(data) + 2) if sent else 0
        return sent

    def close(self) -> None:
        if self._udp is not None:
            self._udp.close()
        if self.streams is not None:
            self.streams.close()
