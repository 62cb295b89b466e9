"""What members tell a watcher, taken apart strictly: whatever is malformed is None. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from p2pavg.identity import PEER_ID_BYTES
from p2pavg.printable import printable
from p2pavg.report.distance import Distance

MOST_ROWS = 1024
MOST_TEXT = 400
MOST = 10**15
_DISTANCES = tuple(Distance)


@dataclass(frozen=True, slots=True)
class Other:
    """A peer as another one sees it."""

    peer: bytes
    epoch: int
    samples: int
    rate: float
    silent: bool


@dataclass(frozen=True, slots=True)
class LinkSeen:
    """A link as one of its ends measures it; bytes since its last report."""

    peer: bytes
    distance: Distance
    rtt_s: float
    streams: int
    rate_bps: float
    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True, slots=True)
class Status:
    """Where a member says that it stands."""

    epoch: int
    target: int
    samples: int
    counted: int | None  # by the leader: all peers' samples of the epoch
    rate: float
    state: str
    leader: bytes
    total: int
    region: str
    peers: tuple[Other, ...]
    links: tuple[LinkSeen, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """Something happened in a member's rounds."""

    kind: str
    epoch: int
    peer: bytes | None
    why: str
    number: int  # contributors of a round, or the epoch of a state; by kind
    final: bool
    attempt: int = 0


class _Malformed(Exception):
    pass


def status(message: Mapping[str, Any]) -> Status | None:
    """From {"t": "status", ...}."""
    try:
        return Status(
            _count(message.get("epoch")),
            _count(message.get("target")),
            _count(message.get("samples")),
            None if message.get("counted") is None else _count(message.get("counted")),
            _number(message.get("rate")),
            _text(message.get("state")),
            _leader(message.get("leader")),
            _count(message.get("total")),
            _text(message.get("region")),
            tuple(_other(row) for row in _rows(message.get("peers"))),
            tuple(_link(row) for row in _rows(message.get("links"))),
        )
    except _Malformed:
        return None


def event(message: Mapping[str, Any]) -> Told | None:
    """From {"t": "event", "kind": ..., "fields": {...}}."""
    fields = message.get("fields")
    try:
        if not isinstance(fields, dict):
            return None
        peer = fields.get("peer", fields.get("leader"))
        number = fields.get("contributors", fields.get("to", 0))
        return Told(
            _text(message.get("kind")),
            _count(fields.get("epoch")),
            None if peer is None else _peer(peer),
            _text(fields.get("why", "")),
            _count(number),
            fields.get("final") is True,
            _count(fields.get("attempt", 0)),
        )
    except _Malformed:
        return None


def _rows(value: object) -> list[Any]:
    if not isinstance(value, list) or len(value) > MOST_ROWS:
        raise _Malformed
    return value


def _other(row: object) -> Other:
    if not isinstance(row, list) or len(row) < 5:
        raise _Malformed
    return Other(_peer(row[0]), _count(row[1]), _count(row[2]), _number(row[3]), row[4] is True)


def _link(row: object) -> LinkSeen:
    if not isinstance(row, list) or len(row) < 7 or _count(row[1]) >= len(_DISTANCES):
        raise _Malformed
    peer, distance, rtt, streams, rate, sent, received = row[:7]
    return LinkSeen(
        _peer(peer),
        _DISTANCES[distance],
        _number(rtt),
        _count(streams),
        _number(rate),
        _count(sent),
        _count(received),
    )


def _peer(value: object) -> bytes:
    if not isinstance(value, bytes) or len(value) != PEER_ID_BYTES:
        raise _Malformed
    return value


def _leader(value: object) -> bytes:
    return b"" if value == b"" else _peer(value)


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < MOST:
        raise _Malformed
    return value


def _number(value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < MOST:
        raise _Malformed
    return float(value) if value * MOST > 1 else 0.0  # or what is divided by it overflows


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > MOST_TEXT:
        raise _Malformed
    return printable(value)
