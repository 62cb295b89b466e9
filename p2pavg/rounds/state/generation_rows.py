"""A peer's generations as plain rows, which travel with every state and stand in every checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from p2pavg.errors import StateError
from p2pavg.rounds.protocol.roles import Generation

Generations = tuple[Generation, ...]
MOST_ROWS = 1024
KINDS = (int, bytes, int, int, int, bytes)


def to_rows(history: Iterable[Generation], epoch: int) -> list[list[Any]]:
    """The last generations that made the state of `epoch`, oldest first."""
    rows = [
        [g.epoch, g.lineage, g.transfer, g.samples, g.total, g.leader] for g in history if g.epoch < epoch
    ]
    return rows[-MOST_ROWS:]


def from_rows(rows: Any) -> Generations:
    """Raises StateError for anything but what `to_rows` gives."""
    sound = isinstance(rows, list) and all(isinstance(row, (list, tuple)) for row in rows)
    parsed = [tuple(row) for row in rows[-MOST_ROWS:]] if sound else [()]
    if not all(_is_sound(row) for row in parsed):
        raise StateError("the history of a state is malformed; another one will be used")
    return tuple(Generation(*row) for row in parsed)


def _is_sound(row: tuple[Any, ...]) -> bool:
    if tuple(type(field) for field in row) != KINDS:
        return False
    return all(0 <= field < 2**63 for field in row if type(field) is int)
