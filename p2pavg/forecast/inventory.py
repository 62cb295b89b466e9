"""Offers of machines, links and prices, read from TOML and checked."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from p2pavg import codecs
from p2pavg.errors import ConfigurationError
from p2pavg.forecast.laws import BYTES, LinkProfile, Workload

_STREAMS = 16  # the fewest streams of a long link
_MOST = 1e15
_JOB = {"target_batch_size", "values", "codec", "delayed", "memory_gb"}
_OFFER = {
    "type",
    "region",
    "count",
    "samples_per_second",
    "dollars_per_hour",
    "up_mbps",
    "down_mbps",
    "memory_gb",
}
_LINK = {"between", "rtt_ms", "rate_mbps", "window_kb", "net_json", "dollars_per_gb"}

EXAMPLE = """\
[job]
target_batch_size = 32768
values = 560_100_000          # parameters of the model
codec = "fp16"
memory_gb = 15                # optional: what one peer needs; offers with less are left out

[[offer]]
type = "T4"
region = "us-central1"
count = 8                     # on offer
samples_per_second = 117      # of one; without it, as reports (--from) of a device of that type tell
dollars_per_hour = 0.18
up_mbps = 7000                # optional, as down_mbps and memory_gb

[[link]]
between = ["us-central1", "us-central1"]
rtt_ms = 0.7
rate_mbps = 6900              # over all streams; or window_kb of one; or net_json, a file of `bench net`
dollars_per_gb = 0.01
"""


@dataclass(frozen=True, slots=True)
class MachineOffer:
    """A kind of machine in one region. Rates in bytes/s, None: no limit of its own; memory in bytes, None:
    enough.
    """

    kind: str
    region: str
    count: int
    sps: float
    dollars_hour: float
    up: float | None = None
    down: float | None = None
    memory: float | None = None

    @property
    def name(self) -> str:
        return f"{self.kind}@{self.region}"

    def fits(self, job: Workload) -> bool:
        """Whether a machine of this kind has the memory that one peer of the job needs."""
        return self.memory is None or self.memory >= job.memory


@dataclass(frozen=True, slots=True)
class Inventory:
    """Offers by name, links between regions, both ways and inside each, and dollars per GB on them."""

    job: Workload
    offers: tuple[MachineOffer, ...]
    links: Mapping[tuple[str, str], LinkProfile]
    per_gb: Mapping[tuple[str, str], float] = field(default_factory=dict)


SpeedOf = Callable[[str], float | None]


def load(path: str, speed_of: SpeedOf = lambda kind: None) -> Inventory:
    """Read an inventory. speed_of: samples/s of a type that was measured, for offers that do not tell them.

    Raises ConfigurationError.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read the inventory {path!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"the inventory {path!r} is no TOML: {error}") from None
    try:
        return parse(document, Path(path).parent, speed_of)
    except ConfigurationError as error:
        raise ConfigurationError(f"the inventory {path!r}: {error}") from None


def parse(
    document: Mapping[str, Any], folder: Path = Path(), speed_of: SpeedOf = lambda kind: None
) -> Inventory:
    """The same from a parsed document; files are named from `folder`."""
    _known(document, {"job", "offer", "link"}, "the file")
    job = document.get("job", {})
    _known(job, _JOB, "[job]")
    codec = job.get("codec", "fp16")
    if codec not in BYTES:
        raise ConfigurationError(f"[job] codec = {codec!r} is none of {', '.join(BYTES)}")
    made = Workload(
        _number(job, "target_batch_size", "[job]"),
        _number(job, "values", "[job]"),
        codec,
        codecs.for_results(codecs.get(codec)).name,
        bool(job.get("delayed", False)),
        _number(job, "memory_gb", "[job]") * 1e9 if "memory_gb" in job else 0.0,
    )
    offers = tuple(_offer(row, speed_of) for row in document.get("offer", []))
    if not offers:
        raise ConfigurationError("there is no [[offer]]; name at least one")
    names = [offer.name for offer in offers]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ConfigurationError(f"{twice} is offered twice; add the counts up")
    links: dict[tuple[str, str], LinkProfile] = {}
    per_gb: dict[tuple[str, str], float] = {}
    for row in document.get("link", []):
        a, b = _between(row)
        if (a, b) in links:
            raise ConfigurationError(f"the link between {a} and {b} is told twice")
        links[a, b] = links[b, a] = _link(row, folder)
        per_gb[a, b] = per_gb[b, a] = _number(
            row, "dollars_per_gb", f"the link {a} {b}", default=0.0, least=0.0
        )
    _complete(offers, links)
    return Inventory(made, tuple(sorted(offers, key=lambda offer: offer.name)), links, per_gb)


