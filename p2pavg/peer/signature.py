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


def _meant(given: Iterable[str], expected: inspect.Signature) -> str:
    """The argument that a misspelt one may stand for, as the end of a sentence."""
    for name in given:
        close = difflib.get_close_matches(name, expected.parameters, 1)
        if name not in expected.parameters and close:
            return f"; did you mean {close[0]!r}?"
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
                raise TypeError(f"{type(self).__name__}: {error}{_meant(kwargs, expected)}") from None
            init(self, options(*args, **kwargs))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        shown = expected.replace(parameters=[own, *expected.parameters.values()])
        constructor.__signature__ = shown  # type: ignore[attr-defined]
        return constructor

    return decorate
