"""The router's counters, and whether it was on time. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

# Upper bounds of the router's lateness buckets, in microseconds; one more follows. As in csrc/lab/router.h.
BOUNDS_US = (50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 1000000)
TOLERATED_SHARE = 0.01
SMALLEST_TOLERANCE_US = 1000.0
TOLERANCE_OF_RTT = 0.01


@dataclass(frozen=True)
class PathCounters:
    """One ordered pair. Packets are MTU-sized; bytes are IP bytes, headers included."""

    sent_packets: int = 0  # packets offered by the sender
    sent_bytes: int = 0
    delivered_packets: int = 0
    delivered_bytes: int = 0
    lost_packets: int = 0  # dropped by the loss rate
    dropped_packets: int = 0  # dropped because a queue was full
    corrupted_packets: int = 0  # delivered with one bit flipped and a right checksum
    cut_packets: int = 0  # dropped because the path, or the flow, was down


@dataclass(frozen=True)
class MappedPort:
    """A port of a gateway that leads to a host behind it."""

    protocol: int  # 6: TCP, 17: UDP, 1: ICMP
    outside_port: int
    inside: str  # address:port
    leased: bool  # whether a host asked for the port by NAT-PMP or PCP
    lease_s: float  # remaining seconds of the lease; 0.0: no lease


@dataclass(frozen=True)
class GatewayStats:
    """The state of a gateway now."""

    external: str
    mappings: tuple[MappedPort, ...]


@dataclass(frozen=True)
class LabStats:
    """The router's counters since it started, or between two moments. Times in seconds."""

    seconds: float
    cpu_s: float
    run_queue_s: float  # seconds in which the router was ready but not running
    kernel_drops: int  # packets that the kernel dropped before the router read them
    write_errors: int
    priority: str  # "fifo" | "nice" | "normal"
    late: tuple[int, ...]  # deliveries by their lateness, in the buckets of BOUNDS_US
    turns: tuple[
        int, ...
    ]  # turns of the router's loop by their length, which bounds a packet's wait to be read
    paths: Mapping[tuple[str, str], PathCounters]
    settings: Mapping[tuple[str, str], Mapping[str, float]]
    gateways: Mapping[str, GatewayStats] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str) -> LabStats:
        document = json.loads(text)
        names = [f.name for f in fields(PathCounters)]
        return cls(
            seconds=document["seconds"],
            cpu_s=document["cpu_s"],
            run_queue_s=document["run_queue_s"],
            kernel_drops=document["kernel_drops"],
            write_errors=document["write_errors"],
            priority=document["priority"],
            late=tuple(document["late"]),
            turns=tuple(document["turns"]),
            paths={
                (path["src"], path["dst"]): PathCounters(**{name: path[name] for name in names})
                for path in document["paths"]
            },
            settings={
                (path["src"], path["dst"]): {
                    key: value
                    for key, value in path.items()
                    if key not in names and key not in ("src", "dst")
                }
                for path in document["paths"]
            },
            gateways={
                gateway["name"]: GatewayStats(
                    gateway["external"], tuple(MappedPort(**mapped) for mapped in gateway["mappings"])
                )
                for gateway in document["gateways"]
            },
        )

    def since(self, earlier: LabStats) -> LabStats:
        """The difference of these counters to `earlier` ones."""
        return LabStats(
            seconds=self.seconds - earlier.seconds,
            cpu_s=self.cpu_s - earlier.cpu_s,
            run_queue_s=self.run_queue_s - earlier.run_queue_s,
            kernel_drops=self.kernel_drops - earlier.kernel_drops,
            write_errors=self.write_errors - earlier.write_errors,
            priority=self.priority,
            late=_minus(self.late, earlier.late),
            turns=_minus(self.turns, earlier.turns),
            paths={
                pair: PathCounters(
                    *(
                        getattr(now, f.name) - getattr(earlier.paths[pair], f.name)
                        for f in fields(PathCounters)
                    )
                )
                for pair, now in self.paths.items()
            },
            settings=self.settings,
            gateways=self.gateways,
        )

    def late_us(self, percent: float) -> float:
        """An upper bound, in microseconds, for the lateness of `percent` % of the deliveries."""
        return bucket_percentile(self.late, percent)

    def void_reason(self, smallest_rtt_ms: float) -> str | None:
        """The reason why a run on this lab proves nothing; None when the router was on time.

        At most 1 % of the deliveries, and of the loop's turns, may be later than 1 ms or 1 % of the shortest
        RTT, whichever is more, and no packet may be lost other than by the topology.
        """
        tolerance = max(SMALLEST_TOLERANCE_US, TOLERANCE_OF_RTT * smallest_rtt_ms * 1e3)
        for counts, what in ((self.late, "deliveries"), (self.turns, "turns of the router's loop")):
            share = share_above(counts, tolerance)
            if share > TOLERATED_SHARE:
                return f"{share:.1%} of the {what} were later than {tolerance / 1e3:.3g} ms"
        if self.kernel_drops:
            return f"the kernel dropped {self.kernel_drops} packets before the router could read them"
        if self.write_errors:
            return f"{self.write_errors} packets could not be handed to their host"
        return None

    def to_json(self, smallest_rtt_ms: float) -> dict[str, Any]:
        """JSON data that every result measured on a lab includes."""
        reason = self.void_reason(smallest_rtt_ms)
        return {
            "seconds": self.seconds,
            "router_cpu_s": self.cpu_s,
            "router_run_queue_s": self.run_queue_s,
            "router_priority": self.priority,
            "late_us_p50": self.late_us(50),
            "late_us_p99": self.late_us(99),
            "late_us_max": self.late_us(100),
            "kernel_drops": self.kernel_drops,
            "void": reason is not None,
            "void_reason": reason,
            "paths": [
                {"src": src, "dst": dst, **vars(counters)} for (src, dst), counters in self.paths.items()
            ],
        }


def _minus(now: Sequence[int], earlier: Sequence[int]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(now, earlier, strict=True))


def bucket_percentile(counts: Sequence[int], percent: float) -> float:
    """The upper bound of the bucket that holds the percentile, in microseconds; 0 without samples."""
    total = sum(counts)
    if total == 0:
        return 0.0
    seen = 0
    for bound, count in zip((*BOUNDS_US, 10 * BOUNDS_US[-1]), counts, strict=True):
        seen += count
        if seen >= total * percent / 100:
            return float(bound)
    return float(10 * BOUNDS_US[-1])


def share_above(counts: Sequence[int], tolerance_us: float) -> float:
    """The share of samples in buckets that lie wholly above `tolerance_us`."""
    total = sum(counts)
    lower_bounds = (0, *BOUNDS_US)
    above = sum(count for lower, count in zip(lower_bounds, counts, strict=True) if lower >= tolerance_us)
    return above / total if total else 0.0
