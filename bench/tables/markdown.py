"""Tables and figures as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = Sequence[str]


def table(head: Row, rows: Sequence[Row]) -> str:
    """Markdown; empty without rows."""
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def number(value: Any, digits: int = 3) -> str:
    """`digits` significant ones, without an exponent; yes or no; a dash for nothing."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if isinstance(value, list):
        return number(sum(value) / len(value), digits) if value else "–"
    if isinstance(value, str):
        return value
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    if abs(value) < 1e-4:
        return f"{value:.1e}"
    whole = len(str(int(abs(value))))
    return f"{value:.{max(0, digits - (whole if abs(value) >= 1 else 0))}f}"
