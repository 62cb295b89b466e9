"""A dataclass's fields as the arguments of a constructor, so that a list of options is written once."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Concatenate, ParamSpec, TypeVar

Self = TypeVar("Self")
Options = TypeVar("Options")
P = ParamSpec("P")


def _unexpected(given: Iterable[str], expected: inspect.Signature) -> str:
    """The first argument that is not expected, and the one that it may stand for; empty: all are expected."""
    for name in given:
        if name not in expected.parameters:
            close = difflib.get_close_matches(name, expected.parameters, 1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            return f"got an unexpected keyword argument {name!r}{meant}"
    return ""


def _missing(owner: type, expected: inspect.Signature, args: tuple[object, ...], given: Iterable[str]) -> str:
    """The first argument that has to be given and is not, and what it means, by the docstring of the class;
    empty: none.
    """
    for name in [*expected.parameters][len(args) :]:
        if expected.parameters[name].default is inspect.Parameter.empty and name not in given:
            said = re.search(rf"^ *{name}: ([^;:.]*)", inspect.getdoc(owner) or "", re.MULTILINE)
            meaning = f", {' '.join(said[1].split())}" if said else ""
            return f"the argument {name!r} is missing{meaning}"
    return ""


def check_arguments(
    owner: type, expected: inspect.Signature, args: tuple[object, ...], given: Mapping[str, object]
) -> None:
    """Raises TypeError, which names the class and the argument, unless a constructor of `owner` takes these
    arguments.
    """
    try:
        expected.bind(*args, **given)
    except TypeError as error:
        told = _unexpected(given, expected) or _missing(owner, expected, args, given) or error
        raise TypeError(f"{owner.__name__}: {told}") from None


def takes(
    options: Callable[P, Options],
) -> Callable[[Callable[[Self, Options], None]], Callable[Concatenate[Self, P], None]]:
    """Decorates an `__init__(self, options)`: callers give the arguments of `options`, a dataclass.

    Type checkers, `help()` and the reference see those arguments as the constructor's own.
    """
    expected = inspect.signature(options)

    def decorate(init: Callable[[Self, Options], None]) -> Callable[Concatenate[Self, P], None]:
        @functools.wraps(init)
        def constructor(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> None:
            check_arguments(type(self), expected, args, kwargs)
            init(self, options(*args, **kwargs))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        shown = expected.replace(parameters=[own, *expected.parameters.values()])
        constructor.__signature__ = shown  # type: ignore[attr-defined]
        return constructor

    return decorate
