"""A replay of offers over time: plans that follow them, and the cost of each change."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from p2pavg.errors import ConfigurationError
from p2pavg.forecast.inventory import Inventory
from p2pavg.forecast.laws import HOUR
from p2pavg.forecast.search import Goal, Judge, MachinePlan, search


@dataclass(frozen=True, slots=True)
class Change:
    """The counts of each offer that are to be had from `seconds` on."""

    seconds: float
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A plan for a while. joined: peers that are new in it."""

    begin: float
    end: float
    plan: MachinePlan | None
    changed: bool
    joined: int
    join_seconds: float

    @property
    def samples(self) -> float:
        if self.plan is None:
            return 0.0
        lost = (
            min(1.0, self.join_seconds / max(self.end - self.begin, 1e-9))
            * self.joined
            / sum(self.plan.counts)
        )
        return self.plan.sps * (self.end - self.begin) * (1 - lost)


def load(path: str, inventory: Inventory) -> list[Change]:
    """Lines "seconds,TYPE@REGION,count", in the order of their times. Raises ConfigurationError."""
    names = [offer.name for offer in inventory.offers]
    now = [0] * len(names)
    found: list[Change] = []
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
    except OSError as error:
        raise ConfigurationError(f"cannot read the trace {path!r}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error):
        raise ConfigurationError(
            f"the trace {path!r} is not text of lines 'seconds,TYPE@REGION,count'"
        ) from None
    for number, row in enumerate(rows, 1):
        if not row or (number == 1 and row[0].strip() == "seconds"):
            continue
        where = f"line {number} of {path!r}"
        try:
            time, name, number_of = row
            seconds, name, count = float(time), name.strip(), int(number_of)
        except ValueError:
            raise ConfigurationError(f"{where} is not 'seconds,TYPE@REGION,count'") from None
        if name not in names:
            raise ConfigurationError(f"{where}: the inventory does not offer {name!r}")
        if not 0 <= seconds < 1e12 or count < 0:
            raise ConfigurationError(f"{where}: times and counts are at least 0, and times below 1e12")
        most = inventory.offers[names.index(name)].count
        if count > most:
            raise ConfigurationError(f"{where}: the inventory offers {name} {most} times, not {count}")
        if found and seconds < found[-1].seconds:
            raise ConfigurationError(
                f"{where}: times must rise, and {seconds:g} comes after {found[-1].seconds:g}"
            )
        now[names.index(name)] = count
        change = Change(seconds, tuple(now))
        if found and found[-1].seconds == seconds:
            found[-1] = change
        else:
            found.append(change)
    if len(found) < 2:
        raise ConfigurationError(f"the trace {path!r} needs at least two different times")
    return found


def replay(judge: Judge, goal: Goal, changes: Sequence[Change], join_seconds: float) -> list[Step]:
    """A plan for each change, made from the one at hand; the last change only ends the replay."""
    steps: list[Step] = []
    before: tuple[int, ...] | None = None
    nobody = (0,) * len(judge.inventory.offers)
    for change, following in pairwise(changes):
        plan = search(judge.within(change.counts), goal, begin=before)
        counts = plan.counts if plan else nobody
        joined = sum(max(0, new - old) for new, old in zip(counts, before or nobody, strict=True))
        steps.append(Step(change.seconds, following.seconds, plan, counts != before, joined, join_seconds))
        before = counts
    return steps


def summary(steps: Sequence[Step]) -> dict[str, Any]:
    """Samples, dollars and the cost of changes, over a replay."""
    return {
        "samples": sum(step.samples for step in steps),
        "dollars": sum(s.plan.dollars_hour * (s.end - s.begin) / HOUR for s in steps if s.plan),
        "seconds": steps[-1].end - steps[0].begin,
        "changes": sum(step.changed for step in steps),
        "join_seconds": sum(step.joined * step.join_seconds for step in steps),
        "steps": [
            {"begin": step.begin, "end": step.end, "counts": step.plan.counts if step.plan else ()}
            for step in steps
        ],
    }
