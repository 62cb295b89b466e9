"""The optimizers that are open in this process, and the end of one that is dropped without close()."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Iterable
from typing import Protocol

import torch

from p2pavg.errors import ConfigurationError

logger = logging.getLogger("p2pavg.optim")


class Open(Protocol):
    """An optimizer that takes part in a run."""

    @property
    def run_id(self) -> str: ...

    def owns(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether the optimizer trains one of these parameters now."""


class Closeable(Protocol):
    """Something that an optimizer holds open."""

    def close(self) -> None: ...


_open: weakref.WeakKeyDictionary[Open, tuple[list[Closeable], bytes]] = weakref.WeakKeyDictionary()


_closing: list[threading.Thread] = []  # what dropped optimizers held
CLOSING_S = 10.0  # how long that is waited for


def check_free(params: Iterable[torch.Tensor]) -> None:
    """Raises ConfigurationError when another optimizer already trains one of these. One that was dropped
    lets go of them first.
    """
    params = list(params)
    if _owner(params) is not None:
        gc.collect()  # it may have been dropped, and only wait to be collected
    while _closing:
        _closing.pop().join(CLOSING_S)
    other = _owner(params)
    if other is not None:
        raise ConfigurationError(
            f"these parameters already train in run {other.run_id!r}: close() that optimizer first, as "
            "opt.close(), before you build another one on them"
        )


def _owner(params: list[torch.Tensor]) -> Open | None:
    return next((other for other in list(_open) if other.owns(params)), None)


def warn_of_another_model(run_id: str, schema: bytes) -> None:
    """Warn of an optimizer that is open in the same run with another model, as when a cell of a notebook ran
    again. schema: of the model that enters.
    """
    if _has_another_model(run_id, schema):
        gc.collect()  # it may have been dropped, and only wait to be collected
    if _has_another_model(run_id, schema):
        logger.warning(
            "another optimizer of run %r is open in this process, with another model, and stays a peer "
            "that this one cannot train with; close() it, as opt.close(), or take another run_id",
            run_id,
        )


def _has_another_model(run_id: str, schema: bytes) -> bool:
    return any(
        held and other.run_id == run_id and theirs != schema for other, (held, theirs) in list(_open.items())
    )


def enter(optimizer: Open, held: list[Closeable], schema: bytes) -> None:
    """Note an open optimizer. held: what to close when it is dropped, the last first, empty when it is
    closed; a live list. schema: of its model.
    """
    _open[optimizer] = held, schema
    weakref.finalize(optimizer, _dropped, held).atexit = False


def _dropped(held: list[Closeable]) -> None:
    """Close what a dropped optimizer held, on a new thread: the one that collects garbage must not wait."""
    if held:
        thread = threading.Thread(target=_close, args=(held,), name="p2pavg-dropped", daemon=True)
        thread.start()
        _closing.append(thread)


def _close(held: list[Closeable]) -> None:
    while held:
        held.pop().close()
