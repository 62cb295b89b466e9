"""Timeline: what a page was told, kept for a week in bounded memory: the older, the coarser. Pure."""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LEVELS = ((1.0, 900), (10.0, 1080), (60.0, 1440), (600.0, 1008))  # (seconds a point, points): 15 min to 7 d
MOST_SERIES = 320  # of peers; those of peers that are gone make room, and a peer too many gets none
MOST_EVENTS = 2000
MOST_ROUNDS = 2000
DETAILED_ROUNDS = 200  # of which the rows of all members are kept
MOST_POINTS = 700  # of one answer

RUN = (
    "samples_per_second",
    "loss",
    "dollars_per_hour",
    "egress_bytes_per_hour",
    "epoch",
    "memory_bytes",
)
PEER = ("samples_per_second", "upload_bps", "memory_bytes")


class Ring:
    """The last `size` points of one series, each the mean, least and most of `step` seconds."""

    def __init__(self, step: float, size: int) -> None:
        self._step, self._size = step, size
        self._first = 0  # the slot of time of the oldest point
        self._points = array("f")  # mean, least, most; NaN where nothing was told
        self._sum, self._count = 0.0, 0  # of the newest point

    def add(self, at: float, value: float) -> None:
        """Take a value; one that is older than the newest point is left out."""
        slot = int(at // self._step)
        have = len(self._points) // 3
        if not have or slot - self._first - have >= self._size:
            self._first, self._points, have = slot, array("f"), 0
        newest = self._first + have - 1
        if slot < newest:
            return
        if slot > newest:
            self._points.extend([math.nan] * (3 * (slot - newest)))
            self._sum, self._count = 0.0, 0
            surplus = len(self._points) // 3 - self._size
            if surplus > 0:
                del self._points[: 3 * surplus]
                self._first += surplus
        self._sum, self._count = self._sum + value, self._count + 1
        _, least, most = self._points[-3:]
        if self._count == 1:
            least = most = value
        mean = self._sum / self._count
        self._points[-3:] = array("f", (mean, min(least, value), max(most, value)))

    def points(self, begin: float, end: float) -> list[tuple[float, float, float, float]]:
        """(time, mean, least, most) of the points between two times that hold something."""
        found = []
        low = max(0, math.floor(begin / self._step) - self._first)
        high = min(len(self._points) // 3, math.floor(end / self._step) - self._first + 1)
        for place in range(low, high):
            mean, least, most = self._points[3 * place : 3 * place + 3]
            if not math.isnan(mean):
                found.append(((self._first + place) * self._step, mean, least, most))
        return found


class Series:
    """One figure over time, at all levels."""

    def __init__(self) -> None:
        self._rings = [Ring(step, size) for step, size in LEVELS]
        self.fed_at = -math.inf

    def add(self, at: float, value: float) -> None:
        """Take a value."""
        self.fed_at = at
        for ring in self._rings:
            ring.add(at, value)

    def points(self, begin: float, end: float, now: float) -> list[tuple[float, float, float, float]]:
        """As `Ring.points`, of the finest level that reaches back to `begin` in at most MOST_POINTS."""
        for (step, size), ring in zip(LEVELS, self._rings, strict=True):
            if begin >= now - step * (size - 1) and (end - begin) / step <= MOST_POINTS:
                return ring.points(begin, end)
        return self._rings[-1].points(begin, end)


@dataclass(slots=True)
class _Told:
    at: float
    words: str


class Timeline:
    """Figures, rounds and events of one run, from frames: JSON objects, live or read back from a file."""

    def __init__(self) -> None:
        self._run = {name: Series() for name in (*RUN, "peers")}
        self._peers: OrderedDict[tuple[str, str], Series] = OrderedDict()  # the one fed longest ago first
        self._rounds: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._events: OrderedDict[tuple[float, int], _Told] = OrderedDict()
        self._life = 0.0  # when the watch began whose events are numbered
        self._last_number = 0
        self.begin: float | None = None
        self.end = 0.0

    def add(self, frame: Mapping[str, Any]) -> None:
        """Take one second's frame. Raises KeyError, TypeError or ValueError for what is none."""
        at = float(frame["at"])
        if not math.isfinite(at):
            raise ValueError(at)
        for name in RUN:
            _put(self._run[name], at, frame.get(name))
        trains = [peer for peer in frame["peers"] if peer["state"] not in ("gone", "silent")]
        _put(self._run["peers"], at, len(trains))
        for peer in trains:
            for name in PEER:
                series = self._of_peer((str(peer["peer"]), name), at)
                if series is not None:
                    _put(series, at, peer.get(name))
        for one in frame.get("rounds", ()):
            self._round(one)
        self._tell(at, frame.get("events", ()))
        self.begin = at if self.begin is None else min(self.begin, at)
        self.end = max(self.end, at)

    def _of_peer(self, key: tuple[str, str], at: float) -> Series | None:
        """A peer's series; None: there is no room, as all others are fed as well."""
        series = self._peers.get(key)
        if series is None:
            if len(self._peers) >= MOST_SERIES:
                oldest = next(iter(self._peers))
                if self._peers[oldest].fed_at >= at:
                    return None
                del self._peers[oldest]
            series = self._peers[key] = Series()
        self._peers.move_to_end(key)
        return series

    def _round(self, one: Mapping[str, Any]) -> None:
        epoch = int(one["epoch"])
        known = self._rounds.get(epoch)
        if known is not None and len(known.get("peers", ())) > len(one.get("peers", ())):
            return
        self._rounds[epoch] = dict(one)
        if known is None:
            ordered = list(self._rounds)
            if len(ordered) > DETAILED_ROUNDS:
                self._rounds[ordered[-DETAILED_ROUNDS - 1]].pop("peers", None)
            if len(ordered) > MOST_ROUNDS:
                self._rounds.popitem(last=False)

    def _tell(self, at: float, events: Sequence[Mapping[str, Any]]) -> None:
        if events and int(events[-1]["number"]) < self._last_number:
            self._life, self._last_number = at, 0  # another watch, whose numbers begin anew
        for event in events:
            number = int(event["number"])
            self._events[self._life, number] = _Told(float(event["at"]), str(event["words"]))
            self._last_number = max(self._last_number, number)
        while len(self._events) > MOST_EVENTS:
            self._events.popitem(last=False)

    # ---------------------------------------------------------------------------------------- answers

    def figures(self, begin: float, end: float, peer: str = "") -> dict[str, list[list[float]]]:
        """By name, the points of the run, or of one peer: columns of times, means, least and most values."""
        found = {}
        for name in PEER if peer else self._run:
            series = self._peers.get((peer, name)) if peer else self._run[name]
            points = [] if series is None else series.points(begin, end, self.end)
            found[name] = [[point[column] for point in points] for column in range(4)]
        return found

    def rounds(self, begin: float, end: float, most: int = 60) -> list[dict[str, Any]]:
        """The last rounds between two times, oldest first, without the rows of members."""
        inside = [one for one in self._rounds.values() if begin <= one["at"] <= end]
        inside.sort(key=lambda one: one["epoch"])
        return [{name: value for name, value in one.items() if name != "peers"} for one in inside[-most:]]

    def round(self, epoch: int) -> dict[str, Any] | None:
        """One round with the rows of its members, as far as they are kept."""
        return self._rounds.get(epoch)

    def events(self, begin: float, end: float, most: int = 200) -> list[dict[str, Any]]:
        """The last events between two times, oldest first."""
        inside = [told for told in self._events.values() if begin <= told.at <= end]
        inside.sort(key=lambda told: told.at)
        return [{"at": told.at, "words": told.words} for told in inside[-most:]]


def _put(series: Series, at: float, value: Any) -> None:
    """Add a value, unless it is none, or no number that a point holds."""
    if isinstance(value, int | float) and abs(value) < 3e38:
        series.add(at, float(value))