def _complete(offers: Iterable[MachineOffer], links: Mapping[tuple[str, str], LinkProfile]) -> None:
    kinds = list(offers)
    for one in kinds:
        for other in kinds:
            alone = one is other and one.count < 2
            if not alone and (one.region, other.region) not in links:
                raise ConfigurationError(
                    f"there is no [[link]] between {one.region} and {other.region}; measure it with "
                    "'p2pavg bench net' between a machine of each, and name its --json file as net_json"
                )


def _offer(row: Mapping[str, Any], speed_of: SpeedOf) -> MachineOffer:
    _known(row, _OFFER, "[[offer]]")
    kind, region = row.get("type"), row.get("region")
    if not isinstance(kind, str) or not isinstance(region, str):
        raise ConfigurationError("an [[offer]] needs a type and a region, as text")
    where = f"offer {kind}@{region}"
    count = row.get("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 4096:
        raise ConfigurationError(f"{where}: count is a whole number from 1 to 4096, not {count!r}")
    speed = None if "samples_per_second" in row else speed_of(kind)
    if speed is None and "samples_per_second" not in row:
        raise ConfigurationError(
            f"{where}: the type {kind!r} was never measured; tell samples_per_second, or name reports of a "
            "peer of that type with --from"
        )
    rates = [_number(row, key, where) / 8e-6 if key in row else None for key in ("up_mbps", "down_mbps")]
    return MachineOffer(
        kind,
        region,
        count,
        _number(row, "samples_per_second", where, default=speed),
        _number(row, "dollars_per_hour", where, default=0.0, least=0.0),
        rates[0],
        rates[1],
        _number(row, "memory_gb", where) * 1e9 if "memory_gb" in row else None,
    )


def _between(row: Mapping[str, Any]) -> tuple[str, str]:
    _known(row, _LINK, "[[link]]")
    ends = row.get("between")
    if not isinstance(ends, list) or len(ends) != 2 or not all(isinstance(end, str) for end in ends):
        raise ConfigurationError('a [[link]] needs between = ["REGION", "REGION"]')
    return ends[0], ends[1]


def _link(row: Mapping[str, Any], folder: Path) -> LinkProfile:
    where = f"the link {' '.join(row['between'])}"
    if "net_json" in row:
        try:
            told = json.loads((folder / row["net_json"]).read_text())
            rtt, rate = float(told["rtt_ms"]) / 1e3, float(told["rate_gbps"]) * 1e9 / 8
        except (OSError, ValueError, TypeError, KeyError):
            raise ConfigurationError(f"{where}: {row['net_json']!r} is no JSON of 'bench net'") from None
        return LinkProfile(rtt, rate)
    rtt = _number(row, "rtt_ms", where, least=0.0) / 1e3
    if "window_kb" in row and rtt > 0:
        by_window = _STREAMS * _number(row, "window_kb", where) * 1e3 / rtt
        rate = min(by_window, _number(row, "rate_mbps", where, default=_MOST) / 8e-6)
    else:
        rate = _number(row, "rate_mbps", where) / 8e-6
    return LinkProfile(rtt, rate)


def _known(table: Any, keys: set[str], where: str) -> None:
    if not isinstance(table, Mapping):
        raise ConfigurationError(f"{where} must be a table")
    strange = sorted(set(table) - keys)
    if strange:
        raise ConfigurationError(f"{where} knows {', '.join(sorted(keys))}, not {strange[0]!r}")


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
