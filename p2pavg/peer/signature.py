"""A dataclass's fields as the arguments of a constructor, so that a list of options is written once."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
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
            try:
                expected.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{type(self).__name__}: {_unexpected(kwargs, expected) or error}") from None
            init(self, options(*args, **kwargs))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        shown = expected.replace(parameters=[own, *expected.parameters.values()])
        constructor.__signature__ = shown  # type: ignore[attr-defined]
        return constructor

    return decorate
