"""What kind of thing an argument of a user must be, by its annotation. May import `errors`."""

from __future__ import annotations

import collections.abc
import functools
import math
import os
import sys
import types
import typing
from dataclasses import fields
from typing import Any

from p2pavg.errors import ConfigurationError

MOST = sys.float_info.max  # of a number where no other limit is named: it is finite
MOST_SAMPLES = 10**15  # of an epoch, a step
MOST_EPOCHS = 10**9
MOST_SECONDS = 1e6  # of a wait
MOST_MBPS = 1e9
MOST_PEERS = 10_000  # far more than a run may have
MOST_SHOWN = 60  # characters of a wrong value
_WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    type(None): "None",
    os.PathLike: "a path",
    collections.abc.Callable: "a function",
    collections.abc.Sequence: "a list",
    collections.abc.Mapping: "a dict",
}
_LIST = collections.abc.Sequence


def check_fields(options: Any, declared: type) -> None:
    """Raises ConfigurationError for a field of a dataclass that is not what its annotation says.

    declared: the class whose own fields are looked at, without those of the classes that it derives from.
    """
    hints = _hints(declared)
    for option in fields(declared):
        if option.name in declared.__annotations__:
            value = getattr(options, option.name)
            check(option.name, value, hints[option.name], shown=option.repr)


def check(name: str, value: object, kind: Any, *, shown: bool = True) -> None:
    """Raises ConfigurationError unless `value` is what the annotation `kind` says. NaN is no number, True and
    False are none either.

    shown: False: the value may be a secret, and is not told.
    """
    if not _is(value, kind):
        words = list(dict.fromkeys(_words(one) for one in _choices(kind)))
        told = ", ".join(words[:-1]) + " or " * (len(words) > 1) + words[-1]
        raise ConfigurationError(
            f"{name} must be {told}, not {seen(value) if shown else _named(type(value))}"
        )


def check_number(name: str, value: object, least: float = 0.0, most: float = MOST) -> None:
    """Raises ConfigurationError unless `value` is a number from `least` to `most`."""
    if not _is(value, float) or not least <= value <= most:  # type: ignore[operator]
        told = f"of at least {least:g}" if most >= MOST else f"from {least:g} to {most:,g}"
        raise ConfigurationError(f"{name} must be a number {told}, not {seen(value)}")


def check_whole(name: str, value: object, least: int, most: float = math.inf) -> None:
    """Raises ConfigurationError unless `value` is a whole number from `least` to `most`."""
    if not _is(value, int) or not least <= value <= most:  # type: ignore[operator]
        told = f"from {least} to {most:,}" if most < math.inf else f"of at least {least}"
        raise ConfigurationError(f"{name} must be a whole number {told}, not {seen(value)}")


def whole_of(name: str, text: str, least: int, most: int) -> int:
    """The whole number that a text of the environment is. Raises ConfigurationError unless it is one from
    `least` to `most`.
    """
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
        raise ConfigurationError(f"{name} must be a whole number from {least} to {most}, not {seen(text)}")
    return int(text)


def seen(value: object) -> str:
    """A wrong value in a message, on one line and not long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python writes no more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}… ({_named(type(value))})"


@functools.cache
def _hints(declared: type) -> dict[str, Any]:
    return typing.get_type_hints(declared)


def _choices(kind: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation."""
    return typing.get_args(kind) if isinstance(kind, types.UnionType) or _is_union(kind) else (kind,)


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) is typing.Union


def _is(value: object, kind: Any) -> bool:
    if kind is Any or kind is object:
        return True
    choices = _choices(kind)
    if len(choices) > 1:
        return any(_is(value, one) for one in choices)
    plain = typing.get_origin(kind) or kind
    if plain is bool or plain is str or plain is type(None):
        return isinstance(value, plain)
    if plain is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if plain is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and value == value
    if plain is _LIST:
        if isinstance(value, str | bytes | collections.abc.Mapping):
            return False
        item = typing.get_args(kind)[0]
        return isinstance(value, collections.abc.Collection) and all(_is(each, item) for each in value)
    return isinstance(value, plain)


def _words(kind: Any) -> str:
    plain = typing.get_origin(kind) or kind
    words = _WORDS.get(plain) or f"a {_named(plain)}"
    return f"{words} of texts" if typing.get_args(kind) == (str,) and plain is _LIST else words


def _named(kind: Any) -> str:
    """A class as users call it."""
    home = kind.__module__.partition(".")[0]
    return kind.__qualname__ if home == "builtins" else f"{home}.{kind.__qualname__}"
