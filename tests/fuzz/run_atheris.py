"""Coverage-guided fuzzing of one parser, in the process that calls it. Importing this needs atheris."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import NoReturn

import atheris

_MODULES = ["p2pavg", "tests.fuzz"]

# It names every module on stderr.
with contextlib.redirect_stderr(io.StringIO()), atheris.instrument_imports(include=_MODULES):
    import p2pavg.optim.tree  # noqa: F401  (a target imports it, with PyTorch, only when it runs)
    from tests.fuzz.targets import TARGETS


def fuzz(name: str, options: Sequence[str]) -> NoReturn:
    """Fuzz until the options (libFuzzer's) or a crash end this process."""
    parse = TARGETS[name].parse
    atheris.Setup(["fuzz", *options], lambda data: parse(data) and None)
    atheris.Fuzz()
    raise SystemExit(0)
