"""Text that somebody else wrote, on its way to a log or a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Without what would move a cursor or end a line."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
