"""The budget of work that other peers may cause here by their messages, streams and handshakes.

Two peers that average tiny vectors without a pause send each other 1,300 messages a second, four that do so
400, and training peers less than a hundred. A peer that sends several times as many is read more slowly.
"""

from __future__ import annotations

from p2pavg.membership.table.throttle import Throttle
from p2pavg.networks import source_of

MESSAGES_PER_S, MESSAGES_AT_ONCE = 5000.0, 20000.0  # messages of one peer, over all links that it makes
MESSAGE_BYTES = 1024  # a longer message counts once for each piece of this size
STREAMS_PER_S, STREAMS_AT_ONCE = 100.0, 400.0  # data streams that one peer opens
HANDSHAKES_PER_S, HANDSHAKES_AT_ONCE = 20.0, 256.0  # handshakes of one source (see p2pavg.networks)
MAX_LINKS = 512


class Budget:
    """The budgets left to each peer and each address. Times are of one monotonic clock."""

    def __init__(self) -> None:
        self._messages = Throttle(rate=MESSAGES_PER_S, burst=MESSAGES_AT_ONCE)
        self._streams = Throttle(rate=STREAMS_PER_S, burst=STREAMS_AT_ONCE)
        self._handshakes = Throttle(rate=HANDSHAKES_PER_S, burst=HANDSHAKES_AT_ONCE)

    def pause_s(self, peer_id: bytes, nbytes: int, now: float) -> float:
        """For how many seconds reading from this peer pauses after a message of `nbytes`."""
        return self._messages.owes(peer_id, now, max(1.0, nbytes / MESSAGE_BYTES))

    def admits_stream(self, peer_id: bytes, now: float) -> bool:
        """Whether the peer may open another data stream now."""
        return self._streams.admits(peer_id, now)

    def admits_handshake(self, host: str, now: float) -> bool:
        """Whether a peer at this address may begin a handshake now."""
        return self._handshakes.admits(source_of(host), now)
