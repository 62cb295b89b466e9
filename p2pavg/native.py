"""The compiled modules, or their absence: the only importer of `p2pavg._native` and `p2pavg._cuda`.

`compiled` and `compiled_cuda` are those modules, typed by the stubs `_native.pyi` and `_cuda.pyi`.
Everything runs without them on pure-Python twins of the same bytes. `P2PAVG_NATIVE=0` in the environment
forces the twins, for tests and for finding out whose fault something is.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from p2pavg.errors import ConfigurationError

__all__ = ["Buffer", "available", "compiled", "compiled_cuda", "crc32", "cuda", "sources", "stale"]

Buffer: TypeAlias = npt.NDArray[np.uint8] | memoryview | bytearray | bytes
"""Contiguous bytes; writable where something is written."""

NVIDIA = Path("/dev/nvidiactl")  # there when a driver is loaded

logger = logging.getLogger("p2pavg.native")


@functools.cache
def sources() -> str | None:
    """SHA-256 over the C++ of this checkout, as CMakeLists.txt makes it; None: this is no checkout."""
    root = Path(__file__).parent.parent
    rooms = [root / "csrc" / room for room in ("bindings", "cpu", "cuda", "pump")]
    if not all(room.is_dir() for room in rooms):
        return None
    found = {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for room in rooms
        for path in room.rglob("*")
        if path.suffix in (".cpp", ".h", ".cu", ".cuh") and "tests" not in path.parts[len(root.parts) :]
    }
    return hashlib.sha256("".join(f"{name} {found[name]}\n" for name in sorted(found)).encode()).hexdigest()


def _is_stale(module: ModuleType) -> bool:
    """Whether a module was built of other C++ than this checkout holds: its calls and bytes may differ."""
    return sources() not in (None, getattr(module, "SOURCES", ""))


def _import_native() -> ModuleType | None:
    if os.environ.get("P2PAVG_NATIVE") == "0":
        return None
    try:
        loaded = importlib.import_module("p2pavg._native")
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        logger.warning(
            "The native module does not load (%s); the slower Python twin is used: rebuild it.", error
        )
        return None
    if not _is_stale(loaded):
        return loaded
    logger.warning(
        "The native module was built of other sources than csrc/ now holds; the slower Python twin is used: "
        "run 'make native'."
    )
    return None


_module = _import_native()


def stale() -> bool:
    """Whether the native module is there, and was built of other sources than this checkout holds."""
    if os.environ.get("P2PAVG_NATIVE") == "0":
        return False
    try:
        return _is_stale(importlib.import_module("p2pavg._native"))
    except ImportError:
        return False


def available() -> bool:
    """Whether the native CPU kernels (and the pump, if built) are in use."""
    return _module is not None


@functools.cache
def cuda() -> ModuleType | None:
    """`p2pavg._cuda` when it was built and a CUDA device works; else None, and one log line says why."""
    if os.environ.get("P2PAVG_NATIVE") == "0":
        return None
    try:
        loaded = importlib.import_module("p2pavg._cuda")
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        logger.warning("The CUDA module does not load (%s); gradients are encoded on the CPU.", error)
        return None
    if _is_stale(loaded):
        logger.warning(
            "The CUDA module was built of other sources than csrc/ now holds; gradients are encoded on the "
            "CPU: run 'make native'."
        )
        return None
    problem: str = loaded.problem()
    if problem:
        expected = logging.WARNING if NVIDIA.exists() else logging.INFO
        logger.log(expected, "No usable CUDA device (%s); gradients are encoded on the CPU.", problem)
        return None
    return loaded


class _Compiled:
    """In the place of a compiled module: looks up its names when they are used, since it may be absent."""

    def __init__(self, find: Callable[[], ModuleType | None], absent: Exception) -> None:
        self._find = find
        self._absent = absent

    def __getattr__(self, name: str) -> Any:
        module = self._find()
        if module is None:
            raise self._absent
        return getattr(module, name)


if TYPE_CHECKING:
    from p2pavg import _cuda as compiled_cuda
    from p2pavg import _native as compiled
else:
    compiled = _module or _Compiled(
        lambda: None,
        RuntimeError("p2pavg was installed without its native module; build it with `make native`."),
    )
    compiled_cuda = _Compiled(
        cuda,
        ConfigurationError("There is no usable CUDA device, or p2pavg was built without its CUDA module."),
    )


def crc32(data: Buffer, crc: int = 0) -> int:
    """CRC-32 of a contiguous buffer of bytes, as `zlib.crc32`; releases the GIL."""
    if _module is None:
        return zlib.crc32(data, crc)
    return compiled.crc32(data, crc)
