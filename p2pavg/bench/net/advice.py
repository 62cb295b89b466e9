"""The kernel's settings that slow a link down, and the values that would help. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from p2pavg.bench.net.fit import Fit, bytes_text, rate_text, seconds_text

LIMITED_SHARE = 0.3  # a limit matters above this share of a stream's busy time
QUEUE_GROWTH = 1.1
SEND_SHARE = 0.75  # a sender's kernel fills this share of its largest buffer with data in flight
RECEIVE_SHARE = 0.5  # a receiver's kernel offers this share of its largest buffer as window
NOTICEABLE = 1.1
FASTER = 1.3  # another congestion control must be faster by this factor, as single measurements are noisy


@dataclass(frozen=True)
class SenderView:
    """Figures of a sending kernel about one stream at full speed, whose program always had more to write."""

    sndbuf_limited: float  # share of samples at which the whole send buffer was in flight
    rwnd_limited: float  # share of the time in which the receiver's window was full
    retransmit_share: float  # retransmitted share of the segments sent
    rtt_growth: float  # round-trip time under its own load / that of an idle link


@dataclass(frozen=True)
class Burst:
    """Seconds for the same bytes over as many streams: over new ones, at full speed, and after a pause."""

    bytes: int
    streams: int
    pause_s: float
    cold_s: float | None
    warm_s: float
    idle_s: float | None


@dataclass(frozen=True)
class Advice:
    """One setting: its place, its value now, and the gain of another value on this link."""

    sysctl: str
    where: str  # "sender" | "receiver"
    now: str
    suggested: str
    gain: str

    def line(self) -> str:
        return f"{self.where}: sysctl -w {self.sysctl}='{self.suggested}' (now {self.now}): {self.gain}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def maximum(triple: str) -> int | None:
    """The last number of tcp_wmem or tcp_rmem."""
    words = triple.split()
    return int(words[-1]) if words and words[-1].isdigit() else None


def why_one_stream_stops(found: Fit, view: SenderView) -> str:
    """The limit of one stream: "link" | "send buffer" | "receive buffer" | "path"."""
    if not found.window_limited:
        return "link"
    if view.rtt_growth > QUEUE_GROWTH:  # there is a queue, in which more data in flight would only wait
        return "path"
    if view.sndbuf_limited >= max(LIMITED_SHARE, view.rwnd_limited):
        return "send buffer"
    if view.rwnd_limited >= LIMITED_SHARE:
        return "receive buffer"
    return "path"


_REASONS = {
    "link": "",
    "send buffer": "What holds one stream back is the sender's largest buffer (net.ipv4.tcp_wmem).",
    "receive buffer": "What holds one stream back is the receiver's largest buffer (net.ipv4.tcp_rmem).",
    "path": "What holds one stream back is the path: loss, or a cap per stream. No buffer size changes that.",
}


def reason_text(reason: str) -> str:
    """The sentence for a reason of why_one_stream_stops(); empty for "link"."""
    return _REASONS[reason]


def advise(
    found: Fit,
    reason: str,
    sender: Mapping[str, str],
    receiver: Mapping[str, str],
    burst: Burst | None,
    congestion: Mapping[str, float],
) -> list[Advice]:
    """Settings that would gain something on this link.

    sender, receiver: sysctl values by name. congestion: one stream's Gb/s by congestion control, the sender's
    own included.
    """
    advice = _buffer_advice(found, sender, receiver) if reason in ("send buffer", "receive buffer") else []
    idle_reset = "net.ipv4.tcp_slow_start_after_idle"
    if (
        burst is not None
        and burst.idle_s is not None
        and sender.get(idle_reset) == "1"
        and burst.idle_s > NOTICEABLE * burst.warm_s
    ):
        gain = (
            f"{bytes_text(burst.bytes)} after a pause of {burst.pause_s:.1f} s could take "
            f"{seconds_text(burst.warm_s)} instead of {seconds_text(burst.idle_s)}"
        )
        advice.append(Advice(idle_reset, "sender", "1", "0", gain))
    advice += _congestion_advice(sender, congestion)
    return advice


def _buffer_advice(found: Fit, sender: Mapping[str, str], receiver: Mapping[str, str]) -> list[Advice]:
    """The largest buffers that are smaller than the bytes in flight of one stream that fills the link."""
    needed = found.rate_gbps / 8e-9 * found.rtt_s
    gain = (
        f"one stream could get {rate_text(found.rate_gbps)}, not {rate_text(found.one_stream_gbps)}; "
        f"{found.best_streams} streams get it without"
    )
    advice: list[Advice] = []
    for name, where, values, usable in (
        ("net.ipv4.tcp_wmem", "sender", sender, SEND_SHARE),
        ("net.ipv4.tcp_rmem", "receiver", receiver, RECEIVE_SHARE),
    ):
        now = values.get(name, "")
        largest = maximum(now)
        if largest is not None and usable * largest < needed:
            words = now.split()
            suggested = f"{words[0]} {words[1]} {_round_up(needed / usable)}"
            advice.append(
                Advice(name, where, now, suggested, gain if not advice else "needed for that as well")
            )
    return advice


def _congestion_advice(sender: Mapping[str, str], congestion: Mapping[str, float]) -> Sequence[Advice]:
    name = "net.ipv4.tcp_congestion_control"
    now = sender.get(name, "")
    others = {other: gbps for other, gbps in congestion.items() if other != now}
    if now not in congestion or not others:
        return []
    best = max(others, key=lambda other: others[other])
    if others[best] <= FASTER * congestion[now]:
        return []
    gain = f"one stream got {rate_text(others[best])} with it, {rate_text(congestion[now])} without"
    return [Advice(name, "sender", now, best, gain)]


def _round_up(count: float) -> int:
    """The next power of two, in bytes."""
    return 1 << max(16, (int(count) - 1).bit_length())
