"""Offers of machines, links and prices, read from TOML and checked."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, pairwise
from pathlib import Path
from typing import Any

from p2pavg import codecs
from p2pavg.errors import ConfigurationError
from p2pavg.forecast.evidence import Evidence
from p2pavg.forecast.laws import BYTES, LinkProfile, Workload
from p2pavg.report import MemoryReport

_STREAMS = 16  # the fewest streams of a long link
_MOST = 1e15
_MBPS = 1e6 / 8  # bytes/s
_JOB = "target_batch_size values codec delayed memory_gb"
_OFFER = "type region count samples_per_second dollars_per_hour up_mbps down_mbps memory_gb"
_LINK = "between rtt_ms rate_mbps window_kb net_json dollars_per_gb"

EXAMPLE = """\
[job]
target_batch_size = 32768
values = 560_100_000          # parameters of the model
codec = "fp16"
memory_gb = 15                # optional: what one peer takes, if not as reports (--from) tell

[[offer]]
type = "T4"
region = "us-central1"
count = 8                     # on offer
samples_per_second = 117      # of one; without it, as reports (--from) of a device of that type tell
dollars_per_hour = 0.18
up_mbps = 7000                # optional, as down_mbps
memory_gb = 16                # optional: of its accelerator, or of the machine where it has none

[[link]]
between = ["us-central1", "us-central1"]
rtt_ms = 0.7
rate_mbps = 6900              # over all streams; or window_kb of one; or net_json, a file of `bench net`
dollars_per_gb = 0.01
"""


@dataclass(frozen=True, slots=True)
class MachineOffer:
    """A kind of machine in one region. Rates in bytes/s, None: no limit of its own; memory: bytes, None:
    enough; needed: what one peer of the job takes of it.
    """

    kind: str
    region: str
    count: int
    sps: float
    dollars_hour: float
    up: float | None = None
    down: float | None = None
    memory: float | None = None
    needed: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.kind}@{self.region}"

    @property
    def fits(self) -> bool:
        """Whether a machine of this kind holds the model."""
        return self.memory is None or self.memory >= self.needed


@dataclass(frozen=True, slots=True)
class Inventory:
    """Offers by name, links between regions, both ways and inside each, and dollars per GB on them."""

    job: Workload
    offers: tuple[MachineOffer, ...]
    links: Mapping[tuple[str, str], LinkProfile]
    per_gb: Mapping[tuple[str, str], float] = field(default_factory=dict)


def load(path: str, evidence: Evidence | None = None) -> Inventory:
    """Read an inventory. evidence: tells the samples/s of types, and what a peer takes of their memory, where
    the inventory does not.

    Raises ConfigurationError.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read the inventory {path!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"the inventory {path!r} is no TOML: {error}") from None
    try:
        return parse(document, Path(path).parent, evidence)
    except ConfigurationError as error:
        raise ConfigurationError(f"the inventory {path!r}: {error}") from None


def parse(document: Mapping[str, Any], folder: Path = Path(), evidence: Evidence | None = None) -> Inventory:
    """The same from a parsed document; files are named from `folder`."""
    _known(document, "job offer link", "the file")
    table = document.get("job", {})
    job = _job(table)
    needed = _number(table, "memory_gb", "[job]") * 1e9 if "memory_gb" in table else None
    offers = sorted(
        (_offer(row, evidence, needed) for row in _rows(document, "offer", _OFFER)),
        key=lambda offer: offer.name,
    )
    if not offers:
        raise ConfigurationError("there is no [[offer]]; name at least one")
    for one, other in pairwise(offers):
        if one.name == other.name:
            raise ConfigurationError(f"{one.name} is offered twice; add the counts up")
    links: dict[tuple[str, str], LinkProfile] = {}
    per_gb: dict[tuple[str, str], float] = {}
    for row in _rows(document, "link", _LINK):
        a, b = _between(row)
        if (a, b) in links:
            raise ConfigurationError(f"the link between {a} and {b} is told twice")
        where = f"the link {a} {b}"
        links[a, b] = links[b, a] = _link(row, where, folder)
        per_gb[a, b] = per_gb[b, a] = _number(row, "dollars_per_gb", where, default=0.0, least=0.0)
    _complete(offers, links)
    return Inventory(job, tuple(offers), links, per_gb)


