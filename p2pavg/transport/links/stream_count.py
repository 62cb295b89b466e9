"""How many data streams a link should have. Pure: measurements in, a number out.

One TCP stream carries W/RTT, where W is the window it gets: what the kernels' buffer limits and the path
allow. So k streams carry min(k W/RTT, the rate of the path), and the useful number is

    k* = ceil(rate RTT / W)

where the rate is the link's share of what the machine has. Before the first transfer rate and W are priors.
Over a path so long that each stream may be held to a rate of its own there are sixteen at least: a stream's
own queue cannot be told from a full path's there, and streams that just fill the path leave it idle whenever
one of them recovers from a loss.

Every transfer measures the goodput that k streams reached, slow start included. As long as round trips
show no queue, windows are the limit: the number doubles, and stays doubled if that carried clearly more. It
settles on the least number that carries nearly as much as any tried (each stream then moves more, and keeps a
larger window), and now and then tries its neighbours again, in case the path has changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MOST_SOCKETS = 256  # data sockets of one peer
LEAST_IN_ALL = 4  # fewer would leave the threads that serve them idle

PRIOR_RATE_BPS = 1e9  # bit/s of a machine, all its links together, until measured
PRIOR_WINDOW_BYTES = 2.5e6  # what clouds give a stream; this machine's own limits may allow less
_ANY_RATE_BPS = 2e10  # no path is faster
_LONG_PATH_S, _LONG_PATH_STREAMS = 0.1, 16  # round trip; between continents one stream gets a tenth at most
_HEADROOM = 1.25  # streams are not all equally fast

_CLEARLY = 1.06  # this much more goodput makes more streams worth it
_NEARLY = 0.97  # and this share of the best is as good as the best
_CHANGED = 0.6  # goodput below this share of what the same number reached, this often in a row: another path
_CHANGED_TIMES = 3
_PATIENCE = (8, 128)  # transfers between trials of a neighbour: at first, and at most
_QUEUE_S, _QUEUE_RTTS = 0.002, 0.03  # shorter queues are jitter
_SHORT_RTTS = 2.0  # a transfer shorter than that measures nothing


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one transfer over a link measured, in the direction in which more was moved."""

    streams: int
    nbytes: int
    seconds: float  # from its first byte to its last
    rtt_s: float  # the least known of the link
    queue_s: float = 0.0  # how much longer round trips were under load

    @property
    def goodput_bps(self) -> float:
        return 8.0 * self.nbytes / self.seconds

    @property
    def queued(self) -> bool:
        """Bytes waited in a queue: not the windows were the limit, but the path."""
        return self.queue_s > max(_QUEUE_S, _QUEUE_RTTS * self.rtt_s)


def most_streams(links: int) -> int:
    """A link's share of the sockets that one peer may have."""
    return max(1, MOST_SOCKETS // max(1, links))


def least_streams(links: int) -> int:
    return max(1, -(-LEAST_IN_ALL // max(1, links)))


def useful_streams(rate_bps: float, rtt_s: float, window_bytes: float) -> int:
    """k* = ceil(rate RTT / W), with some headroom."""
    return max(1, math.ceil(_HEADROOM * rate_bps / 8.0 * rtt_s / window_bytes))


@dataclass(slots=True)
class StreamCount:
    """The number of streams of one link."""

    rtt_s: float  # the least known
    window_limit_bytes: float  # the most that this machine's settings allow a stream
    _tried: dict[int, float] = field(default_factory=dict)  # streams: bit/s
    _settled: int = 0  # 0: not yet
    _last: int = 0  # streams of the transfer before
    _worse: int = 0  # transfers in a row that were much worse than the same number once was
    _patience: int = _PATIENCE[0]
    _quiet: int = 0  # transfers since the last trial
    _downward: bool = False  # the last trial

    @property
    def rate_bps(self) -> float:
        """The best goodput measured; 0.0 before the first measurement."""
        return max(self._tried.values(), default=0.0)

    @property
    def window_bytes(self) -> float:
        """W of one stream: the best measured, else the prior."""
        measured = max((rate / 8.0 / k * self.rtt_s for k, rate in self._tried.items()), default=0.0)
        return measured or self._window

    @property
    def _window(self) -> float:
        return min(PRIOR_WINDOW_BYTES, self.window_limit_bytes)

    def wanted(self, links: int) -> int:
        """How many streams this link should have, while the peer has `links` links."""
        if self._settled:
            return self._within(self._settled, links)
        rate = PRIOR_RATE_BPS / max(1, links)
        return self._within(useful_streams(rate, self.rtt_s, self._window), links)

    def _within(self, streams: int, links: int) -> int:
        """The nearest number that such a path, and so many links, allow."""
        least = max(least_streams(links), _LONG_PATH_STREAMS if self.rtt_s >= _LONG_PATH_S else 1)
        return min(most_streams(links), max(least, streams))

    def measured(self, transfer: Transfer, links: int) -> None:
        """A transfer over this link is over."""
        now = transfer.streams
        if self._window / max(transfer.rtt_s, 1e-9) * 8.0 > _ANY_RATE_BPS:
            return  # one stream can fill any path so short
        if transfer.seconds < _SHORT_RTTS * transfer.rtt_s or transfer.nbytes <= 0 or now <= 0:
            return
        self.rtt_s = transfer.rtt_s
        fresh, self._last = now != self._last, now
        if fresh:
            return  # new streams still have to grow their windows
        self._note(now, transfer.goodput_bps)
        self._settled = self._within(self._choose(now, transfer.queued), links)

    def _note(self, streams: int, goodput: float) -> None:
        old = self._tried.get(streams, goodput)
        if goodput < _CHANGED * old:
            self._worse += 1
            if self._worse >= _CHANGED_TIMES:
                self._tried = {streams: goodput}
                self._worse, self._patience = 0, _PATIENCE[0]
            return
        self._worse = 0
        self._tried[streams] = max(goodput, (goodput + old) / 2)  # waiting for others makes goodput less

    def _choose(self, now: int, queued: bool) -> int:
        fewer = [rate for k, rate in self._tried.items() if k < now]
        more = any(k > now for k in self._tried)
        if not (more or queued) and (not fewer or self._tried[now] >= _CLEARLY * max(fewer)):
            return 2 * now
        enough = min(k for k, rate in self._tried.items() if rate >= _NEARLY * self.rate_bps)
        if enough != now:
            self._quiet = 0
            return enough
        self._quiet += 1
        return now if self._quiet < self._patience else self._trial(now)

    def _trial(self, now: int) -> int:
        self._quiet = 0
        self._patience = min(2 * self._patience, _PATIENCE[1])
        self._downward = not self._downward
        neighbour = max(1, now // 2) if self._downward else 2 * now
        self._tried.pop(neighbour, None)
        return neighbour
