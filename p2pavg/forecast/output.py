"""How the verbs of foresight end: figures as JSON, lines for people, and mistakes as usage errors."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from p2pavg.errors import ConfigurationError


def usage(parser: argparse.ArgumentParser, args: argparse.Namespace, run: Callable[..., int]) -> int:
    """Mistakes in what was asked for are usage errors: exit code 2."""
    try:
        return run(args)
    except ConfigurationError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def emit(path: str | None, figures: Mapping[str, Any], lines: Sequence[str]) -> int:
    """Write the figures to `path`, if there is one, and the lines to stdout, unless the figures go there."""
    text = json.dumps(figures, indent=1, allow_nan=False)
    if path == "-":
        print(text)
        return 0
    if path:
        write(path, text + "\n")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def write(path: str, text: str) -> None:
    """Write a file. Raises ConfigurationError when that fails."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write {path!r}: {error.strerror}") from None
