"""Each index of the data in one average per pass: recomputed from what the averages of a run held."""

from __future__ import annotations

from typing import Any

import pytest

from p2pavg.bench.chaos.passes import Data, count_passes, is_exact
from p2pavg.data.permutation import EvenBlocks

DATA = Data(length=20, passes=2, block=4, seed=1, batch=2)
BLOCKS = EvenBlocks(DATA.length, DATA.block, DATA.seed)


def average(epoch: int, first: int, end: int, **other: Any) -> dict[str, Any]:
    """One of the surviving lineage, with the positions from first to end of the endless sequence of
    passes.
    """
    cut = [(first, min(end, DATA.length))] if first < DATA.length else []
    cut += [(max(first, DATA.length), end)] if end > DATA.length else []
    return {
        "t": "epoch",
        "who": "a",
        "at": float(epoch),
        "epoch": epoch,
        "lineage": f"won{epoch}",
        "indices": [BLOCKS.index(position) for position in range(first, end)],
        "consumed": [(b // DATA.length, b % DATA.length, b % DATA.length + e - b) for b, e in cut],
        "discarded": 0,
        **other,
    }


def finished(epochs: int, consumed: int) -> dict[str, Any]:
    history = {str(epoch): f"won{epoch}" for epoch in range(epochs)}
    return {
        "t": "finished",
        "who": "a",
        "at": 9.0,
        "history": history,
        "consumed": [[0, consumed]],
        "longest_draw_s": 0.0,
    }


def test_two_passes_are_whole() -> None:
    """Averages that hold each position once are as promised, also across the end of a pass."""
    lost = average(1, 12, 16, lineage="gone1", indices=[0, 0, 0, 0])  # of the side that gave way
    events = [average(0, 0, 15), lost, average(1, 15, 30), average(2, 30, 40), finished(3, 40)]
    found = count_passes(events, DATA)
    assert is_exact(found)
    assert not any(value for name, value in found.items() if name != "data")


@pytest.mark.parametrize(
    ("events", "what"),
    [
        ([average(0, 0, 15), average(1, 15, 39), finished(2, 39)], "indices_missing"),
        ([average(0, 0, 15), average(1, 14, 40), finished(2, 40)], "indices_doubled"),
        ([average(0, 0, 39), average(1, 39, 40, indices=[0]), finished(2, 40)], "averages_misnamed"),
        ([average(0, 0, 15), average(1, 16, 40), finished(2, 40)], "indices_untold"),
    ],
)
def test_what_is_not_as_promised_is_counted(events: list[dict[str, Any]], what: str) -> None:
    """A position in no average, in two, another index than is named, one that is consumed in no average."""
    found = count_passes(events, DATA)
    assert found[what] == 1
    assert not is_exact(found)


def test_an_average_that_nobody_told_of_excuses_what_it_held() -> None:
    """All that applied it were killed before they could tell: its samples are named as untold, not as
    lost.
    """
    found = count_passes([average(0, 0, 15), average(2, 20, 40), finished(3, 40)], DATA)
    assert (found["averages_unseen"], found["indices_untold"]) == (1, 5)
    assert is_exact(found)
