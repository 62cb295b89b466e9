"""Pictures in files, by matplotlib where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from p2pavg.errors import ConfigurationError


def save_plot(
    path: str | Path, draw: Callable[[Any], None], *, size: tuple[float, float] = (8.0, 4.5)
) -> None:
    """Let `draw` fill an empty matplotlib Figure of `size` inches and save it to `path`.

    Raises ConfigurationError when matplotlib is missing or cannot write that kind of file.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError("Plots need matplotlib: pip install 'p2pavg[plot]'.") from None
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"Cannot write the plot {str(path)!r}: {error}.") from None
