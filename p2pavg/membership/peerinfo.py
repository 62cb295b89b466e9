"""The record of a peer: its addresses, where it stands, and its last report, for the others of its run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import msgpack

from p2pavg.membership.table.address import can_be_of_peer, plain
from p2pavg.membership.table.wire import MALFORMED
from p2pavg.printable import printable

Role = Literal["trainer", "watcher"]
MAX_ADDRESSES = 6
MAX_REPORT_BYTES = 200
MAX_NAME = 32  # characters
MOST_WITH_REPORT = 760  # bytes of a value; a longer one goes without its report
_VERSION = 1


@dataclass(frozen=True)
class PeerInfo:
    """One peer of a run.

    `addresses` are (host, port) for TCP and UDP, best first; `lineage` and `model` (the hash of the model's
    schema) are opaque bytes of at most 32, `report` (a compact form of the last epoch's, for watchers) of at
    most 200; `name` is for people, and several peers may have the same; `joining`: it has not got the run's
    state yet; `udp`: False where UDP does not reach it; `incarnation` tells lives of one identity apart and
    is filled in by the view.
    """

    peer_id: bytes
    addresses: tuple[tuple[str, int], ...] = ()
    client_only: bool = False
    region: str = ""
    epoch: int = 0
    lineage: bytes = b""
    samples_per_second: float = 0.0
    role: Role = "trainer"
    model: bytes = b""
    incarnation: int = 0
    departing: bool = False
    report: bytes = b""
    name: str = ""
    joining: bool = False
    udp: bool = True

    def differs_only_in_progress(self, other: PeerInfo) -> bool:
        """Whether nothing but epoch, lineage, rate and report tells the two apart."""
        return self == replace(
            other,
            epoch=self.epoch,
            lineage=self.lineage,
            samples_per_second=self.samples_per_second,
            report=self.report,
        )

    def encode(self) -> bytes:
        """The value of this peer's record: msgpack, without what the record itself says (peer id,
        incarnation).
        """
        fields = [
            _VERSION,
            [list(address) for address in self.addresses[:MAX_ADDRESSES]],
            self.client_only,
            self.region[:64],
            self.epoch,
            self.lineage,
            self.samples_per_second,
            self.role == "watcher",
            self.model,
            self.departing,
        ]
        told = [self.name[:MAX_NAME], self.joining, self.udp]
        packed: bytes = msgpack.packb([*fields, self.report[:MAX_REPORT_BYTES], *told])
        if len(packed) > MOST_WITH_REPORT:
            packed = msgpack.packb([*fields, b"", *told])
        return packed

    @classmethod
    def decode(cls, value: bytes, peer_id: bytes, incarnation: int) -> PeerInfo | None:
        """The inverse of `encode`; None when no correct peer writes such a value. Addresses that no peer can
        have are left out.
        """
        try:
            fields = msgpack.unpackb(value)
        except MALFORMED:
            return None
        if not isinstance(fields, list) or len(fields) < 14 or fields[0] != _VERSION:
            return None
        # Later versions append more.
        _, addresses, client_only, region, epoch, lineage, rate, watcher, model, departing = fields[:10]
        report, name, joining, udp = fields[10:14]
        expected = (
            (client_only, bool),
            (region, str),
            (epoch, int),
            (lineage, bytes),
            (rate, float),
            (watcher, bool),
            (model, bytes),
            (departing, bool),
            (report, bytes),
            (name, str),
            (joining, bool),
            (udp, bool),
        )
        if any(type(item) is not kind for item, kind in expected) or not _are_addresses(addresses):
            return None
        if (
            len(region) > 64
            or len(name) > MAX_NAME
            or len(lineage) > 32
            or len(model) > 32
            or len(report) > MAX_REPORT_BYTES
        ):
            return None
        if epoch < 0 or not 0 <= rate < 1e15:
            return None
        return cls(
            peer_id,
            tuple((plain(host), port) for host, port in addresses if can_be_of_peer(host)),
            client_only,
            printable(region),
            epoch,
            lineage,
            rate,
            "watcher" if watcher else "trainer",
            model,
            incarnation,
            departing,
            report,
            printable(name),
            joining,
            udp,
        )


def _are_addresses(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MAX_ADDRESSES
        and all(
            isinstance(item, list)
            and len(item) == 2
            and isinstance(item[0], str)
            and 0 < len(item[0]) <= 253
            and item[0].isprintable()
            and type(item[1]) is int
            and 0 < item[1] < 65536
            for item in value
        )
    )
