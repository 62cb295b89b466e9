"""RoundReport: what one round measured, and the quantities derived from it. Pure data and functions.

May import `identity`, `printable` and `errors`. Start reading here; `compact` and `status` travel
to watchers, `flat` is for loggers, `distance` and `prices` tell what links cost, `plot` draws.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from p2pavg.errors import ConfigurationError
from p2pavg.printable import counted, size
from p2pavg.report.distance import ELSEWHERE, Distance
from p2pavg.report.flat import flat

VERSION = 1  # of the JSON; grows when a field changes its meaning, not when one is added

MOST = 1e18  # every number in a report is smaller

PHASES = ("calculation", "waiting", "matchmaking", "transfer", "commit", "update")


@dataclass(frozen=True, slots=True)
class MemberReport:
    """One member of a round."""

    peer: str  # peer id, hex
    weight: float  # 0: straggler or joiner
    samples: int
    voter: bool


@dataclass(frozen=True, slots=True)
class LinkReport:
    """Measurements of one link during the epoch, taken while gradients flowed where not said otherwise."""

    peer: str
    bytes_sent: int  # in all frames over data streams since the last report
    bytes_received: int
    streams: int  # the highest number of the epoch
    rtt_s: float  # when the report was made
    window_bytes: int  # of one stream, the largest of the epoch
    rate_bps: float  # bit/s of the busier direction, the highest of the epoch; 0.0: nothing flowed
    distance: Distance = Distance.WORLD
    retransmits: int = 0  # TCP segments sent again since the streams opened
    # IP bytes since the last report over data streams and the control connection, their opening, headers,
    # acknowledgements and retransmissions included; where the kernel does not count them, bytes of frames.
    wire_bytes_sent: int = 0
    wire_bytes_received: int = 0
    region: str = ""  # of the other peer, as that one names it


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """One attempt of the epoch that failed."""

    attempt: int
    leader: str  # hex
    members: tuple[str, ...]  # hex
    seconds: float  # from the group's forming to its end; wall clock
    why: str


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory in bytes: the most that the peer's process took since it began, and what there is. 0: unknown.

    The accelerator is the one of which torch took most; without one its numbers are 0. What torch keeps for
    its next tensors counts, the driver's own needs do not.
    """

    host_peak: int = 0
    host: int = 0  # of the machine, or the limit of the process's container
    device_peak: int = 0
    device: int = 0


