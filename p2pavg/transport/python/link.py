"""All data streams of one link in the Python engine, with what waits for them and what they have carried."""

from __future__ import annotations

from collections.abc import Sequence

from p2pavg.report.wire import Wire
from p2pavg.transport import tcp_info
from p2pavg.transport.engine import LinkHealth, StreamStats
from p2pavg.transport.python.heartbeat import PeerActivity
from p2pavg.transport.python.outbox import Outbox
from p2pavg.transport.python.stream import Stream


class Link:
    def __init__(self) -> None:
        self.open: dict[int, Stream] = {}
        self.outbox = Outbox()
        self.activity = PeerActivity()
        self._closed_at = 0.0
        self._sent = self._received = 0  # of closed streams
        self._wire = Wire()  # of these, too

    def kick(self) -> None:
        """Let every stream with room ask for a frame."""
        if self.outbox:
            for stream in self.open.values():
                stream.want_to_send()

    def retire(self, stream: Stream) -> None:
        """Remove a closed stream, and keep its counts."""
        self.open.pop(stream.number, None)
        self._sent += stream.bytes_sent
        self._received += stream.bytes_received
        self._wire += stream.wire()
        self._closed_at = max(self._closed_at, stream.last_received_at)

    def traffic(self) -> tuple[int, int]:
        return (
            self._sent + sum(stream.bytes_sent for stream in self.open.values()),
            self._received + sum(stream.bytes_received for stream in self.open.values()),
        )

    def wire(self) -> Wire:
        return sum((stream.wire() for stream in self.open.values()), self._wire)

    def health(self) -> LinkHealth:
        heard = max((stream.last_received_at for stream in self.open.values()), default=0.0)
        return self.activity.health(max(heard, self._closed_at))

    def stats(self) -> Sequence[StreamStats]:
        return [_stats(stream) for stream in self.open.values()]


def _stats(stream: Stream) -> StreamStats:
    info = tcp_info.read(stream.sock)
    return StreamStats(
        stream=stream.number,
        bytes_sent=stream.bytes_sent,
        bytes_received=stream.bytes_received,
        rtt_s=info.rtt_s,
        window_bytes=info.window_bytes,
        delivery_rate_bps=info.delivery_rate_bps,
        unacked_bytes=max(0, tcp_info.queued_bytes(stream.sock) - info.unsent_bytes),
        last_received_at=stream.last_received_at,
        retransmits=info.retransmits,
        unsent_bytes=info.unsent_bytes,
    )
