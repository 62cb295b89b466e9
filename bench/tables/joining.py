"""Joining over slow links: the cells of `bench.join_matrix`, beside what is allowed."""

from __future__ import annotations

from typing import Any

from bench.tables.markdown import Row, number, table
from bench.tables.results import measured, result

HEAD = (
    *("links / epoch / state", "state alone", "a result's share of the link", "in after", "allowed"),
    *("state's bytes sent", "donors kept", "donors lost, of the state's time", "measured"),
)


def joining() -> str:
    """One row for each cell that was measured; a figure beyond its bar is bold."""
    found = result("join_matrix")
    return "" if found is None else table(HEAD, [_row(name, cell) for name, cell in found["cells"].items()])


def _row(name: str, cell: dict[str, Any]) -> Row:
    within, fits = cell["within"], cell["results_fit"]

    def bold(text: str, good: bool) -> str:
        return text if good else f"**{text}**"

    return [
        f"`{name}`",
        f"{cell['state_s']:.1f} s",
        number(cell["result_load"]),
        bold(f"{cell['in_s']:.1f} s", within["in"]),
        f"{cell['in_bar_s']:.1f} s",
        bold(f"{cell['sent_over_state']:.2f}", within["sent"]),
        bold(f"{cell['kept']:.2f}", within["donors"] or not fits),
        bold(f"{cell['lost_over_state']:.2f}", within["donors"] or fits),
        measured(cell),
    ]
