"""What a fuzz target is, and what several of them need."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Parser = Callable[[bytes], object]


@dataclass(frozen=True)
class Target:
    """parse takes any bytes and returns; raising anything is a bug. seeds: what it is there for."""

    name: str
    parse: Parser
    seeds: Callable[[], list[bytes]]


def quiet(parser: Parser, *expected: type[Exception]) -> Parser:
    """Errors that the parser documents are no bugs."""

    def parse(data: bytes) -> object:
        try:
            return parser(data)
        except expected:
            return None

    return parse


@functools.cache
def _memory_file() -> tuple[int, Path]:
    """(descriptor, path) of a private file; in memory where that can be, for disks are slow."""
    if not hasattr(os, "memfd_create"):
        descriptor, name = tempfile.mkstemp()
        return descriptor, Path(name)
    descriptor = os.memfd_create("fuzz")
    os.fchmod(descriptor, 0o600)
    return descriptor, Path(f"/proc/self/fd/{descriptor}")


def file_with(data: bytes) -> Path:
    """The path of a file that holds these bytes, until the next call."""
    descriptor, path = _memory_file()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, data, 0)
    return path
