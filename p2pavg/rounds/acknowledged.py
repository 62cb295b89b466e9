"""Since when what went out on a link has not been acknowledged: the other side may not hear us."""

from __future__ import annotations

from collections.abc import Iterable

from p2pavg.transport.engine import StreamStats


class Acknowledged:
    """One link. Heartbeats go out all the time, so on a link that works in this direction something is
    acknowledged all the time, however slowly the rest moves.
    """

    def __init__(self, now: float) -> None:
        self._at = now
        self._bytes = 0

    def age(self, now: float, sent: int, streams: Iterable[StreamStats]) -> float:
        """Seconds since the other side's kernel last acknowledged more, or nothing was on its way to it.

        sent: bytes over all streams that the link ever had. Where the kernel does not tell what is on its
        way, the age is always 0.
        """
        under_way = unsent = 0
        for stream in streams:
            under_way += stream.unacked_bytes
            unsent += stream.unsent_bytes
        acknowledged = sent - under_way - unsent
        if acknowledged > self._bytes or not under_way:
            self._at = now
        self._bytes = max(self._bytes, acknowledged)
        return now - self._at
