"""Status: where a member says that it stands, once a second to its watchers. Written and read here. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any

from p2pavg.report.distance import Distance
from p2pavg.report.parsing import (
    Malformed,
    count,
    float_or_none,
    number,
    peer_id,
    peer_id_or_none,
    rows,
    text,
)

_DISTANCES = tuple(Distance)


@dataclass(frozen=True, slots=True)
class Other:
    """A peer as another one sees it; a row of `Status.peers`."""

    peer: bytes
    epoch: int
    samples: int
    rate: float
    silent: bool

    @classmethod
    def from_row(cls, row: list[Any]) -> Other:
        """Raises Malformed."""
        peer, epoch, samples, rate, silent = row
        return cls(peer_id(peer), count(epoch), count(samples), number(rate), silent is True)


@dataclass(frozen=True, slots=True)
class LinkSeen:
    """A link as one of its ends measures it, IP bytes of its last report; a row of `Status.links`."""

    peer: bytes
    distance: Distance  # by its place in the enum
    rtt_s: float
    streams: int
    rate_bps: float
    bytes_sent: int
    bytes_received: int

    @classmethod
    def from_row(cls, row: list[Any]) -> LinkSeen:
        """Raises Malformed."""
        peer, distance, rtt, streams, rate, sent, received = row
        if count(distance) >= len(_DISTANCES):
            raise Malformed
        return cls(
            peer_id(peer),
            _DISTANCES[distance],
            number(rtt),
            count(streams),
            number(rate),
            count(sent),
            count(received),
        )


@dataclass(frozen=True, slots=True)
class Status:
    """The fields of the message, by name; rows are lists in the order of their class's fields."""

    epoch: int
    target: int
    samples: int
    counted: int | None  # by the leader: all peers' samples of the epoch
    rate: float
    state: str  # computing, waiting, averaging, updating or downloading
    leader: bytes  # empty: nobody
    total: int
    region: str
    relayed: int  # bytes passed on so far for peers that have no way to each other
    peers: tuple[Other, ...]
    links: tuple[LinkSeen, ...]
    version: str  # of p2pavg
    reach: str  # how others open connections to it: directly, announced, mapped; or outgoing only
    memory: int  # bytes of the process
    device_memory: int  # bytes that it holds on accelerators
    loss: float | None  # as logged in its last epoch: any float, also no number; None: none was logged
    passes: float  # over the data, with a sampler
    blocks_consumed: int  # of the data
    plan: str  # of its last round; empty: it had none
    bytes_by_stage: tuple[tuple[str, int], ...]  # that it sent in its last round, as contributions and so on
    egress_dollars: float  # that the gradients of all peers cost in the last round, by the leader with prices
    egress_dollars_flat: float  # and would have cost with a flat plan

    def to_message(self) -> dict[str, Any]:
        """What msgpack carries, under "t": "status"."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        data["bytes_by_stage"] = [list(row) for row in self.bytes_by_stage]
        data["peers"] = [list(astuple(row)) for row in self.peers]
        data["links"] = [
            [_DISTANCES.index(value) if isinstance(value, Distance) else value for value in astuple(row)]
            for row in self.links
        ]
        return data

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Status | None:
        """The inverse of `to_message`; None when no correct peer says this."""
        counted = message.get("counted")
        try:
            return cls(
                epoch=count(message.get("epoch")),
                target=count(message.get("target")),
                samples=count(message.get("samples")),
                counted=None if counted is None else count(counted),
                rate=number(message.get("rate")),
                state=text(message.get("state")),
                leader=peer_id_or_none(message.get("leader")),
                total=count(message.get("total")),
                region=text(message.get("region")),
                relayed=count(message.get("relayed")),
                peers=tuple(map(Other.from_row, rows(message.get("peers"), len(fields(Other))))),
                links=tuple(map(LinkSeen.from_row, rows(message.get("links"), len(fields(LinkSeen))))),
                version=text(message.get("version")),
                reach=text(message.get("reach")),
                memory=count(message.get("memory")),
                device_memory=count(message.get("device_memory")),
                loss=float_or_none(message.get("loss")),
                passes=number(message.get("passes")),
                blocks_consumed=count(message.get("blocks_consumed")),
                plan=text(message.get("plan")),
                bytes_by_stage=tuple(
                    (text(stage), count(sent)) for stage, sent in rows(message.get("bytes_by_stage"), 2)
                ),
                egress_dollars=number(message.get("egress_dollars")),
                egress_dollars_flat=number(message.get("egress_dollars_flat")),
            )
        except Malformed:
            return None
