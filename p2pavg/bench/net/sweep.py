"""The measurement behind `bench net`: its streams, their duration, and its figures."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from p2pavg.bench.machine import tcp_sysctls
from p2pavg.bench.net import advice, fit
from p2pavg.bench.net.advice import Burst, SenderView
from p2pavg.bench.net.protocol import Client, vars_of
from p2pavg.bench.net.streams import SAMPLE_S, Bundle, SendBudget, StreamInfo, stream_info
from p2pavg.errors import P2PAvgError

PINGS = 6
MOST_STREAMS = 64
RAMP_RTTS, RAMP_S = 9, 0.8  # the time in which new streams reach their speed
MEASURE_RTTS, MEASURE_S = 5, 0.8  # whichever is longer
STEPS_PLANNED = 14  # the number of steps among which the bytes are divided
_BURST_S = 1.0
_LOOKS = 20  # samples of a stream's TCP_INFO in one measurement
_STARVED_SHARE = 0.1
_MOST_WAITED = 0.15  # the largest share of a step
_MARGIN_S = 0.5
_OTHERS = ("bbr", "cubic", "reno")


class LinkError(P2PAvgError):
    """No bytes, or too few, arrived."""


@dataclass(frozen=True)
class Limits:
    """The budget of a measurement: wall-clock seconds, and bytes sent in both directions together."""

    seconds: float
    bytes: int


@dataclass(frozen=True)
class Point:
    """One step of a sweep: so many new streams in one direction."""

    streams: int
    gbps: float  # the rate at full speed; 0.0: too few bytes to tell
    cold_gbps: float  # the rate over the first ten RTTs
    loaded_rtt_ms: float  # smoothed RTT of one stream under load
    view: SenderView
    samples: list[tuple[float, int]] = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        return {
            "streams": self.streams,
            "gbps": self.gbps,
            "cold_gbps": self.cold_gbps,
            "loaded_rtt_ms": self.loaded_rtt_ms,
            **vars_of(self.view),
        }


class Sweep:
    """Measures one link from here."""

    def __init__(self, client: Client, limits: Limits) -> None:
        self._client = client
        self._deadline = time.monotonic() + limits.seconds
        self._limits = limits
        self._budget = SendBudget(limits.bytes)
        self._remote_sent = 0
        self.rtt_s = 0.0

    @property
    def sent_bytes(self) -> int:
        """Bytes sent by both sides."""
        return self._limits.bytes - self._budget.left + self._remote_sent

    @property
    def _step_s(self) -> float:
        return max(RAMP_RTTS * self.rtt_s, RAMP_S) + self._measure_s

    @property
    def _measure_s(self) -> float:
        return max(MEASURE_RTTS * self.rtt_s, MEASURE_S)

    def _room(self, steps: float = 1.0) -> bool:
        """Whether time and bytes suffice for so many more steps."""
        needed = steps * (self._step_s + 3 * self.rtt_s) + _MARGIN_S
        return self._deadline - time.monotonic() > needed and self._budget.left - self._remote_sent > 0

    def measure_rtt(self) -> float:
        """The shortest round trip in seconds, of small messages or as measured by the kernel."""
        pings = [self._client.ping() for _ in range(PINGS)]
        kernel = stream_info(self._client.socket).min_rtt_s
        self.rtt_s = min([*pings, kernel] if kernel else pings)
        return self.rtt_s

    def forward(self) -> tuple[list[Point], Burst | None]:
        """1, 2, 4, ... streams from here to there until more gain nothing; the last also after a pause."""
        points: list[Point] = []
        burst = None
        while not burst and (streams := 2 ** len(points)) <= MOST_STREAMS:
            reserve = (
                3.5 if points else 0.0
            )  # steps kept for the way back, both ways, and the congestion control
            if points and not self._room(1 + reserve):
                break
            with self._open(streams) as bundle:
                points.append(self._one_way(bundle, back=False))
                if points[-1].gbps <= 0:
                    break
                seen = {point.streams: point.gbps for point in points}
                last = streams == MOST_STREAMS or not self._room(2 + reserve)
                if (len(points) > 2 and fit.is_full(seen)) or last:
                    burst = self._pause_and_burst(bundle, points[-1])
        return points, burst

    def backward(self, found: fit.Fit | None) -> list[Point]:
        """From there to here: one stream, as many as fill the other way, twice those while that gains."""
        points: list[Point] = []
        streams = 1
        while streams <= MOST_STREAMS and self._room(1 + 2):
            with self._open(streams) as bundle:
                points.append(self._one_way(bundle, back=True))
            if points[-1].gbps <= 0:
                break
            seen = {point.streams: point.gbps for point in points}
            if len(points) > 1 and (fit.is_full(seen) or streams == MOST_STREAMS):
                break
            best = found.best_streams if found is not None else 4
            streams = min(MOST_STREAMS, max(4, best + best // 2) if len(points) == 1 else 2 * streams)
        return points

    def both_ways(self, streams: int) -> dict[str, Any] | None:
        """Both directions of the same streams at once."""
        if not self._room():
            return None
        with self._open(streams) as bundle:
            allowance = self._allowance() // 2
            bundle.send(self._budget, SendBudget(allowance))
            left = int(self._client.ask("send", allowance)["left"])
            time.sleep(self._step_s)
            answer = self._client.ask("samples")
            here = bundle.deliveries()
            self._end(bundle, left)
        return {
            "streams": streams,
            "forward_gbps": self._warm(here),
            "reverse_gbps": self._warm(_pairs(answer["deliveries"])),
        }

    def congestion_controls(self, own: str, own_gbps: float) -> dict[str, float]:
        """Gb/s of one stream by congestion control: the one in use, and another if the kernel permits it."""
        seen = {own: own_gbps}
        for name in _OTHERS:
            if name == own or not self._room():
                continue
            try:
                bundle = self._client.open(1, congestion=name)
            except OSError:
                continue
            with contextlib.closing(bundle):
                seen[name] = self._one_way(bundle, back=False).gbps
            break
        return seen

    @contextlib.contextmanager
    def _open(self, streams: int) -> Iterator[Bundle]:
        try:
            bundle = self._client.open(streams)
        except OSError as error:
            raise LinkError(f"Cannot open {streams} streams to the other side: {error.strerror}.") from None
        with contextlib.closing(bundle):
            yield bundle

    def _one_way(self, bundle: Bundle, *, back: bool) -> Point:
        """One step: let the streams reach their speed, and measure it. Forward streams go on sending
        afterwards.
        """
        if back:
            left = int(self._client.ask("send", self._allowance())["left"])
        else:
            self._client.ask("restart")
            bundle.send(self._budget, SendBudget(self._allowance()))
        time.sleep(self._step_s - self._measure_s)
        infos = []
        for _ in range(_LOOKS):
            time.sleep(self._measure_s / _LOOKS)
            infos.append(bundle.infos()[0])
        there = self._client.ask("samples")
        if back:
            samples, deliveries = bundle.samples(), _pairs(there["deliveries"])
            infos = [StreamInfo(**there["info"])]
            self._end(bundle, left)
        else:
            samples, deliveries = _pairs(there["samples"]), bundle.deliveries()
        return Point(
            streams=len(bundle.sockets),
            gbps=self._warm(deliveries) or self._warm(samples),
            cold_gbps=fit.cold_gbps(samples, self.rtt_s),
            loaded_rtt_ms=infos[-1].rtt_s * 1e3,
            view=_view(infos, self.rtt_s),
            samples=samples,
        )

    def _end(self, bundle: Bundle, left: int) -> dict[str, Any]:
        """Stop both sides, and count the bytes that the other side sent since its budget was `left` bytes."""
        bundle.stop()
        answer = self._client.ask("stop")
        self._remote_sent += left - int(answer["left"])
        return answer

    def _pause_and_burst(self, bundle: Bundle, point: Point) -> Burst | None:
        """Bytes for one second at full speed, after a pause that is longer than a retransmission timeout."""
        bundle.stop()
        count = int(point.gbps * 1e9 / 8 * max(_BURST_S, 2 * self.rtt_s))
        if count == 0 or self._budget.left - self._remote_sent < count:
            return None
        pause = max(0.6, 4 * self.rtt_s)
        time.sleep(pause)
        self._client.ask("restart")
        bundle.send(self._budget, SendBudget(count))
        warm_s = count * 8e-9 / point.gbps
        give_up = time.monotonic() + 4 * warm_s + 10 * self.rtt_s
        samples: list[tuple[float, int]] = []
        while (not samples or samples[-1][1] < count) and time.monotonic() < min(give_up, self._deadline):
            time.sleep(0.1)
            samples = _pairs(self._client.ask("samples")["samples"])
        return Burst(
            bytes=count,
            streams=point.streams,
            pause_s=pause,
            cold_s=fit.seconds_for(point.samples, count),
            warm_s=warm_s,
            idle_s=fit.seconds_for(samples, count),
        )

    def _warm(self, samples: list[tuple[float, int]]) -> float:
        sent = fit.active(samples)
        lasted = sent[-1][0] - sent[0][0] if sent else 0.0
        if not self._client.is_here and fit.is_too_short(lasted, self.rtt_s):
            return 0.0
        return fit.warm_gbps(sent, self.rtt_s, min(self._measure_s, lasted / 2))

    def _allowance(self) -> int:
        """Bytes that one step may send: its share of the budget, so that a fast link leaves bytes for later
        steps.
        """
        return max(0, min(self._limits.bytes // STEPS_PLANNED, self._budget.left - self._remote_sent))


def _view(infos: list[StreamInfo], rtt_s: float) -> SenderView:
    """The limits of one stream while it was sampled, and its retransmissions since it began."""
    first, last = infos[0], infos[-1]
    busy = last.busy_s - first.busy_s
    starved = [info.unsent_bytes < _STARVED_SHARE * info.in_flight_bytes for info in infos]
    return SenderView(
        sndbuf_limited=sum(starved) / len(starved),
        rwnd_limited=(last.rwnd_limited_s - first.rwnd_limited_s) / busy if busy > 0 else 0.0,
        retransmit_share=last.retransmits / last.segments if last.segments else 0.0,
        rtt_growth=sum(info.rtt_s for info in infos) / len(infos) / rtt_s,
    )


def _pairs(samples: list[list[float]]) -> list[tuple[float, int]]:
    return [(float(at), int(count)) for at, count in samples]


def measure(client: Client, limits: Limits) -> dict[str, Any]:
    """Measure a link; returns JSON data. Raises P2PAvgError when nothing comes through."""
    begin = time.monotonic()
    sweep = Sweep(client, limits)
    rtt_s = sweep.measure_rtt()
    sysctls = tcp_sysctls()

    points, burst = sweep.forward()
    found = _fit(points, rtt_s)
    if found is None and any(point.samples and point.samples[-1][1] for point in points):
        raise LinkError(
            f"Too few bytes for a rate: {fit.bytes_text(limits.bytes)} in all are "
            f"{fit.bytes_text(limits.bytes // STEPS_PLANNED)} a step, which were over before the link had "
            "reached its speed; raise --gigabytes on both sides."
        )
    if found is None:
        raise LinkError("The other side answers, but nothing of what was sent arrived; is the link cut?")
    back = sweep.backward(found)
    found_back = _fit(back, rtt_s)
    both = sweep.both_ways(min(MOST_STREAMS, max(1, found.best_streams)))
    own = sysctls.get("net.ipv4.tcp_congestion_control", "")
    congestion = {own: points[0].gbps}
    doubt = fit.doubt(_rates(points), found, here=client.is_here)
    if doubt is None and found.window_limited:
        congestion = sweep.congestion_controls(own, points[0].gbps)

    reason = None if doubt else advice.why_one_stream_stops(found, points[0].view)
    advised = (
        advice.advise(found, reason, sysctls, client.sysctls, burst, congestion) if reason is not None else []
    )
    words = [doubt or fit.explain(found, max(_known(points)))]
    if any(point.gbps <= 0 for point in (*points, *back)):
        words.append(
            "Steps without a rate had too few bytes: they were over before the link had reached its speed; "
            "raise --gigabytes on both sides."
        )
    if reason is not None and advice.reason_text(reason):
        words.append(advice.reason_text(reason))
    if found_back is not None and not client.is_here:
        told = fit.doubt(_rates(back), found_back, here=False) or fit.explain(found_back, max(_known(back)))
        words.append(f"The other way: {told}")
    waited = max(fit.waited_share(point.samples, SAMPLE_S) for point in (*points, *back))
    void = f"the measurement waited for a CPU {waited:.0%} of a step" if waited > _MOST_WAITED else None
    return {
        "rtt_ms": rtt_s * 1e3,
        **_fit_json(found),
        "sweep": [point.to_json() for point in points],
        "reverse": {
            "sweep": [point.to_json() for point in back],
            **(_fit_json(found_back) if found_back else {}),
        },
        "both": both,
        "burst": vars_of(burst) if burst else None,
        "one_stream_limited_by": reason,
        "doubt": doubt,
        "congestion_controls": congestion,
        "advice": [one.to_json() for one in advised],
        "advice_lines": [one.line() for one in advised],
        "words": words,
        "cpu_wait_share": waited,
        "void_reason": void,
        "sysctls": {"here": sysctls, "there": client.sysctls},
        "seconds": time.monotonic() - begin,
        "bytes_sent": sweep.sent_bytes,
        "limits": {"seconds": limits.seconds, "bytes": limits.bytes},
    }


def _known(points: list[Point]) -> list[int]:
    """The stream counts of steps that told a rate."""
    return [point.streams for point in points if point.gbps > 0]


def _rates(points: list[Point]) -> Mapping[int, float]:
    return {point.streams: point.gbps for point in points}


def _fit(points: list[Point], rtt_s: float) -> fit.Fit | None:
    seen = _rates(points)
    return fit.fit(seen, rtt_s) if any(gbps > 0 for gbps in seen.values()) else None


def _fit_json(found: fit.Fit) -> dict[str, Any]:
    return {
        "window_bytes": found.window_bytes,
        "rate_gbps": found.rate_gbps,
        "best_streams": found.best_streams,
        "one_stream_gbps": found.one_stream_gbps,
        "filled": found.filled,
        "window_limited": found.window_limited,
    }
