"""Replays of published swarms: what was foretold, what came, and Hivemind beside it."""

from __future__ import annotations

from typing import Any

from bench.tables.markdown import Row, table
from bench.tables.results import measured, results

HEAD = ("swarm, scale", "foretold", "p2pavg", "Hivemind, same network", "peers in Hivemind's averages")


def scenarios() -> str:
    """Seconds of an epoch, of every swarm and model that was replayed."""
    found = dict(results("scenario"))
    rows = [_row(content) for content in found.values()]
    notes = [f"`{name}`: {measured(content)}" for name, content in found.items()]
    return table((*HEAD, "published, Hivemind"), rows) + (f"\n{'; '.join(notes)}.\n" if notes else "")


def _row(content: dict[str, Any]) -> Row:
    came, said = content["measured_epoch_s"], content["predicted_epoch_s"]
    sizes = content.get("hivemind_averages_by_peers", {})
    groups = ", ".join(f"{'failed' if n == '0' else n} ({times}×)" for n, times in sizes.items())
    return [
        f"{content['scenario']} {content['model']}, {content['scale']:g}",
        f"{said:.1f} s ({said / came - 1:+.1%})",
        f"{came:.1f} s{_late(content['lab'])}",
        _hivemind(content),
        groups or "–",
        f"{content['printed_hivemind_epoch_s']:.1f} s" if content["printed_hivemind_epoch_s"] else "–",
    ]


def _hivemind(content: dict[str, Any]) -> str:
    if content.get("hivemind_failed"):
        return f"failed: {content['hivemind_failed']}"
    seconds = content["hivemind_epoch_s"]
    return "–" if seconds is None else f"{seconds:.1f} s{_late(content['hivemind_lab'])}"


def _late(lab: dict[str, Any]) -> str:
    return " (void)" if lab["void"] else ""
