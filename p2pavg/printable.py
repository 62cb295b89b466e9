"""Text that other peers wrote, made safe for a log or a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text without characters that move the cursor or end the line."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def counted(count: int, noun: str) -> str:
    """ "1 peer", "2 peers"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
