"""What the user names as MODULE:NAME, imported from the current folder or from what is installed."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from p2pavg.errors import ConfigurationError


def named(text: str, what: str) -> Any:
    """The object. what: it is in the user's words. Raises ConfigurationError."""
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise ConfigurationError(f"{text!r} is no MODULE:NAME of {what}")
    sys.path.insert(0, "")  # the user's module may be in the current folder
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"cannot import {what} {text!r}: {error}") from None
    finally:
        sys.path.remove("")
