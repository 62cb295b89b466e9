"""Figures that a script logs during an epoch, for the report of that epoch."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from p2pavg import kinds
from p2pavg.errors import ConfigurationError

MOST = 32  # names
MOST_NAME = 64  # characters


class Logged:
    """Means of figures over an epoch. Any thread may use it."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def add(self, figures: Mapping[str, float]) -> None:
        """Take figures by name. Raises ConfigurationError for what is no number, or too many names."""
        told = {name: _number(name, value) for name, value in figures.items()}
        with self._lock:
            if len(self._sums.keys() | told.keys()) > MOST:
                raise ConfigurationError(
                    f"log() takes at most {MOST} names; use a logger of your own for more"
                )
            for name, value in told.items():
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + value, count + 1

    def take(self) -> dict[str, float]:
        """The means since the last call."""
        with self._lock:
            sums, self._sums = self._sums, {}
        return {name: total / count for name, (total, count) in sums.items()}


def _number(name: str, value: object) -> float:
    try:
        if len(name) > MOST_NAME:
            raise ValueError
        return float(value)  # type: ignore[arg-type]  # tensors, too
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ConfigurationError(
            "log() takes numbers by short names, such as log(loss=1.5), not "
            f"{name[:MOST_NAME]}={kinds.seen(value)}"
        ) from None
