"""Machines at rest, numbered by what is in them, and what each answered to an event at a time."""

from __future__ import annotations

import pickle
from collections import deque
from enum import Enum
from typing import Any

from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.machine.machine import Machine

PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
Answer = tuple[int, list[act.Action]]


class Memory:
    """Two machines have one number when all that they hold is equal, in whatever order it came."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._machines: list[bytes] = []
        self._deadlines: list[float | None] = []
        self._timers: list[dict[str, float]] = []
        self._answers: dict[tuple[int, int, float], Answer] = {}
        self._event_numbers: dict[ev.Event, int] = {}
        self.events: list[ev.Event] = []

    def machine(self, machine: Machine) -> int:
        """Its number."""
        key = content(machine)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._machines)
            self._machines.append(pickle.dumps(machine))
            self._deadlines.append(machine.next_deadline)
            self._timers.append(dict(machine.core.timers))
        return number

    def event(self, event: ev.Event) -> int:
        """Its number."""
        number = self._event_numbers.get(event)
        if number is None:
            number = self._event_numbers[event] = len(self.events)
            self.events.append(event)
        return number

    def deadline(self, number: int) -> float | None:
        """When this machine wants a Tick."""
        return self._deadlines[number]

    def due(self, number: int, now: float) -> set[str]:
        """Its timers that fire then."""
        return {name for name, at in self._timers[number].items() if at <= now}

    def handle(self, number: int, event: ev.Event, now: float) -> Answer:
        """The machine that it becomes, and what it does."""
        asked = (number, self.event(event), now)
        answer = self._answers.get(asked)
        if answer is None:
            machine: Machine = pickle.loads(self._machines[number])
            actions = machine.handle(event, now)
            answer = self._answers[asked] = self.machine(machine), actions
        return answer


def content(thing: Any, seen: set[int] | None = None) -> Any:
    """All that is in it, as something hashable. seen: parts that were looked at; they refer to each other."""
    kind = type(thing)
    if kind in PLAIN:
        return thing
    seen = set() if seen is None else seen
    if kind in (tuple, list, deque):
        return tuple([content(item, seen) for item in thing])
    if kind in (set, frozenset):
        return frozenset([content(item, seen) for item in thing])
    if kind is dict:
        return frozenset([(content(key, seen), content(value, seen)) for key, value in thing.items()])
    if isinstance(thing, Enum):
        return thing.value
    if callable(thing):
        return None
    names = getattr(thing, "__dict__", None)
    if names is None:
        return (kind.__name__, *[content(getattr(thing, name), seen) for name in kind.__slots__])
    if id(thing) in seen:
        return None
    seen.add(id(thing))
    return (kind.__name__, *[(name, content(names[name], seen)) for name in sorted(names)])
