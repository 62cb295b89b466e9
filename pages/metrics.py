"""The table of metrics, from their catalogue."""

from __future__ import annotations

from collections.abc import Callable

from p2pavg.metrics.catalogue import METRICS, PEER
from pages.markdown import table


def metrics() -> str:
    """Name, labels beyond those of all, and meaning."""
    rows = [
        [
            f"`{metric.name}`",
            ", ".join(f"`{label}`" for label in metric.labels if label not in PEER),
            metric.help,
        ]
        for metric in METRICS
    ]
    return table(["metric", "labels", "meaning"], rows)


TABLES: dict[str, Callable[[], str]] = {"metrics": metrics}
