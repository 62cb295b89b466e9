"""Strict checks of what a peer says to a watcher: each returns the value or raises Malformed. Pure."""

from __future__ import annotations

from p2pavg.identity import PEER_ID_BYTES
from p2pavg.printable import printable

MOST_ROWS = 1024
MOST_TEXT = 400
MOST = 10**15


class Malformed(Exception):
    """The value is none that a correct peer sends."""


def peer_id(value: object) -> bytes:
    """The value, when it is PEER_ID_BYTES bytes."""
    if not isinstance(value, bytes) or len(value) != PEER_ID_BYTES:
        raise Malformed
    return value


def peer_id_or_none(value: object) -> bytes:
    """The value, when it is a peer id, or empty: nobody."""
    return b"" if value == b"" else peer_id(value)


def count(value: object) -> int:
    """The value, when it is an int and 0 <= value < MOST."""
    if type(value) is not int or not 0 <= value < MOST:
        raise Malformed
    return value


def number(value: object) -> float:
    """The value, when 0 <= value < MOST; 0 when a quotient by it would overflow."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < MOST:
        raise Malformed
    return float(value) if value * MOST > 1 else 0.0


def float_or_none(value: object) -> float | None:
    """The value, when it is a float, of any size or no number at all, or None."""
    if value is not None and type(value) is not float:
        raise Malformed
    return value


def text(value: object) -> str:
    """The text, cut to MOST_TEXT characters, with spaces for characters that cannot be printed."""
    if not isinstance(value, str) or len(value) > MOST_TEXT:
        raise Malformed
    return printable(value)


def rows(value: object, columns: int) -> list[list[object]]:
    """At most MOST_ROWS lists, each cut to `columns` items: later versions append more."""
    if not isinstance(value, list) or len(value) > MOST_ROWS:
        raise Malformed
    if not all(isinstance(row, list) and len(row) >= columns for row in value):
        raise Malformed
    return [row[:columns] for row in value]
