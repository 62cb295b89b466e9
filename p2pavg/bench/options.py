"""The values of benchmarks' options: argparse types, and the codec or the device that a word names."""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable
from typing import Any

from p2pavg import codecs
from p2pavg.errors import ConfigurationError

MOST = 10**12
MOST_PROCESSES = 256  # of one machine


def positive_int(text: str, most: int = MOST) -> int:
    """An argparse type: an int of at least 1."""
    if not text.isascii() or not text.isdigit() or len(text) > 20 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a whole number of at least 1")
    if int(text) > most:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {most:,}")
    return int(text)


def seed(text: str) -> int:
    """An argparse type: what random numbers begin with."""
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a whole number from 0 to 18 digits")
    return int(text)


def processes(text: str) -> int:
    """An argparse type: how many processes this machine shall start."""
    return positive_int(text, MOST_PROCESSES)


def at_least(least: float) -> Callable[[str], float]:
    """An argparse type: a finite number that is not below the bound."""

    def number(text: str) -> float:
        value = float(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least:g}")
        return value

    return number


def compression(text: str) -> str:
    """An argparse type: a codec by name, or MODULE:NAME of a class that the workers import."""
    if ":" not in text and text not in codecs.WIRE_IDS:
        known = ", ".join(codecs.WIRE_IDS)
        raise argparse.ArgumentTypeError(f"{text!r} is none of {known}, and no MODULE:NAME of a Codec")
    return text


def codec_of(text: str) -> str | codecs.Codec:
    """The codec of a value of `compression`. Raises ConfigurationError when its class is missing, or is no
    Codec.
    """
    module, colon, name = text.partition(":")
    if not colon:
        return text
    try:
        made = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigurationError(f"Cannot make the codec {text!r}: {error}") from None
    return codecs.get(made)


def torch_device(name: str) -> Any:
    """The torch.device of this name. Raises ConfigurationError when there is none here."""
    import torch

    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise ConfigurationError(f"Cannot use the device {name!r}: {why}") from None
    return device
