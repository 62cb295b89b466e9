"""Plain data as YAML, for files that people read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

_PLAIN = re.compile(r"([A-Za-z_/~]|\./)[A-Za-z0-9_./@ ~-]*")  # a text that needs no quotes
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "none", "y", "n", "~", "."}


def render(value: object) -> str:
    """Mappings, lists, texts, numbers, booleans and None as a YAML document."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: object) -> list[str]:
    if isinstance(value, Mapping) and value:
        lines: list[str] = []
        for key, of in value.items():
            lines += _under(f"{_scalar(str(key))}:", of)
        return lines
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        lines = []
        for of in value:
            nested = _lines(of)
            lines += [f"- {nested[0]}", *(f"  {line}" for line in nested[1:])]
        return lines
    return [_scalar(value)]


def _under(key: str, value: object) -> list[str]:
    if isinstance(value, str) and "\n" in value and value == _plain_block(value):
        return [f"{key} |", *(f"  {line}".rstrip() for line in value.rstrip("\n").split("\n"))]
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str) and value:
        return [key, *(f"  {line}" for line in _lines(value))]
    return [f"{key} {_scalar(value)}"]


def _plain_block(text: str) -> str:
    """The text as a literal block keeps it: one newline at its end, no blanks at the ends of lines."""
    return "\n".join(line.rstrip() for line in text.rstrip("\n").split("\n")) + "\n"


def _scalar(value: object) -> str:
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS and not value.endswith(" ")
        return value if plain else json.dumps(value)
    if isinstance(value, Sequence):
        return "[]"
    return json.dumps(value)
