"""Pictures in files, by matplotlib where it is installed, and what all of them have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from p2pavg.errors import ConfigurationError
from p2pavg.extras import check_installed

HEADROOM = 1.08  # of an axis above its highest line, which would else be cut in half at the border


def check_plots() -> None:
    """Raises ConfigurationError where matplotlib is missing."""
    check_installed("Plots need", "matplotlib.figure")


def plot_path(text: str) -> str:
    """An argparse type: where a plot can be drawn. Checked before the work whose result it shows."""
    try:
        check_plots()
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    from matplotlib.backend_bases import FigureCanvasBase

    path, kinds = Path(text), FigureCanvasBase.get_supported_filetypes()
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder of {text!r} does not exist; make it first")
    if path.suffix[1:].lower() not in kinds:
        raise argparse.ArgumentTypeError(f"{text!r} is no picture: its name may end in .png, .svg or .pdf")
    return text


def save_plot(
    path: str | Path, draw: Callable[[Any], None], *, size: tuple[float, float] = (8.0, 4.5)
) -> None:
    """Let `draw` fill an empty matplotlib Figure of `size` inches and save it to `path`.

    Raises ConfigurationError when matplotlib is missing or cannot write that kind of file.
    """
    check_plots()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"axes.formatter.useoffset": False, "axes.formatter.limits": (-4, 7)}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        try:
            figure.savefig(path, dpi=120)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"Cannot write the plot {str(path)!r}: {error}.") from None


def from_zero(axes: Any) -> None:
    """Show the y axis from 0 to a little above whatever was drawn."""
    axes.set_ylim(0, HEADROOM * max(axes.dataLim.y1, axes.get_ylim()[1] / HEADROOM, 1e-12))


def whole(*axes: Any) -> None:
    """Ticks of these matplotlib Axis objects at whole numbers alone: there is no half peer."""
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def plain_log(axis: Any) -> None:
    """Numbers at a logarithmic Axis as people write them: 0.02, not 2 x 10^-2."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def __call__(self, x: float, pos: Any = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""  # empty: too many ticks for a label at each

    axis.set_major_formatter(Plain())
    axis.set_minor_formatter(Plain(labelOnlyBase=False, minor_thresholds=(1.5, 0.6)))
