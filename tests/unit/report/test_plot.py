"""Pictures: whole peers, plain numbers, nothing cut off at the border, a title on each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2pavg.bench import accumulate
from p2pavg.bench.codec import verb as codec
from p2pavg.bench.dht import verb as dht
from p2pavg.bench.join import verb as join
from p2pavg.bench.penalty import verb as penalty
from p2pavg.bench.rounds import verb as rounds
from p2pavg.monitor import plots
from p2pavg.report.plot import from_zero, plain_log, save_plot, whole
from p2pavg.report.reading import Run
from tests.unit.report.reports import report

pytest.importorskip("matplotlib")
RESULTS = Path(__file__).parents[3] / "bench" / "results"


def drawn(tmp_path: Path, draw: Callable[[Any], None]) -> Any:
    """The figure, with everything where it is in the file."""
    figures = []
    save_plot(tmp_path / "plot.png", lambda figure: figures.append(figure) or draw(figure))
    return figures[0]


def labels(axis: Any) -> list[str]:
    return [text.get_text() for text in axis.get_ticklabels(which="both") if text.get_text()]


def test_peers_are_whole(tmp_path: Path) -> None:
    """Ticks of a count stand at whole numbers, however small the counts are."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.plot([0, 1, 2], [1, 2, 1])
        whole(axes.xaxis, axes.yaxis)

    axes = drawn(tmp_path, draw).axes[0]
    for ticks in (axes.get_xticks(), axes.get_yticks()):
        assert all(tick == int(tick) for tick in ticks)


def test_a_level_line_is_not_cut(tmp_path: Path) -> None:
    """Above the highest line is room, also when all lines are level and the axis begins at 0."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.plot([0, 1], [0.5, 0.5])
        from_zero(axes)

    low, high = drawn(tmp_path, draw).axes[0].get_ylim()
    assert low == 0
    assert 0.52 < high < 0.6


def test_small_rates_are_written_out(tmp_path: Path) -> None:
    """A logarithmic axis says 0.02, not 2 x 10 to the power of -2."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.plot([1, 2, 4], [0.019, 0.04, 0.07])
        axes.set_yscale("log")
        plain_log(axes.yaxis)

    found = labels(drawn(tmp_path, draw).axes[0].yaxis)
    assert "0.02" in found
    assert not any("10" in label or "times" in label or "e" in label for label in found)


@pytest.mark.parametrize(
    ("draw", "result"),
    [
        (accumulate.draw, "accumulate_10M.json"),
        (codec.draw, "codec.json"),
        (penalty.draw, "penalty.json"),
        (rounds._draw, "rounds.json"),
        (join._draw, "join_200MB.json"),
        (dht._draw, "dht.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_benchmarks_picture_has_a_title(
    tmp_path: Path, draw: Callable[[Any, dict[str, Any]], None], result: str
) -> None:
    """What is drawn of a recorded result says above what it is."""
    measured = json.loads((RESULTS / result).read_text())
    assert drawn(tmp_path, lambda figure: draw(figure, measured)).axes[0].get_title()


def test_the_page_of_a_run_has_whole_peers_and_epochs(tmp_path: Path) -> None:
    """Few epochs of few peers: their axes count in ones."""
    run = Run("r", tuple(report(epoch=epoch, members=report().members[: 1 + epoch]) for epoch in range(2)))
    figure = drawn(tmp_path, lambda figure: plots.draw(figure, run))
    peers, epochs = figure.axes[2].get_yticks(), figure.axes[-1].get_xticks()
    assert all(tick == int(tick) for tick in (*peers, *epochs))
