"""PriceTable: what peers and their traffic cost, from a TOML file. Dollars stand for any currency."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from p2pavg.errors import ConfigurationError
from p2pavg.printable import printable
from p2pavg.report.distance import Distance, distance

GB = 1e9
DEFAULT = "default"
MOST_NAMED = 4  # regions, in a sentence

EXAMPLE = """\
[peer_hour]          # dollars per hour of one peer, by the longest beginning of its region
default = 0.35
"us-east" = 0.32

[gb]                 # dollars per GB (1e9 bytes) that a peer sends, by class of link
host = 0.0
zone = 0.0
region = 0.01
continent = 0.02
world = 0.08

[egress."us-east"]   # dollars per GB from one region to others, by the longest beginnings of both names
"us-west" = 0.02
"eu" = 0.05
"""


@dataclass(frozen=True, slots=True)
class PriceTable:
    """Prices of peers per hour by region, and of sent traffic per GB by class of link or between regions."""

    peer_hour: Mapping[str, float]
    gb: Mapping[Distance, float]
    egress: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PriceTable:
        """Read the TOML file. Raises ConfigurationError, which says what is wrong with it."""
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"cannot read the price table {str(path)!r}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"the price table {str(path)!r} is no TOML: {error}") from None
        unknown = table.keys() - {"peer_hour", "gb", "egress"}
        if unknown:
            raise _wrong(path, f"{sorted(unknown)[0]!r} is neither [peer_hour] nor [gb] nor [egress]")
        egress = table.get("egress", {})
        if not isinstance(egress, dict):
            raise _wrong(path, "[egress] must be a table")
        between = {name: _prices(path, egress, name) for name in egress}
        hours, gb = _prices(path, table, "peer_hour"), _prices(path, table, "gb")
        strange = gb.keys() - set(Distance)
        if strange:
            raise _wrong(path, f"[gb] knows {', '.join(Distance)}, not {sorted(strange)[0]!r}")
        return cls(hours, {Distance(name): price for name, price in gb.items()}, between)

    def hourly(self, region: str) -> float:
        """Dollars per hour of a peer of this region, without its traffic; 0.0 where no price fits."""
        return self.peer_hour.get(_longest(self.peer_hour.keys() - {DEFAULT}, region) or DEFAULT, 0.0)

    def between(self, here: str, there: str) -> float:
        """Dollars for 1e9 bytes from one region to another: of [egress], or else of the class of the link."""
        return self.link(here, there, distance(here, there, same_host=False, rtt_s=0.0))

    def link(self, here: str, there: str, where: Distance) -> float:
        """The same of a link whose class is known. Inside a machine [egress] says nothing."""
        row = self.egress.get(_longest(self.egress, here) or "", {}) if where is not Distance.HOST else {}
        column = _longest(row, there)
        return self.gb.get(where, 0.0) if column is None else row[column]

    def unmatched(self, regions: Collection[str]) -> str | None:
        """What to tell when the table names regions for peers' hours, or for traffic, and none of them is the
        beginning of one of these, those of the peers; None: one is, or it names none.
        """
        strange: set[str] = set()
        for names in (self.peer_hour.keys() - {DEFAULT}, self.egress.keys()):
            if not any(region.startswith(name) for region in regions for name in names):
                strange |= names
        if not strange:
            return None
        named = ", ".join(repr(printable(region)) for region in sorted(regions) if region)
        theirs = f"their regions are {named}" if named else "they name none (region=, P2PAVG_REGION)"
        return (
            f"no peer is in a region that begins as the price table says, with {_either(strange)}: {theirs}; "
            "prices of other regions do not count"
        )

    def dollars(
        self,
        region: str,
        seconds: float,
        sent: Mapping[Distance, float],
        there: Iterable[tuple[str, Distance, float]] = (),
    ) -> float:
        """What a peer of `region` cost in `seconds`, in which it sent so many bytes by class of link. there:
        of these, the bytes of single links, with the regions at which they arrived.
        """
        traffic = sum(self.gb.get(where, 0.0) * count for where, count in sent.items())
        for other, where, count in there:
            traffic += (self.link(region, other, where) - self.gb.get(where, 0.0)) * count
        return self.hourly(region) * seconds / 3600 + traffic / GB


def _longest(names: Collection[str], region: str) -> str | None:
    """The longest of these with which the region's name begins."""
    return max((name for name in names if region.startswith(name)), key=len, default=None) if names else None


def _either(names: Iterable[str]) -> str:
    shown = [repr(printable(name)) for name in sorted(names)]
    more = f" or {len(shown) - MOST_NAMED} more" if len(shown) > MOST_NAMED else ""
    return " or ".join(shown[:MOST_NAMED]) + more


def per_hour(dollars: float, seconds: float) -> float:
    """Dollars per hour at this pace."""
    return 3600 * dollars / seconds if seconds > 0 else 0.0


def per_million(dollars: float, samples: float) -> float:
    """Dollars per million samples."""
    return 1e6 * dollars / samples if samples > 0 else 0.0


def _prices(path: str | os.PathLike[str], table: Mapping[str, Any], name: str) -> dict[str, float]:
    section = table.get(name, {})
    if not isinstance(section, dict):
        raise _wrong(path, f"[{name}] must be a table")
    for key, value in section.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
            raise _wrong(path, f"{name}.{key} must be a price of at least 0, not {value!r}")
    return {key: float(value) for key, value in section.items()}


def _wrong(path: str | os.PathLike[str], what: str) -> ConfigurationError:
    return ConfigurationError(f"the price table {str(path)!r}: {what}")
