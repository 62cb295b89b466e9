"""A list of short lines, packed small, and the first line in which two lists differ."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgpack

from p2pavg.printable import printable

MAX_PACKED = 2048
_MAX_PLAIN = 1 << 20
_MAX_LINES = 1 << 17


def pack(lines: Sequence[str]) -> bytes:
    """The lines, packed; b"" when they do not fit into MAX_PACKED bytes."""
    different = list(dict.fromkeys(lines))
    places = {line: number for number, line in enumerate(different)}
    order = [places[line] for line in lines]
    packed = zlib.compress(msgpack.packb([different, order]), 9)
    return packed if len(packed) <= MAX_PACKED else b""


def unpack(packed: object) -> list[str]:
    """The lines that were packed; [] for b"", and for bytes that `pack` does not make."""
    if not isinstance(packed, bytes) or not packed or len(packed) > MAX_PACKED:
        return []
    try:
        plain = zlib.decompressobj().decompress(packed, _MAX_PLAIN)
        different, order = msgpack.unpackb(plain)
        if len(order) > _MAX_LINES or not all(isinstance(line, str) for line in different):
            return []
        return [different[number] for number in order if number >= 0]
    except (zlib.error, ValueError, TypeError, IndexError, msgpack.UnpackException):
        return []


def first_difference(mine: Sequence[str], theirs: Sequence[str], me: str, them: str) -> str:
    """The first difference, in words; "" when there is none, or nothing to compare.

    A line is named by its first word and its number among the lines with that word.
    """
    if not mine or not theirs:
        return ""
    for at in range(max(len(mine), len(theirs))):
        here, there = _line(mine, at), _line(theirs, at)
        if here == there:
            continue
        longer = mine if at < len(mine) else theirs
        kind = longer[at].split(" ")[0]
        number = sum(line.split(" ")[0] == kind for line in longer[:at])
        name = f"{kind} {number}" if number or kind != "optimizer" else kind
        return f"{name} is {_said(here, kind)} at peer {me} and {_said(there, kind)} at peer {them}"
    return ""


def _line(lines: Sequence[str], at: int) -> str:
    return lines[at] if at < len(lines) else "missing"


def _said(line: str, kind: str) -> str:
    return printable(line.removeprefix(f"{kind} "))[:200]
