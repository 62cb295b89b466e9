"""Whether a run is well, at a glance: one level and one sentence. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from p2pavg.printable import counted

OVERDUE = 10.0  # times the usual length of an epoch, after which something is wrong
SLACK_S = 3.0  # seconds that an epoch may take in any case
NOBODY = "nobody is in this run (the swarm itself answered); check its name, or wait"
RECENT_S = 60.0  # seconds for which discarded samples are news


class Level(StrEnum):
    """How much a person should care."""

    EMPTY = "empty"
    WELL = "well"
    LOOK = "look"  # something happened, and training goes on
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Signs:
    """What the verdict is made of. Names are those of peers; seconds."""

    here: int  # peers that train
    downloading: int
    silent: Sequence[str]
    lost: Sequence[str]
    usual_s: float | None  # of an epoch
    age_s: float | None  # since the last epoch ended; None: none has, since the watch began
    discarded: int  # samples, in the last RECENT_S seconds
    loss: float | None


def verdict(signs: Signs) -> tuple[Level, str]:
    """The level, and the sentence that says why."""
    company = counted(signs.here, "peer")
    if not signs.here and not signs.downloading and not signs.silent:
        if signs.lost:
            return Level.BAD, f"nobody is left; the last that was seen is {signs.lost[-1]}"
        return Level.EMPTY, NOBODY
    usual, age = signs.usual_s, signs.age_s
    if usual is not None and age is not None and age > max(OVERDUE * usual, SLACK_S):
        return Level.BAD, f"no epoch has ended for {duration(age)}; one usually takes {duration(usual)}"
    if signs.loss is not None and not math.isfinite(signs.loss):
        return Level.BAD, f"the loss is {signs.loss}"
    goes = "goes on" if signs.here == 1 else "go on"
    if signs.silent:
        return Level.LOOK, f"{_listed(signs.silent)} fell silent; {company} {goes}"
    if signs.lost:
        return Level.LOOK, f"{_listed(signs.lost)} {_was(signs.lost)} lost; {company} {goes}"
    if signs.discarded:
        told = f"{counted(signs.discarded, 'sample')} {_was(range(signs.discarded))} discarded"
        return Level.LOOK, f"{told} in the last minute"
    if signs.here == 1 and not signs.downloading:
        return Level.LOOK, "one peer trains, alone"
    also = f", {signs.downloading} downloading the state" if signs.downloading else ""
    pace = (
        "the first epoch is under way"
        if signs.usual_s is None
        else f"an epoch takes {duration(signs.usual_s)}"
    )
    return Level.WELL, f"{company} train{also}; {pace}"


def _was(of: Sequence[object]) -> str:
    return "was" if len(of) == 1 else "were"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def duration(seconds: float) -> str:
    """Seconds in words, short."""
    if 0 < seconds < 0.1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
