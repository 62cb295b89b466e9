"""Text that other peers wrote, made safe for a log or a terminal, and words for numbers."""

from __future__ import annotations

import signal


def printable(text: str) -> str:
    """The text without characters that move the cursor or end the line."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def counted(count: int, noun: str) -> str:
    """ "1 peer", "2 peers"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def ending(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed (signal {-code})"