@dataclass(frozen=True, slots=True)
class RoundReport:
    """One epoch of one peer.

    All seconds are wall clock, with the device synchronised. The phases (calculation, waiting, matchmaking,
    transfer, commit, update), less `seconds_overlapped`, add up to `seconds_total`. Without delayed updates
    the phases follow each other, and `seconds_overlapped` is 0. With delayed updates everything but the
    calculation runs behind the next epoch's calculation: `seconds_overlapped` is how long both went on at
    once, and `overlapped` is set.
    """

    run_id: str
    peer: str
    epoch: int
    attempts: int
    leader: str
    lineage: str  # after the epoch, hex
    members: tuple[MemberReport, ...]
    samples: int  # of all members, in this average
    local_samples: int
    samples_discarded: int
    discarded_why: tuple[str, ...]
    failed_members: tuple[str, ...]
    causes: tuple[str, ...]  # why attempts failed, in words
    seconds_calculation: float
    seconds_waiting: float  # at the boundary, for others, for failed attempts, and between the other phases
    seconds_matchmaking: float  # ballot and group
    seconds_transfer: float  # first contribution to last result
    seconds_commit: float
    seconds_update: float  # decode, optimizer step, parameter write-back
    seconds_total: float
    bytes_sent: int  # over all links, in frames
    bytes_received: int
    codec: str
    first_byte_at: float = 0.0  # time.monotonic() of the first gradient byte sent or received, 0.0: none
    last_byte_at: float = 0.0
    links: tuple[LinkReport, ...] = ()
    overlapped: bool = False
    finished_at: float = 0.0  # time.time()
    extra: Mapping[str, float] = field(default_factory=dict)  # e.g. loss, logged by the user
    seconds_overlapped: float = 0.0
    discarded_samples: tuple[int, ...] = ()  # for each of discarded_why
    failed_attempts: tuple[AttemptReport, ...] = ()
    region: str = ""
    table_bytes_sent: int = 0  # IP bytes since the last report, of the table of members
    table_bytes_received: int = 0
    other_bytes_sent: int = 0  # IP bytes to watchers, and over connections that became no link
    other_bytes_received: int = 0
    host_bytes_sent: int = 0  # of the table's and the other bytes: to processes of this machine
    spared_bytes: int = 0  # that LZ4 kept off links and disks since the last report
    relayed_bytes: int = 0  # passed on since the last report, for peers that have no way to each other
    # With a sampler: (pass, first, end) of positions that this round consumed, of all members; and so far
    consumed: tuple[tuple[int, int, int], ...] = ()
    passes: float = 0.0  # over the data
    blocks_consumed: int = 0
    blocks_returned: int = 0  # whose samples this peer drew, and which are in no average
    plan: str = ""  # "flat", "two-level" or "all-gather"; "": this peer was not in the round
    # Encoded bytes that this peer sent in each stage of the plan, by the stage's name, each counted once.
    bytes_by_stage: Mapping[str, int] = field(default_factory=dict)
    # By which the epoch was longer than its samples needed, to keep to `max_egress_usd_per_hour`; in the
    # report of the round's leader alone.
    seconds_stretched: float = 0.0
    # In the leader's report, with `prices`: what the round's gradients cost by its plan, of all members,
    # and would have cost by a flat one.
    egress_dollars: float = 0.0
    egress_dollars_flat: float = 0.0
    device: str = ""  # what this peer calculates on, as its driver names it: "Tesla T4", "cpu"
    # By peer that died or was cut off in this epoch: the samples that it had told of, and that are in no
    # average yet. Of a peer that comes back with them, they are in a later one.
    samples_lost: Mapping[str, int] = field(default_factory=dict)
    memory: MemoryReport = field(default_factory=MemoryReport)
    state_bytes: int = 0  # of the state that a newcomer downloads; 0: not known yet, as in the first report

    def __str__(self) -> str:
        """One line; `repr` has every field."""
        words = [
            f"epoch {self.epoch}: {counted(len(self.members), 'peer')}",
            f"{self.samples:,} samples in {self.seconds_total:.2f} s",
            f"calculation {self.seconds_calculation:.2f}, communication {self.seconds_communication:.2f}",
            f"{size(self.wire_bytes_sent)} sent",
        ]
        if self.attempts > 1:
            words.append(counted(self.attempts, "attempt"))
        if self.samples_discarded:
            words.append(f"{self.samples_discarded:,} samples discarded")
        if self.samples_lost:
            lost, peers = sum(self.samples_lost.values()), counted(len(self.samples_lost), "peer")
            words.append(f"{lost:,} samples lost with {peers}")
        return ", ".join(words)

    @property
    def wire_bytes_sent(self) -> int:
        """All IP bytes that this peer sent since the last report: what a cloud bills as egress."""
        links = sum(link.wire_bytes_sent for link in self.links)
        return links + self.table_bytes_sent + self.other_bytes_sent

    @property
    def wire_bytes_received(self) -> int:
        """All IP bytes that this peer received since the last report."""
        links = sum(link.wire_bytes_received for link in self.links)
        return links + self.table_bytes_received + self.other_bytes_received

    @property
    def seconds_communication(self) -> float:
        """Everything between the end of calculation and the start of the update."""
        return self.seconds_waiting + self.seconds_matchmaking + self.seconds_transfer + self.seconds_commit

    @property
    def granularity(self) -> float:
        """Calculation time over communication time of the epoch; inf when nothing was communicated."""
        spent = self.seconds_communication
        return self.seconds_calculation / spent if spent > 0 else float("inf")

    @property
    def samples_per_second(self) -> float:
        """Global samples over this epoch's wall clock."""
        return self.samples / self.seconds_total if self.seconds_total > 0 else 0.0

    @property
    def local_samples_per_second(self) -> float:
        """This peer's samples over its calculation time: as fast as it would be alone."""
        return self.local_samples / self.seconds_calculation if self.seconds_calculation > 0 else 0.0

    @property
    def egress_bytes_per_hour(self) -> float:
        """Bytes that this peer sends over the network in an hour, at this epoch's pace."""
        return 3600 * self.wire_bytes_sent / self.seconds_total if self.seconds_total > 0 else 0.0

    @property
    def sent_by_distance(self) -> dict[Distance, int]:
        """`wire_bytes_sent` by class of link; classes without bytes are missing. Bytes of the table, and to
        peers that are no members, count as WORLD, or as HOST to processes of this machine.
        """
        sent = {
            Distance.HOST: self.host_bytes_sent,
            Distance.WORLD: self.table_bytes_sent + self.other_bytes_sent - self.host_bytes_sent,
        }
        for link in self.links:
            sent[link.distance] = sent.get(link.distance, 0) + link.wire_bytes_sent
        return {where: count for where, count in sent.items() if count}

    @property
    def sent_to_regions(self) -> Iterator[tuple[str, Distance, float]]:
        """Of `wire_bytes_sent`, what each link to a peer that names its region carried."""
        return ((link.region, link.distance, link.wire_bytes_sent) for link in self.links if link.region)

    @property
    def bytes_between_regions(self) -> int:
        """IP bytes that this peer sent to members of other regions since the last report."""
        return sum(link.wire_bytes_sent for link in self.links if link.distance in ELSEWHERE)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data, derived quantities included."""
        data = {"version": VERSION, **asdict(self)}
        data["extra"] = {name: value if math.isfinite(value) else None for name, value in self.extra.items()}
        data["granularity"] = None if self.granularity == float("inf") else self.granularity
        data["samples_per_second"] = self.samples_per_second
        data["local_samples_per_second"] = self.local_samples_per_second
        data["wire_bytes_sent"] = self.wire_bytes_sent
        data["wire_bytes_received"] = self.wire_bytes_received
        data["egress_bytes_per_hour"] = self.egress_bytes_per_hour
        by_distance = {str(where): count for where, count in self.sent_by_distance.items()}
        data["wire_bytes_sent_by_distance"] = by_distance
        data["bytes_between_regions"] = self.bytes_between_regions
        return data

    def flat(self) -> dict[str, float]:
        """Numbers alone, under names that stay: what loggers take. Counts are of the epoch, bytes since the
        last report; what was put into `extra` is under "extra_" and its name.
        """
        return flat(self)

    def to_json(self) -> str:
        """One line of JSONL."""
        return json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RoundReport:
        """Read what `to_dict` made. Derived quantities, and fields that later versions added, are left out.

        Args:
            data: a JSON object.

        Raises:
            ConfigurationError: for a report of another version, or an object that is no report.
        """
        version = data.get("version", VERSION)
        if version != VERSION:
            raise ConfigurationError(
                f"a report of version {version}, and this p2pavg reads version {VERSION}; "
                "install the p2pavg that wrote it"
            )
        try:
            made = _only(cls, data)
            made["extra"] = dict(data.get("extra", {}))
            for name in ("bytes_by_stage", "samples_lost"):
                made[name] = _counts(data.get(name, {}))
            made["members"] = tuple(MemberReport(**_only(MemberReport, row)) for row in data["members"])
            made["links"] = tuple(_link(row) for row in data.get("links", ()))
            made["failed_attempts"] = tuple(
                AttemptReport(**{**_only(AttemptReport, row), "members": _texts(row["members"])})
                for row in data.get("failed_attempts", ())
            )
            for name in ("discarded_why", "failed_members", "causes"):
                made[name] = _texts(data.get(name, ()))
            made["memory"] = MemoryReport(**_only(MemoryReport, data.get("memory", {})))
            made["consumed"] = tuple(_run(row) for row in data.get("consumed", ()))
            made["discarded_samples"] = tuple(int(count) for count in data.get("discarded_samples", ()))
            return cls(**made)
        except (TypeError, KeyError, ValueError, AttributeError):
            raise ConfigurationError("that is no report of an epoch") from None


def _only(kind: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """The items of `data` that are fields of `kind`. Raises TypeError for an item of another type."""
    made = {}
    for item in fields(kind):
        if item.name not in data:
            continue
        value = made[item.name] = data[item.name]
        if item.type == "str" and not isinstance(value, str):
            raise TypeError(item.name)
        if item.type in ("int", "float") and not is_number(value):
            raise TypeError(item.name)
    return made


def is_number(value: object) -> bool:
    """Whether `value` is a number below MOST, and no NaN: sums and ratios of such numbers are finite."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MOST


