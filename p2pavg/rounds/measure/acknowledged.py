"""Since when what went out on a link has not been acknowledged, or could not go out at all: the other side
may not hear us.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2pavg.transport.engine import StreamStats


class Acknowledged:
    """One link. Heartbeats go out all the time, so on a link that works in this direction something is
    acknowledged all the time, however slowly the rest moves.
    """

    def __init__(self, now: float) -> None:
        self._at = now
        self._open_at = now  # when there last was a stream
        self._streams: dict[int, int] = {}  # stream -> bytes acknowledged, at the last look

    def age(self, now: float, streams: Sequence[StreamStats]) -> float:
        """Seconds since the other side's kernel last acknowledged more of any stream, or nothing was on its
        way to it; or since there was a stream: a control connection alone carries no round.

        Only changes count: what went over a stream before it carried frames is under way, and not in its
        bytes. Where the kernel does not tell what is on its way, the age is always 0.
        """
        before, self._streams = self._streams, {}
        under_way = moved = False
        for stream in streams:
            self._streams[stream.stream] = stream.acked_bytes
            moved |= stream.acked_bytes > before.get(stream.stream, stream.acked_bytes)
            under_way |= stream.unacked_bytes > 0
        if moved or not under_way:
            self._at = now
        if streams:
            self._open_at = now
        return now - min(self._at, self._open_at)
