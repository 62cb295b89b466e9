"""What a run of `bench.world` wrote down, read back. Needs nothing of p2pavg."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.world.model import SAMPLES

Event = dict[str, Any]
Interval = tuple[float, float]
FREEZES = ("stop", "sleep")  # faults in which the victim's program does not run


def _lines(path: Path) -> list[Event]:
    """The whole lines of a JSONL file: a killed process may leave half a one."""
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


@dataclass
class Life:
    """One process: from its start to its end, or to the end of the run."""

    name: str
    events: list[Event]
    reports: list[Event]
    frozen: list[Interval] = field(default_factory=list)
    cut: list[Interval] = field(default_factory=list)
    until: float = 0.0  # its end

    @property
    def place(self) -> str:
        return self.name.rpartition("-")[0]

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["t"] == kind]

    @cached_property
    def up(self) -> Event | None:
        """When it was in the run; None: never."""
        return next(iter(self.of("up")), None)

    @cached_property
    def steps(self) -> list[Event]:
        return self.of("step")

    @property
    def alive_s(self) -> float:
        """Seconds in which its program was in the run and ran."""
        if self.up is None:
            return 0.0
        begin = float(self.up["at"])
        lost = sum(max(0.0, min(to, self.until) - max(since, begin)) for since, to in self.frozen)
        return max(0.0, self.until - begin - lost)


@dataclass
class Run:
    """All of it."""

    facts: Event
    events: list[Event]
    lives: list[Life]

    @classmethod
    def read(cls, folder: Path) -> Run:
        events = _lines(folder / "events.jsonl")
        facts = next(event for event in events if event["t"] == "run")
        end = max(event["at"] for event in events)
        lives = []
        for event in events:
            if event["t"] == "born":
                name = event["who"]
                life = Life(name, _lines(folder / f"{name}.jsonl"), _lines(folder / f"{name}.reports.jsonl"))
                ended = [e["at"] for e in events if e["t"] == "ended" and e["who"] == name]
                orderly = [e["at"] for e in life.of("end")]
                life.until = min([*ended, *orderly, end])
                for fault in (e for e in events if e["t"] == "fault" and e["who"] == name):
                    if fault["fault"] in FREEZES:
                        life.frozen.append((fault["at"], fault["until"]))
                    if fault["fault"] in ("kill", "spot"):
                        life.until = min(life.until, fault["at"])
                    if fault["fault"] in ("cut", "cut-one-way", "sleep"):
                        life.cut.append((fault["at"], fault["until"]))
                lives.append(life)
        return cls(facts, events, lives)

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["t"] == kind]

    @property
    def faults(self) -> list[Event]:
        return self.of("fault")

    @cached_property
    def chain(self) -> dict[int, Event]:
        """Epoch -> a report of it, of the surviving lineage: that of which most peers told that ended with
        the run, and back from there.

        A lineage's name tells nothing of the one before, so the average before is that which a peer reported
        that went on without a healing, and whose count of consumed positions this average adds to.
        """
        told: dict[int, dict[str, list[tuple[Life, Event]]]] = {}
        for life in self.lives:
            for report in life.reports:
                if report["members"]:
                    told.setdefault(report["epoch"], {}).setdefault(report["lineage"], []).append(
                        (life, report)
                    )
        chain: dict[int, Event] = {}
        after: list[tuple[Life, Event]] = []
        for epoch in sorted(told, reverse=True):
            best = max(told[epoch].values(), key=lambda those: _weight(those, after))
            chain[epoch], after = best[0][1], best
        return dict(sorted(chain.items()))


def _weight(those: list[tuple[Life, Event]], after: list[tuple[Life, Event]]) -> tuple[int, int, int, int]:
    """How much speaks for a lineage, of all that were told of one epoch. after: the epoch that follows."""
    went_on = {life.name for life, report in after if "healed" not in report["discarded_why"]}
    following = after[0][1] if after else None
    fits = following is None or round((following["passes"] - those[0][1]["passes"]) * SAMPLES) == sum(
        end - first for _, first, end in following["consumed"]
    )
    return (
        int(fits),
        sum(life.name in went_on for life, _ in those),
        sum(bool(life.of("end")) for life, _ in those),
        those[0][1]["samples"],
    )
