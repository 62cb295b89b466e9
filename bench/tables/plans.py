"""What plans are held to."""

from __future__ import annotations

from typing import Any

from bench.tables.markdown import Row, number, table
from bench.tables.results import measured, result
from p2pavg.bench.result import FAILED


def plans() -> str:
    """Each bar, and what was measured."""
    content = result("plans")
    if content is None:
        return ""
    found = [each for name, rows in content.items() if name not in ("environment", FAILED) for each in rows]
    rows: list[Row] = [[each["what"], _bar(each), _found(each)] for each in found]
    late = any(each.get("late") for each in found)
    note = " The lab's router was late where a figure is marked with *." if late else ""
    note += "".join(f" {name} failed: {why}." for name, why in content.get(FAILED, {}).items())
    return table(["what", "bar", "measured"], rows) + f"\n{measured(content)}.{note}\n"


def _bar(each: dict[str, Any]) -> str:
    return f"{'≤' if each['most'] else '≥'} {number(each['bar'])}"


def _found(each: dict[str, Any]) -> str:
    """Bold where it misses the bar."""
    said = number(each["found"]) + ("*" if each.get("late") else "")
    return f"**{said}**" if each["holds"] is False else said
