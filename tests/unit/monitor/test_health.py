"""Whether a run is well, at a glance."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from p2pavg.monitor.health import NOBODY, Level, Signs, verdict

WELL = Signs(here=3, downloading=0, silent=(), lost=(), usual_s=2.0, age_s=1.0, discarded=0, loss=1.5)


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({}, Level.WELL, "3 peers train; an epoch takes 2.0 s"),
        ({"usual_s": None, "age_s": None}, Level.WELL, "3 peers train; the first epoch is under way"),
        ({"downloading": 1}, Level.WELL, "3 peers train, 1 downloading the state; an epoch takes 2.0 s"),
        ({"here": 0}, Level.EMPTY, NOBODY),
        ({"here": 0, "lost": ("ada",)}, Level.BAD, "nobody is left; the last that was seen is ada"),
        ({"age_s": 20.5}, Level.BAD, "no epoch has ended for 20 s; one usually takes 2.0 s"),
        ({"age_s": 19.5}, Level.WELL, "3 peers train; an epoch takes 2.0 s"),
        ({"usual_s": 0.01, "age_s": 2.0}, Level.WELL, "3 peers train; an epoch takes 10 ms"),
        ({"loss": math.nan}, Level.BAD, "the loss is nan"),
        ({"lost": ("ada",), "here": 2}, Level.LOOK, "ada was lost; 2 peers go on"),
        ({"lost": ("ada", "bob"), "here": 1}, Level.LOOK, "ada and 1 more were lost; 1 peer goes on"),
        ({"silent": ("ada",), "here": 1}, Level.LOOK, "ada fell silent; 1 peer goes on"),
        ({"discarded": 12}, Level.LOOK, "12 samples were discarded in the last minute"),
        ({"discarded": 1}, Level.LOOK, "1 sample was discarded in the last minute"),
        ({"here": 1}, Level.LOOK, "one peer trains, alone"),
    ],
)
def test_the_verdict(changes: dict[str, object], level: Level, words: str) -> None:
    """The worst sign decides, in one sentence that says what a person has to know."""
    assert verdict(replace(WELL, **changes)) == (level, words)  # type: ignore[arg-type]
