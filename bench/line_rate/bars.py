"""The bars of `bench.line_rate`: which of its figures is compared with what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bar:
    """One comparison. seconds, unless `unit` says otherwise."""

    what: str
    ours: float
    against: str
    reference: float
    ratio: float
    bar: str
    void: str | None  # why it proves nothing
    unit: str = "s"


def bars(found: Mapping[str, Any]) -> Iterator[Bar]:
    """Those whose sections were measured."""
    yield from _one_stream(found, "long", "back to back", "≥ 5.5")
    if "long" in found:
        auto, raw = found["long"]["auto"], found["long"]["raw 16 streams"]
        ours, ratio = auto["seconds"], found["long"]["over_raw"]
        void = _void(auto, raw)
        yield Bar(
            "the same, less 3 round trips",
            ours - 0.9,
            "16 raw TCP streams",
            raw["seconds"],
            ratio,
            "≤ 1.15",
            void,
        )
    yield from _one_stream(found, "idle", "after 60 s idle", "≥ 4")
    if "quarter" in found:
        auto = found["quarter"]["auto"]
        ratio = auto["seconds"] / 1.5
        yield Bar("`two-300ms`, 2 × 25M", auto["seconds"], "the bar", 1.5, ratio, "≤ 1", _void(auto))
    for size, ratio in (("auto", "goodput_over_rate"), ("400M", "goodput_over_rate_400M")):
        if size in found.get("flowcap", {}):
            row, over = found["flowcap"][size], found["flowcap"][ratio]
            yield Bar(
                f"`two-300ms-flowcap`, 2 × {'100M' if size == 'auto' else size}, goodput",
                row["goodput_gbps"],
                "the pair's rate",
                row["goodput_gbps"] / over,
                over,
                "≥ 0.9",
                _void(row),
                "Gb/s",
            )
    for name, row in found.get("streams", {}).items():
        fixed = {k: row[k]["seconds"] for k in row if k.isdigit()}
        best = min(fixed, key=lambda k: fixed[k])
        what = f"`{name}`, {row['peers']} × {row['numel'] / 1e6:g}M"
        void = _void(*(row[k] for k in ("auto", *fixed)))
        yield Bar(
            what,
            row["auto"]["seconds"],
            f"the best fixed k ({best})",
            fixed[best],
            row["auto_over_best"],
            "≤ 1.1",
            void,
        )
    for name, title, most in (("shares", "`mixed`, 4 × 10M", 1.15), ("clouds", "`clouds-4`, 8 × 25M", 1.25)):
        if name in found:
            row = found[name]
            scale = f", all at {row['scale']:g} of the scale" if row.get("scale", 1) != 1 else ""
            best = row["optimum"]
            void = _void(row)
            against = "the best part sizes (bytes alone)"
            yield Bar(title + scale, row["seconds"], against, best, row["over_optimum"], f"≤ {most}", void)
            first = row["first_seconds"]
            yield Bar("its first round", first, against, best, first / best, "–", void)
    if "stall" in found:
        row = found["stall"]
        yield Bar(
            "`two-300ms`, 2 × 100M, one of 8 streams black-holed",
            row["stalled"]["seconds"],
            "undisturbed + its timeout + its window again",
            row["allowed"],
            row["over_allowed"],
            "≤ 1",
            _void(row["undisturbed"], row["stalled"]),
        )
    if "capped" in found:
        row = found["capped"]
        yield Bar(
            "`max_upload_mbps`",
            row["mbps"],
            "the cap",
            row["cap_mbps"],
            row["over_cap"],
            "0.95 to 1.05",
            _void(row),
            "Mb/s",
        )


def _one_stream(found: Mapping[str, Any], section: str, when: str, bar: str) -> Iterator[Bar]:
    if section in found:
        auto, one = found[section]["auto"], found[section]["1 stream"]
        ratio, void = found[section]["over_one_stream"], _void(auto, one)
        yield Bar(
            f"`two-300ms`, 2 × 100M, {when}",
            auto["seconds"],
            "one stream: so much slower",
            one["seconds"],
            ratio,
            bar,
            void,
        )


def _void(*rows: Mapping[str, Any]) -> str | None:
    return next((row["void_reason"] for row in rows if row["void_reason"]), None)
