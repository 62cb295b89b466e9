"""Heartbeats of the Python engine: the state that it sends to others, and the state that others sent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from p2pavg.transport.engine import LinkHealth
from p2pavg.transport.frames import HEARTBEAT_BYTES, NO_ANSWER, Heartbeat, Kind

ANSWER_S = 1.0


class OwnActivity:
    """When this process's event loop and training thread were last seen."""

    def __init__(self) -> None:
        self.loop_at = time.monotonic()
        self.trainer_at = -math.inf

    def beat(self, stamp: int) -> bytes:
        now = time.monotonic()
        return Heartbeat(stamp, max(0.0, now - self.loop_at), max(0.0, now - self.trainer_at)).pack()


class PeerActivity:
    """The state of the other side, by its heartbeats."""

    def __init__(self) -> None:
        self._rtt_s = 0.0
        self._loop_age_s = math.inf
        self._trainer_age_s = math.inf
        self._pinged_at = self._asked_at = -math.inf

    def stamp(self, unsent: bool) -> int:
        """Of the next PING. It asks for an answer when no PING of the other side came for a second, and each
        second for the round trip: where both sides send PINGs, answering each would double them.

        unsent: a PING that asks waits to be sent, which this one replaces: this one asks, too.
        """
        now = time.monotonic_ns()
        if 1e-9 * now - min(self._asked_at, self._pinged_at) < ANSWER_S:
            return now if unsent else NO_ANSWER
        self._asked_at = 1e-9 * now
        return now

    def heard(self, beat: Heartbeat, kind: Kind) -> None:
        self._loop_age_s = beat.loop_age_s
        self._trainer_age_s = beat.trainer_age_s
        if kind is Kind.PING:
            self._pinged_at = time.monotonic()
        else:
            rtt = max(0.0, (time.monotonic_ns() - beat.stamp) / 1e9)
            self._rtt_s = rtt if self._rtt_s == 0.0 else self._rtt_s + (rtt - self._rtt_s) / 8

    def health(self, last_heard_at: float) -> LinkHealth:
        return LinkHealth(last_heard_at, self._rtt_s, self._loop_age_s, self._trainer_age_s)


class HeartbeatBuffer:
    def __init__(self, kind: Kind, heard: Callable[[Kind, Heartbeat], None]) -> None:
        self.view = memoryview(bytearray(HEARTBEAT_BYTES))
        self._kind = kind
        self._heard = heard

    def landed(self, crc: int) -> None:
        self._heard(self._kind, Heartbeat.parse(self.view))

    def lost(self) -> None:
        pass
