"""The fields of a control message as msgpack brings them: each check returns the value or raises."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from p2pavg.errors import ProtocolError
from p2pavg.printable import printable

MAX_MEMBERS = 1024
MAX_TEXT = 400
MAX_NOTE = 1 << 16  # bytes
MAX_INT = 2**62

Check = Callable[[Any], Any]


def malformed(what: str) -> ProtocolError:
    """The error about a peer that sent a malformed message."""
    return ProtocolError(
        f"a round message is malformed ({what}); the sender runs another version or is broken"
    )


def integer(value: Any) -> int:
    """0 <= value < MAX_INT."""
    if type(value) is not int or not 0 <= value < MAX_INT:
        raise malformed("a count is not an integer in range")
    return value


def signed(value: Any) -> int:
    """-MAX_INT < value < MAX_INT."""
    if type(value) is not int or not -MAX_INT < value < MAX_INT:
        raise malformed("a count is not an integer in range")
    return value


def number(value: Any) -> float:
    """Finite and not negative."""
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value < 1e18:
        raise malformed("a number is not finite and non-negative")
    return float(value)


def boolean(value: Any) -> bool:
    """True or False; a number is neither."""
    if type(value) is not bool:
        raise malformed("a flag is not a boolean")
    return value


def text(value: Any) -> str:
    """At most MAX_TEXT characters; a space stands for each character that cannot be printed."""
    if type(value) is not str or len(value) > MAX_TEXT:
        raise malformed("a text is missing or too long")
    return printable(value)


def sized(size: int) -> Check:
    """Bytes of the length that is named."""

    def check(value: Any) -> bytes:
        if type(value) is not bytes or len(value) != size:
            raise malformed(f"a field is not {size} bytes")
        return value

    return check


def note(value: Any) -> bytes:
    """At most MAX_NOTE bytes."""
    if type(value) is not bytes or len(value) > MAX_NOTE:
        raise malformed("a note is missing or too long")
    return value


def optional(inner: Check) -> Check:
    """None, or what `inner` accepts."""
    return lambda value: None if value is None else inner(value)


def listed(inner: Check) -> Check:
    """At most MAX_MEMBERS of what `inner` accepts, as a tuple."""

    def check(value: Any) -> tuple[Any, ...]:
        if type(value) not in (list, tuple) or len(value) > MAX_MEMBERS:
            raise malformed("a list is missing or too long")
        return tuple(inner(item) for item in value)

    return check


def items(value: Any, count: int) -> Any:
    """A record of as many fields as are named."""
    if type(value) not in (list, tuple) or len(value) != count:
        raise malformed(f"a record does not have {count} fields")
    return value
