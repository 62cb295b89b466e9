"""The picture of `bench.versus`: seconds over peers, over values and over streams, where they vary."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from p2pavg.report.plot import save_plot

Rows = Sequence[dict[str, Any]]


@dataclass
class Panel:
    """lines: by system, (what is varied, seconds)."""

    title: str
    label: str
    lines: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    @property
    def varies(self) -> bool:
        return len({x for points in self.lines.values() for x, _ in points}) > 1

    def add(self, name: str, x: float, row: dict[str, Any]) -> None:
        """One point."""
        self.lines.setdefault(name, []).append((x, row["seconds_median"]))


def plot(rows: Rows, path: Path) -> None:
    """One panel for each network and what varies there."""
    networks = dict.fromkeys(row["lab"] for row in rows)
    panels = [panel for lab in networks for panel in _panels([row for row in rows if row["lab"] == lab])]
    if not panels:
        sys.exit("versus: nothing varies; name several --peers, --numel or --streams to plot")

    def draw(figure: Any) -> None:
        grid = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, panel in zip(grid, panels, strict=True):
            for name, points in panel.lines.items():
                axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
            axes.set_title(panel.title)
            axes.set_xlabel(panel.label)
            axes.set_yscale("log")
            axes.legend(fontsize="small")
        grid[0].set_ylabel("seconds")

    save_plot(path, draw, size=(4.5 * len(panels), 4.5))


def _panels(rows: Rows) -> list[Panel]:
    """rows: of one network."""
    network = rows[0]["lab"] or "loopback"
    few, small = min(row["peers"] for row in rows), min(row["numel"] for row in rows)
    peers = Panel(f"{network}, {small / 1e6:g}M values", "peers")
    values = Panel(f"{network}, {few} peers", "million values")
    streams = Panel(f"{network}, {few} peers, {small / 1e6:g}M values", "streams of a link")
    counts = sorted(row["streams"] for row in rows if row["streams"])
    for row in rows:
        fewest, smallest = row["peers"] == few, row["numel"] == small
        if row["streams"]:
            if fewest and smallest:
                streams.add("p2pavg fp16", row["streams"], row)
            continue
        if smallest:
            peers.add(row["name"], row["peers"], row)
        if fewest:
            values.add(row["name"], row["numel"] / 1e6, row)
        if fewest and smallest and row["name"] == "p2pavg fp16":
            for count in counts:
                streams.add("automatic", count, row)
    varied = [panel for panel in (peers, values) if panel.varies]
    return [*varied, streams] if counts else varied