def _job(row: Mapping[str, Any]) -> Workload:
    _known(row, _JOB, "[job]")
    codec, delayed = row.get("codec", "fp16"), row.get("delayed", False)
    if codec not in list(BYTES):
        raise ConfigurationError(f"[job]: codec = {codec!r} is none of {', '.join(BYTES)}")
    if not isinstance(delayed, bool):
        raise ConfigurationError(f"[job]: delayed is true or false, not {delayed!r}")
    return Workload(
        _number(row, "target_batch_size", "[job]"),
        _number(row, "values", "[job]"),
        codec,
        codecs.for_results(codecs.get(codec)).name,
        delayed,
    )


def _complete(offers: Sequence[MachineOffer], links: Mapping[tuple[str, str], LinkProfile]) -> None:
    for one, other in combinations_with_replacement(offers, 2):
        alone = one is other and one.count < 2
        if not alone and (one.region, other.region) not in links:
            raise ConfigurationError(
                f"there is no [[link]] between {one.region} and {other.region}; measure it with "
                "'p2pavg bench net' between a machine of each, and name its --json file as net_json"
            )


def _offer(row: Mapping[str, Any], evidence: Evidence | None, needed: float | None) -> MachineOffer:
    kind, region = row.get("type"), row.get("region")
    if not isinstance(kind, str) or not isinstance(region, str) or not kind or not region:
        raise ConfigurationError("an [[offer]] needs a type and a region, as text")
    where = f"offer {kind}@{region}"
    count = row.get("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 4096:
        raise ConfigurationError(f"{where}: count is a whole number from 1 to 4096, not {count!r}")
    measured = evidence.speed_of(kind) if evidence else None
    if measured is None and "samples_per_second" not in row:
        raise ConfigurationError(
            f"{where}: the type {kind!r} was never measured; tell samples_per_second, or name reports of a "
            "peer of that type with --from"
        )
    if needed is None:
        takes = evidence.memory_of(kind) if evidence else MemoryReport()
        needed = takes.device_peak or takes.host_peak

    def optional(key: str, unit: float) -> float | None:
        return _number(row, key, where) * unit if key in row else None

    return MachineOffer(
        kind,
        region,
        count,
        _number(row, "samples_per_second", where, default=measured),
        _number(row, "dollars_per_hour", where, default=0.0, least=0.0),
        optional("up_mbps", _MBPS),
        optional("down_mbps", _MBPS),
        optional("memory_gb", 1e9),
        needed,
    )


def _between(row: Mapping[str, Any]) -> tuple[str, str]:
    ends = row.get("between")
    if not isinstance(ends, list) or len(ends) != 2 or not all(isinstance(end, str) for end in ends):
        raise ConfigurationError('a [[link]] needs between = ["REGION", "REGION"]')
    return ends[0], ends[1]


def _link(row: Mapping[str, Any], where: str, folder: Path) -> LinkProfile:
    if "net_json" in row:
        where = f"{where}: {row['net_json']!r}"
        try:
            told = json.loads((folder / row["net_json"]).read_text(encoding="utf-8"))
            row = {"rtt_ms": told["rtt_ms"], "rate_mbps": told["rate_gbps"] * 1e3}
        except (OSError, ValueError, TypeError, KeyError):
            raise ConfigurationError(f"{where} is no JSON of 'bench net'") from None
    rtt = _number(row, "rtt_ms", where, least=0.0) / 1e3
    if "window_kb" not in row or rtt == 0:
        return LinkProfile(rtt, _number(row, "rate_mbps", where) * _MBPS)
    by_window = _STREAMS * _number(row, "window_kb", where) * 1e3 / rtt
    return LinkProfile(rtt, min(by_window, _number(row, "rate_mbps", where, default=_MOST) * _MBPS))


def _rows(document: Mapping[str, Any], name: str, keys: str) -> list[Mapping[str, Any]]:
    """The tables of an array of tables."""
    rows = document.get(name, [])
    if not isinstance(rows, list):
        raise ConfigurationError(f"{name} must be tables, each under [[{name}]]")
    for row in rows:
        _known(row, keys, f"[[{name}]]")
    return rows


def _known(table: Any, keys: str, where: str) -> None:
    if not isinstance(table, Mapping):
        raise ConfigurationError(f"{where} must be a table")
    strange = sorted(set(table) - set(keys.split()))
    if strange:
        raise ConfigurationError(f"{where} knows {', '.join(sorted(keys.split()))}, not {strange[0]!r}")


def _number(
    row: Mapping[str, Any], key: str, where: str, default: float | None = None, least: float = 1e-9
) -> float:
    value = row.get(key, default)
    if value is None:
        raise ConfigurationError(f"{where} needs {key}")
    fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fine or not least <= value <= _MOST:
        above = "of at least 0" if least == 0 else "above 0"
        raise ConfigurationError(f"{where}: {key} must be a number {above} and below 1e15, not {value!r}")
    return float(value)
