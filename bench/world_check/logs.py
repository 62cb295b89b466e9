"""What a run of `bench.world` wrote down, read back. Needs nothing of p2pavg."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

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
        """Epoch -> a report of it, of the surviving lineage: where peers told of several, that of which most
        lives told which made the last average of all, or else of most samples.
        """
        last = max((r["epoch"] for life in self.lives for r in life.reports if r["members"]), default=-1)
        survivors = {
            life.name
            for life in self.lives
            if life.of("end") or any(r["epoch"] == last and r["members"] for r in life.reports)
        }
        votes: dict[int, Counter[str]] = {}
        told: dict[tuple[int, str], Event] = {}
        for life in self.lives:
            for report in life.reports:
                if report["members"]:
                    key = report["epoch"], report["lineage"]
                    told[key] = report
                    weight = 1000 * (life.name in survivors) + 1
                    votes.setdefault(report["epoch"], Counter())[report["lineage"]] += weight
        chain = {}
        for epoch, counted in sorted(votes.items()):
            most = max(counted.values())
            best = [lineage for lineage, count in counted.items() if count == most]
            chain[epoch] = max((told[epoch, lineage] for lineage in best), key=lambda r: r["samples"])
        return chain
