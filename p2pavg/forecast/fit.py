"""Whether machines hold the model: what peers take of their memory at most, beside what there is. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from p2pavg.forecast.evidence import together
from p2pavg.forecast.laws import PeerProfile

_COPIES = 8  # bytes of a value with delayed updates: a second copy of parameters and of sums
_OUTER = 12  # bytes of a value in the machine's memory with outer steps: reference, velocity and difference
_GB = 1e9
_PLACES = {"device": "its accelerator", "host": "its machine"}


def more(values: float, *, delay: bool, outer: bool) -> dict[str, int]:
    """Bytes by calculation for what the reports' run did not do: by "device", where the model is, and
    "host".
    """
    return {"device": round(_COPIES * values) if delay else 0, "host": round(_OUTER * values) if outer else 0}


def fits(members: Sequence[PeerProfile], extra: Mapping[str, int]) -> list[dict[str, Any]]:
    """For each device what a peer takes at most and what it has, in bytes, 0: unknown; and whether that fits,
    None: no report tells.
    """
    rows = []
    for device in dict.fromkeys(member.device for member in members):
        row: dict[str, Any] = asdict(together([one.memory for one in members if one.device == device]))
        for place, size in extra.items():
            where = place if row["device_peak"] else "host"
            row[f"{where}_peak"] += size if row[f"{where}_peak"] else 0
        known = [place for place in _PLACES if row[f"{place}_peak"] and row[place]]
        held = all(row[f"{place}_peak"] <= row[place] for place in known)
        rows.append({"type": device, **row, "fits": held if known else None})
    return rows


def told(rows: Sequence[Mapping[str, Any]], extra: Mapping[str, int]) -> list[str]:
    """The rows in words."""
    lines = []
    for row in rows:
        parts = []
        for place, name in _PLACES.items():
            if row[f"{place}_peak"]:
                has = f" of {row[place] / _GB:,.1f}" if row[place] else ""
                parts.append(f"{row[f'{place}_peak'] / _GB:,.1f}{has} GB of {name}")
        device = row["type"] or "devices without a name"
        verdicts = {
            True: f"The model fits {device}",
            False: f"The model DOES NOT FIT {device}",
            None: f"Whether the model fits {device} is unknown",
        }
        if parts:
            lines.append(f"{verdicts[row['fits']]}: a peer takes at most {' and '.join(parts)}.")
    if not lines:
        return ["Whether the model fits is unknown: no report tells what memory peers take."]
    added = f"{sum(extra.values()) / _GB:,.1f}"
    if added != "0.0":
        lines.append(f"Up to {added} GB of these are calculated, for what the reports' run did not do.")
    return lines
