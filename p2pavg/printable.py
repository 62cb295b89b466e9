"""Text that other peers wrote, made safe for a log or a terminal, and words for numbers."""

from __future__ import annotations

import signal

from p2pavg.errors import P2PAvgError

MOST_RAISED = 150  # characters of what somebody else's code raised


def printable(text: str) -> str:
    """The text without characters that move the cursor or end the line."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def raised(error: Exception) -> str:
    """What was raised, on one line and not long: with its kind, unless the sentence is p2pavg's own."""
    text = printable(str(error)).strip()
    if isinstance(error, P2PAvgError):
        return text
    named = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return named if len(named) <= MOST_RAISED else f"{named[:MOST_RAISED]}…"


def counted(count: int, noun: str) -> str:
    """ "1 peer", "2 peers"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def size(nbytes: float) -> str:
    """Bytes in words, decimal: "310 B", "4.2 kB", "1.5 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{figure(nbytes)} TB"


def figure(value: float, digits: int = 3) -> str:
    """A number with about so many digits, and never a large one as a power of ten: "68,270", "4.25"."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def ending(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed (signal {-code})"
