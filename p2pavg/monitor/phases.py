"""The last rounds of a run on a terminal: a bar each, in which every phase has a letter."""

from __future__ import annotations

import statistics

from rich.text import Text

from p2pavg.monitor.epochs import Round
from p2pavg.monitor.health import duration
from p2pavg.monitor.shown import Shown
from p2pavg.report import PHASES

SHOWN = 3  # rounds
MARKS = {  # by phase: letter and style
    "calculation": ("=", "green"),
    "waiting": (".", "dim"),
    "matchmaking": ("m", "yellow"),
    "transfer": ("t", "cyan"),
    "commit": ("c", "magenta"),
    "update": ("u", "blue"),
}


def lines(shown: Shown, width: int) -> list[Text]:
    """A line for each of the last rounds, and one that names the letters; nothing before the first round."""
    last = shown.rounds[-SHOWN:]
    if not last:
        return []
    heads = [f"epoch {one.epoch}  {duration(one.seconds)}  " for one in last]
    spent = [_mean(one) for one in last]
    longest = max(max(sum(one.values()) for one in spent), 1e-9)
    room = max(10, width - max(map(len, heads)))
    made = []
    for head, phases in zip(heads, spent, strict=True):
        line = Text(head.rjust(max(map(len, heads))), no_wrap=True, overflow="crop")
        for name, letters in _letters(phases, longest, room).items():
            line.append(MARKS[name][0] * letters, MARKS[name][1])
        made.append(line)
    named = ", ".join(f"{MARKS[name][0]} {name}" for name in PHASES)
    return [*made, Text(named, "dim")]


def _mean(one: Round) -> dict[str, float]:
    """Seconds by phase, the mean over the members that told of it."""
    told = one.reports.values()
    return {name: statistics.fmean(getattr(report, f"seconds_{name}") for report in told) for name in PHASES}


def _letters(phases: dict[str, float], longest: float, room: int) -> dict[str, int]:
    """Letters of each phase; their sum is as long as the whole is, whatever the phases are rounded to."""
    found, before = {}, 0.0
    for name, seconds in phases.items():
        after = before + seconds
        found[name] = round(room * after / longest) - round(room * before / longest)
        before = after
    return found
