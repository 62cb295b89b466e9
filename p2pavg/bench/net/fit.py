"""Fits a model to throughputs over stream counts: a window, a rate, and the number of streams to use. Pure.

The model: k streams carry min(k W / RTT, rate), W being the bytes that one stream keeps in flight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from p2pavg.printable import counted

SURELY = 1.1  # streams whose windows would carry this multiple of the rate show that the link limits it
LEAST_S, LEAST_RTTS = 0.1, 6.0  # whichever is longer, a transfer must take to tell a rate
ENOUGH = 0.95  # streams fill a link when they carry this share of its rate
SATURATED_SHARE = 0.8  # below this share of a lone stream's rate, streams compete: the link is full
COLLAPSED_SHARE = 0.7  # below this share of the rate of fewer streams, the step itself failed
APART = 2.5  # a model that is further from a measurement, by this factor, does not describe the link
COLD_RTTS = 10
_LONGEST_SLICES = 12

Samples = Sequence[tuple[float, int]]  # (seconds, bytes received until then), in order


@dataclass(frozen=True)
class Fit:
    """The fitted model. Gb/s are decimal; window_bytes is W. When `filled` is false the rate is only a lower
    bound; when `window_limited` is false one stream fills the link, and W is only a lower bound.
    """

    rtt_s: float
    window_bytes: float
    rate_gbps: float
    best_streams: int
    filled: bool
    window_limited: bool

    def predict(self, streams: int) -> float:
        """Gb/s that so many streams carry by the model."""
        return min(streams * self.one_stream_gbps, self.rate_gbps)

    @property
    def one_stream_gbps(self) -> float:
        return self.window_bytes * 8e-9 / self.rtt_s


def fit(points: Mapping[int, float], rtt_s: float) -> Fit:
    """Fit the model to {streams: Gb/s}. Raises ValueError without a point above zero.

    Each way to part the points into those limited by windows (few streams) and those limited by the link
    (many) is tried; the least squared error of the logarithms wins.
    """
    known = sorted((k, gbps) for k, gbps in points.items() if gbps > 0)
    if not known or rtt_s <= 0:
        raise ValueError("nothing was received, or the round-trip time is unknown")
    candidates = []
    for split in range(len(known) + 1):
        few, many = known[:split], known[split:]
        rate = max(gbps for _, gbps in many or known)  # competition may lower the rate, but never raises it
        one = _geometric_mean([gbps / k for k, gbps in few]) if few else rate / known[0][0]
        error = sum(math.log(min(k * one, rate) / gbps) ** 2 for k, gbps in known)
        candidates.append((error, one, rate))
    _, one, rate = min(candidates, key=lambda candidate: candidate[0])
    best_streams = max(1, math.ceil(round(ENOUGH * rate / one, 6)))
    filled = known[-1][0] * one > SURELY * rate
    return Fit(
        rtt_s=rtt_s,
        window_bytes=one * rtt_s / 8e-9,
        rate_gbps=rate,
        best_streams=best_streams,
        filled=filled,
        window_limited=best_streams > 1 or not filled,
    )


def doubt(points: Mapping[int, float], found: Fit, *, here: bool) -> str | None:
    """Why nothing can be said of what limits the streams; None: the model describes {streams: Gb/s}. here:
    both sides are on one machine.
    """
    if here:
        return "Both sides are on this machine: its processors limit the streams, and no link is measured."
    for streams, gbps in sorted(points.items()):
        expected = found.predict(streams)
        if gbps > 0 and not 1 / APART <= expected / gbps <= APART:
            return (
                f"What limits the streams cannot be judged: {counted(streams, 'stream')} got "
                f"{rate_text(gbps)}, where the other measurements let one expect {rate_text(expected)}; "
                "measure again while nothing else uses the two machines or the link."
            )
    return None


def is_full(points: Mapping[int, float]) -> bool:
    """Whether more streams gain nothing: the last count got clearly less per stream than other counts."""
    per_stream = [gbps / k for k, gbps in sorted(points.items())]
    collapsed = points[max(points)] < COLLAPSED_SHARE * max(points.values())
    return len(per_stream) > 1 and per_stream[-1] < SATURATED_SHARE * max(per_stream) and not collapsed


def warm_gbps(samples: Samples, rtt_s: float, seconds: float) -> float:
    """The steady rate in the last `seconds`: the mean over slices without the fastest and slowest quarter.

    One slice is a whole number of RTTs, for a stream that waits for its window sends in bursts.
    """
    if len(samples) < 2:
        return 0.0
    end = samples[-1][0]
    begin = max(samples[0][0], end - seconds)
    span = end - begin
    if span <= 0:
        return 0.0
    rtts = span / max(rtt_s, 1e-9)
    slices = max(1, min(_LONGEST_SLICES, int(rtts)))
    length = span if rtts < 1 else max(1, int(rtts / slices)) * rtt_s
    edges = [end - length * i for i in range(slices, -1, -1)]
    totals = [bytes_at(samples, edge) for edge in edges]
    rates = sorted(b - a for a, b in pairwise(totals))
    cut = len(rates) // 4
    kept = rates[cut : len(rates) - cut]
    return sum(kept) / len(kept) / length * 8e-9


def is_too_short(seconds: float, rtt_s: float) -> bool:
    """Whether a transfer of so many seconds tells no rate: its bytes came from buffers and first windows."""
    return seconds < max(LEAST_S, LEAST_RTTS * rtt_s)


def cold_gbps(samples: Samples, rtt_s: float) -> float:
    """The mean rate over the first ten RTTs (half a second at least) after the first byte of new streams."""
    started = first_byte(samples)
    if started is None:
        return 0.0
    end = min(samples[-1][0], started + max(0.5, COLD_RTTS * rtt_s))
    return bytes_at(samples, end) * 8e-9 / (end - started) if end > started else 0.0


def active(samples: Samples) -> Samples:
    """The samples until the last byte, as streams that used up their bytes end early."""
    last = next((i for i in range(len(samples) - 1, 0, -1) if samples[i][1] > samples[i - 1][1]), 0)
    return samples[: last + 1]


def waited_share(samples: Samples, nominal_s: float) -> float:
    """The share of the time by which samples, due every `nominal_s`, came late: for want of a CPU."""
    if len(samples) < 2:
        return 0.0
    late = sum(max(0.0, b - a - 2 * nominal_s) for (a, _), (b, _) in pairwise(samples))
    return late / (samples[-1][0] - samples[0][0])


def first_byte(samples: Samples) -> float | None:
    """The time of the last sample before the first byte."""
    before = [at for at, count in samples if count == 0]
    if not samples or samples[-1][1] == 0:
        return None
    return before[-1] if before else samples[0][0]


def seconds_for(samples: Samples, count: int) -> float | None:
    """Seconds from the first byte to the `count`-th; None when it did not come."""
    started = first_byte(samples)
    if started is None or samples[-1][1] < count:
        return None
    for (t0, b0), (t1, b1) in pairwise(samples):
        if b1 >= count:
            return t0 + (t1 - t0) * (count - b0) / (b1 - b0) - started
    return None


def bytes_at(samples: Samples, at: float) -> float:
    """Bytes received until `at`, interpolated linearly."""
    if at <= samples[0][0]:
        return float(samples[0][1])
    for (t0, b0), (t1, b1) in pairwise(samples):
        if t1 >= at:
            return b0 + (b1 - b0) * (at - t0) / (t1 - t0) if t1 > t0 else float(b1)
    return float(samples[-1][1])


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def rate_text(gbps: float) -> str:
    """A rate for people, three digits."""
    for factor, unit in ((1.0, "Gb/s"), (1e3, "Mb/s"), (1e6, "kb/s")):
        if gbps * factor >= 0.9995 or unit == "kb/s":
            return f"{gbps * factor:.3g} {unit}"
    raise AssertionError


def bytes_text(count: float) -> str:
    """A size for people, two or three digits."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.{1 if count < 10 * size else 0}f} {unit}"
    return f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def explain(found: Fit, tried: int) -> str:
    """The fit in one sentence or two. tried: the largest stream count that was measured."""
    one = rate_text(found.one_stream_gbps)
    rtt = seconds_text(found.rtt_s)
    if not found.window_limited:
        return (
            f"One stream fills the link: {rate_text(found.rate_gbps)} over {rtt}; more streams gain nothing."
        )
    text = f"One stream gets {one} because {bytes_text(found.window_bytes)} fit in flight over {rtt}"
    if not found.filled and tried == 1:
        return f"{text}; more streams were not measured."
    if not found.filled:
        return (
            f"{text}; {tried} streams do not fill the link: it carries at least {rate_text(found.rate_gbps)}."
        )
    return f"{text}; {found.best_streams} streams fill the link, which carries {rate_text(found.rate_gbps)}."
