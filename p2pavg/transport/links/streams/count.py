"""The number of data streams that a link should have. Pure: measurements in, a number out.

One TCP stream carries W/RTT, where W is the window it gets: what the kernels' buffer limits and the path
allow. So k streams carry min(k W/RTT, the rate of the path), and the useful number is

    k* = ceil(rate RTT / W)

where the rate is the link's share of what the machine has. Before the first transfer rate and W are priors.
Over a path so long that each stream may be held to a rate of its own there are sixteen at least: a stream's
own queue cannot be told from a full path's there, and streams that just fill the path leave it idle whenever
one of them recovers from a loss.

Only a transfer that kept its streams busy measures anything: where some of them have nothing left to send,
more of them, or fewer, carry the same. From the others a search learns the goodput that k streams reach, slow
start included. As long as round trips show no queue, windows are the limit: the number doubles, and stays
doubled if that carried clearly more. The search ends on the least number that carries nearly as much as any
tried: each stream then moves more, and keeps a larger window.

Opening a stream costs round trips, and goodput is noisy: it depends on what else the path carries, and on who
waits for whom. So after a search the number stays. The next one begins when the same number carries much less
for long, or after a quarter of an hour, in case the path has become wider; and every search but the first
makes the next one wait two minutes for each stream that it opened, so that both sides together open less than
one a minute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MOST_SOCKETS = 256  # data sockets of one peer
LEAST_IN_ALL = 4  # over all links: fewer would leave threads of the engine idle

PRIOR_RATE_BPS = 1e9  # bit/s of a machine, all its links together, until measured
PRIOR_WINDOW_BYTES = 2.5e6  # the usual window of a stream in clouds; this machine's limits may be lower
_ANY_RATE_BPS = 2e10  # no path is faster
_CONTINENTS_RTT_S = 0.1  # seconds: a link with at least this round trip joins continents
_CONTINENTS_STREAMS = 16  # the fewest on such a link, where one stream gets at most a tenth of the rate
_HEADROOM = 1.25  # more streams than k*, as streams are not equally fast

_CLEARLY = 1.06  # more streams are worth it when goodput grows by this factor
_NEARLY = 0.97  # a number of streams with this share of the best goodput counts as good as the best
_OTHER_PATH = 0.6  # below this share of its earlier goodput, several times in a row, the path has changed
_OTHER_PATH_TIMES = 8  # transfers in a row
_TRANSFERS = 5  # transfers for each number that a search tries, except in the first search
_REST_S = 120.0  # seconds between searches, for each stream that the last one opened
_TRIAL_S = 900.0  # seconds until another search without a sign that the path has changed
_BUSY = 0.5  # the least busy share of a transfer that counts as a measurement
_QUEUE_S, _QUEUE_RTTS = 0.002, 0.03  # shorter queues are jitter
_SHORT_RTTS = 2.0  # a transfer shorter than that measures nothing


@dataclass(frozen=True, slots=True)
class StreamTransfer:
    """The measurement of one transfer over a link, of the bytes that this side sent."""

    streams: int
    nbytes: int
    seconds: float  # from its first byte to its last
    rtt_s: float  # the shortest round trip known of the link
    busy: float  # share of its samples at which the streams had more to send than their windows held
    queue_s: float = 0.0  # seconds by which round trips were longer under load

    @property
    def goodput_bps(self) -> float:
        return 8.0 * self.nbytes / self.seconds

    @property
    def queued(self) -> bool:
        """Whether bytes waited in a queue, so that the path was the limit and not the windows."""
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

    rtt_s: float  # the shortest round trip known
    window_limit_bytes: float  # the most that this machine's settings allow a stream
    _tried: dict[int, float] = field(default_factory=dict)  # streams: bit/s, in this search
    _settled: int = 0  # streams that the last search settled on; 0: none has ended
    _last: int = 0  # streams of the transfer before
    _worse: int = 0  # transfers in a row that were much worse than the same number once was
    _searching: bool = True
    _seen: int = 0  # transfers over the number that the search tries now
    _opened: int = 0  # streams that this search has opened
    _rest_until: float = -math.inf  # no search begins before
    _trial_at: float = math.inf  # when to search without a sign; infinite before the end of the first search
    _downward: bool = False  # whether the last search began with fewer streams

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
        """The nearest number of streams that the path, and the number of links, allow."""
        least = max(least_streams(links), _CONTINENTS_STREAMS if self.rtt_s >= _CONTINENTS_RTT_S else 1)
        return min(most_streams(links), max(least, streams))

    @property
    def settled(self) -> int:
        """The number that a search ended on; 0: none has."""
        return 0 if self._searching else self._settled

    def begin_with(self, streams: int, now: float) -> None:
        """An earlier run's search ended on this number."""
        self._settled, self._searching, self._trial_at = streams, False, now + _TRIAL_S

    def measured(self, transfer: StreamTransfer, links: int, now: float) -> None:
        """Take the measurement of a transfer that is over. now: seconds of any monotonic clock."""
        streams = transfer.streams
        if self._window / max(transfer.rtt_s, 1e-9) * 8.0 > _ANY_RATE_BPS:
            return  # one stream can fill any path so short
        if transfer.seconds < _SHORT_RTTS * transfer.rtt_s or transfer.nbytes <= 0 or streams <= 0:
            return
        self.rtt_s = transfer.rtt_s
        fresh, self._last = streams != self._last, streams
        if fresh:
            self._seen = 0
            return  # new streams still have to grow their windows
        if transfer.busy < _BUSY:
            return
        self._note(streams, transfer.goodput_bps)
        if not self._searching and now >= self._due_at:
            self._search_anew(streams, transfer.goodput_bps)
        elif self._searching and self._enough_seen():
            self._go_on(streams, transfer.queued)
        else:
            return
        self._settled = self._within(self._settled, links)
        self._opened += max(0, self._settled - streams)
        if not self._searching:
            self._rest(now)

    @property
    def _due_at(self) -> float:
        """The time at which the next search may begin."""
        return self._rest_until if self._worse >= _OTHER_PATH_TIMES else max(self._rest_until, self._trial_at)

    def _note(self, streams: int, goodput: float) -> None:
        old = self._tried.get(streams, goodput)
        if goodput < _OTHER_PATH * old:
            self._worse += 1
            return
        self._worse = 0
        self._tried[streams] = max(goodput, (goodput + old) / 2)  # waiting for others makes goodput less

    def _search_anew(self, streams: int, goodput: float) -> None:
        """Begin a search, with fewer streams where the last one began with more; on a worse path as on a new
        one.
        """
        changed, self._worse = self._worse >= _OTHER_PATH_TIMES, 0
        self._searching, self._seen, self._opened, self._tried = True, 1, 0, {streams: goodput}
        if not changed:
            self._downward = not self._downward
        self._settled = max(1, streams // 2) if self._downward and not changed else streams

    def _enough_seen(self) -> bool:
        self._seen += 1
        return self._seen >= _TRANSFERS or self._trial_at == math.inf

    def _go_on(self, streams: int, queued: bool) -> None:
        fewer = [rate for k, rate in self._tried.items() if k < streams]
        more = any(k > streams for k in self._tried)
        if not (more or queued) and (not fewer or self._tried[streams] >= _CLEARLY * max(fewer)):
            self._settled = 2 * streams
            return
        self._settled = min(k for k, rate in self._tried.items() if rate >= _NEARLY * self.rate_bps)
        self._searching = False

    def _rest(self, now: float) -> None:
        """End a search."""
        if self._trial_at < math.inf:  # the first one's are free
            self._rest_until = now + _REST_S * self._opened
        self._trial_at = now + _TRIAL_S
