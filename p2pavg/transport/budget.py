"""How much work others may cause here by what they send.

Two peers that average tiny vectors without a pause send each other 1,300 messages a second, four that do so
400, and those that train less than a hundred. Whoever sends several times as much is out for a while.
"""

from __future__ import annotations

from collections import OrderedDict

from p2pavg.membership.throttle import MAX_SENDERS, Throttle, network_of

MESSAGES_PER_S, MESSAGES_AT_ONCE = 5000.0, 20000.0  # of one peer, over all links that it makes
MESSAGE_BYTES = 1024  # a longer message counts as one for each so many bytes
STREAM_WORK = 50.0  # opening a data stream, in messages
OUT_S = 60.0  # how long a peer stays out that sent more
HANDSHAKES_PER_S, HANDSHAKES_AT_ONCE = 20.0, 256.0  # of one address, or IPv6 network
MAX_LINKS = 512


class Budget:
    """What each peer, and each address, has left of this peer's time. Times are of one monotonic clock."""

    def __init__(self) -> None:
        self._messages = Throttle(rate=MESSAGES_PER_S, burst=MESSAGES_AT_ONCE)
        self._handshakes = Throttle(rate=HANDSHAKES_PER_S, burst=HANDSHAKES_AT_ONCE)
        self._out: OrderedDict[bytes, float] = OrderedDict()  # until when

    def admits_message(self, peer_id: bytes, nbytes: int, now: float) -> bool:
        """Whether a message of so many bytes is read."""
        return self._admits(peer_id, max(1.0, nbytes / MESSAGE_BYTES), now)

    def admits_stream(self, peer_id: bytes, now: float) -> bool:
        """Whether another data stream is opened."""
        return self._admits(peer_id, STREAM_WORK, now)

    def admits_handshake(self, host: str, now: float) -> bool:
        """Whether somebody at this address may try to prove who it is."""
        return self._handshakes.admits(network_of(host), now)

    def is_out(self, peer_id: bytes, now: float) -> bool:
        """Whether a peer spent more than its budget a short while ago."""
        return self._out.get(peer_id, now) > now

    def _admits(self, peer_id: bytes, work: float, now: float) -> bool:
        if self._messages.admits(peer_id, now, work):
            return True
        self._out[peer_id] = now + OUT_S
        self._out.move_to_end(peer_id)
        if len(self._out) > MAX_SENDERS:
            self._out.popitem(last=False)
        return False
