"""One page of plots of a run's reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from p2pavg.monitor.history import losses, sent
from p2pavg.report import PHASES, RoundReport
from p2pavg.report.distance import Distance
from p2pavg.report.plot import from_zero, whole
from p2pavg.report.reading import Run

COLORS = {
    "calculation": "#4c9f70",
    "waiting": "#c9c9c9",
    "matchmaking": "#e0a458",
    "transfer": "#3d6fa8",
    "commit": "#8e5ea2",
    "update": "#c0504d",
}


def draw(figure: Any, run: Run) -> None:
    """Fill a matplotlib Figure."""
    found = losses(run)
    axes = figure.subplots(5 if found else 4, 1, sharex=True)
    epochs = sorted(run.epochs().items())
    numbers = [epoch for epoch, _ in epochs]
    _phases(axes[0], numbers, [row for _, row in epochs])
    axes[0].set_title(f"run {run.run_id}", loc="left")
    paces = [_mean([r.samples_per_second for r in row]) for _, row in epochs]
    axes[1].plot(numbers, paces, color=COLORS["transfer"])
    axes[1].set_ylabel("samples/s")
    from_zero(axes[1])
    axes[2].step(
        numbers, [max(len(r.members) for r in row) for _, row in epochs], where="mid", label="members"
    )
    failed = [max(r.attempts - 1 for r in row) for _, row in epochs]
    if any(failed):
        axes[2].bar(numbers, failed, color=COLORS["update"], label="failed attempts")
    axes[2].set_ylabel("peers")
    from_zero(axes[2])
    whole(axes[2].yaxis)
    axes[2].legend(loc="lower right", fontsize="small")
    _bytes(axes[3], numbers, [row for _, row in epochs])
    if found:
        axes[4].plot([epoch for epoch, _ in found], [loss for _, loss in found], color=COLORS["update"])
        axes[4].set_ylabel("loss")
    axes[-1].set_xlabel("epoch")
    whole(axes[-1].xaxis)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _phases(axes: Any, numbers: Sequence[int], rows: Sequence[Sequence[RoundReport]]) -> None:
    """Draw the seconds of an epoch by phase, mean over the peers, stacked; the line is the wall clock."""
    spent = [[_mean([getattr(r, f"seconds_{name}") for r in row]) for row in rows] for name in PHASES]
    axes.stackplot(numbers, spent, labels=PHASES, colors=[COLORS[name] for name in PHASES], step="mid")
    if any(report.overlapped for row in rows for report in row):
        total = [_mean([r.seconds_total for r in row]) for row in rows]
        axes.step(numbers, total, where="mid", color="black", linewidth=1, label="wall clock")
    axes.set_ylabel("seconds per epoch")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=7, fontsize="small")


def _bytes(axes: Any, numbers: Sequence[int], rows: Sequence[Sequence[RoundReport]]) -> None:
    """Draw the bytes that all peers sent per epoch, by class of link."""
    counts = [sent(row) for row in rows]
    used = [where for where in Distance if any(where in count for count in counts)]
    series = [[count.get(where, 0) / 1e6 for count in counts] for where in used]
    if series:
        axes.stackplot(numbers, series, labels=[str(where) for where in used], step="mid")
        axes.legend(loc="upper right", ncols=5, fontsize="small")
    axes.set_ylabel("MB sent, by link")