def _texts(values: Sequence[Any]) -> tuple[str, ...]:
    if not all(isinstance(value, str) for value in values):
        raise TypeError(values)
    return tuple(values)


def _counts(values: Any) -> dict[str, int]:
    if not all(isinstance(name, str) and is_number(count) for name, count in values.items()):
        raise TypeError(values)
    return {name: int(count) for name, count in values.items()}


def _run(row: Any) -> tuple[int, int, int]:
    number, first, end = row
    return int(number), int(first), int(end)


def _link(row: Mapping[str, Any]) -> LinkReport:
    made = _only(LinkReport, row)
    return LinkReport(**{**made, "distance": Distance(row.get("distance", Distance.WORLD))})


@dataclass(frozen=True, slots=True)
class Phases:
    """How an epoch's wall clock was spent; `overlapped` is counted twice in the sum of the others."""

    calculation: float
    waiting: float
    matchmaking: float
    transfer: float
    commit: float
    update: float
    overlapped: float


def phases(
    *,
    total: float,
    arrived: float | None,
    waited_before: float,
    round_seconds: Mapping[str, float],
    update: float,
    waited: float | None,
    idle: float = 0.0,
) -> Phases:
    """Split an epoch's wall clock into its phases.

    Args:
        total: seconds of the epoch.
        arrived: seconds from the epoch's begin until its sums were handed in; None: never, as the result came
            in late and the peer computed all the while.
        waited_before: seconds spent at boundaries that led to no average.
        round_seconds: "matchmaking", "transfer" and "commit" of the attempt that succeeded.
        update: seconds of the update.
        waited: seconds that the training thread waited while round and update ran behind its computation;
            None: it waited all the while.
        idle: seconds that it waited for other peers before it computed.
    """
    spent = _phases(total, arrived, waited_before, round_seconds, update, waited)
    idle = min(idle, spent.calculation)
    return replace(spent, calculation=spent.calculation - idle, waiting=spent.waiting + idle)


def _phases(
    total: float,
    arrived: float | None,
    waited_before: float,
    round_seconds: Mapping[str, float],
    update: float,
    waited: float | None,
) -> Phases:
    formed, moved, agreed = (
        max(0.0, round_seconds.get(name, 0.0)) for name in ("matchmaking", "transfer", "commit")
    )
    if arrived is None:
        share = min(1.0, max(0.0, total - update - waited_before) / max(formed + moved + agreed, 1e-9))
        formed, moved, agreed = share * formed, share * moved, share * agreed
        overlapped = formed + moved + agreed
        calculation = max(0.0, total - update - waited_before)
        return Phases(calculation, waited_before, formed, moved, agreed, update, overlapped)
    behind = max(0.0, total - arrived)
    waiting = max(0.0, behind - formed - moved - agreed - update)
    if waited is None:
        calculation = max(0.0, min(arrived, total) - waited_before)
        return Phases(calculation, waiting + waited_before, formed, moved, agreed, update, 0.0)
    overlapped = max(0.0, behind - waited)
    return Phases(total - behind + overlapped, waiting, formed, moved, agreed, update, overlapped)
