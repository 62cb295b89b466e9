"""Story: the events of a run as sentences, one for an event though several members tell of it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from p2pavg.identity import short_id
from p2pavg.monitor.heard import MemberEvent

SAME_S = 10.0  # seconds within which equal events of different members are one event
LINES = 200
LEFT = "left the run"
FAILED = frozenset({"excluded", "aborted"})  # kinds of events that end an attempt in vain
BREAKS = FAILED | {"down", "silent"}


@dataclass(slots=True)
class Line:
    """One sentence. number: in order of the story."""

    at: float  # seconds, on the caller's clock
    text: str
    epoch: int
    number: int
    broken: str = ""  # the kind of event through which a round lost a member; empty: none
    went_on: int = 0  # members with which the round went on afterwards


class Story:
    """The newest sentences."""

    def __init__(self, name: Callable[[bytes], str] = lambda peer: f"peer {short_id(peer)}") -> None:
        """name: what people call a peer."""
        self._name = name
        self.lines: deque[Line] = deque(maxlen=LINES)
        self._said: dict[tuple[object, ...], float] = {}
        self._number = 0
        self._leader: bytes | None = None
        self._epoch = 0  # the newest epoch of any event
        self._round = (-1, -1)  # the newest round: epoch, attempt

    def told(self, by: bytes, event: MemberEvent, now: float) -> None:
        """Take an event that a member told of."""
        self._epoch = max(self._epoch, event.epoch)
        if event.kind == "begun":
            self._begun(event)
            return
        if event.kind == "leader":
            self._led(event, now)
            return
        text = sentence(by, event, self._name)
        subject = by if event.kind in ("heal", "healed") else event.peer
        if text and self._is_new((event.kind, subject, event.epoch), now):
            self.say(text, now, event.epoch, event.kind if event.kind in BREAKS else "")

    def say(self, text: str, now: float, epoch: int, broken: str = "") -> None:
        """Add a sentence."""
        self._number += 1
        self.lines.append(Line(now, text, epoch, self._number, broken))

    def came(self, peer: bytes, epoch: int, there: Collection[int], now: float) -> None:
        """Say that a peer came into view. there: the epochs of those that were; a newcomer's own is 0 until
        it has their state.
        """
        newest = max(epoch, *there, 0)
        how = "joined in" if there else "goes on from" if epoch else "began the run in"
        self.say(f"{self._name(peer)} {how} epoch {newest}", now, newest)

    def gone(self, peer: bytes, epoch: int, why: str, now: float) -> None:
        """Say that a peer is gone, as the watcher itself sees it."""
        self.told(peer, MemberEvent("down", epoch, peer, why, 0, False), now)

    def _is_new(self, key: tuple[object, ...], now: float) -> bool:
        kind, subject, epoch = key
        assert isinstance(epoch, int)
        near = [
            (kind, subject, epoch + step) for step in (-1, 0, 1)
        ]  # the member that tells may be an epoch behind
        before = max((self._said.get(other, float("-inf")) for other in near), default=float("-inf"))
        self._said[key] = now
        if len(self._said) > 4 * LINES:
            self._said = {other: at for other, at in self._said.items() if now - at < SAME_S}
        return now - before >= SAME_S

    def _begun(self, event: MemberEvent) -> None:
        """Take the begin of a round: a loss in this epoch was overcome with so many members."""
        if (event.epoch, event.attempt) <= self._round:
            return  # told before, or by a member that was stopped and catches up
        self._round = (event.epoch, event.attempt)
        for line in reversed(self.lines):
            if line.epoch == event.epoch and line.broken:
                line.went_on = line.went_on or event.number
                return

    def _led(self, event: MemberEvent, now: float) -> None:
        if event.peer is None or event.peer == self._leader or event.epoch < self._epoch:
            return
        before, self._leader = self._leader, event.peer
        if before is not None and self._is_new(("leader", event.peer, event.epoch), now):
            self.say(f"{self._name(event.peer)} leads from epoch {event.epoch}", now, event.epoch)


def text_of(line: Line) -> str:
    """A line's sentence, with how the round went on."""
    if not line.went_on:
        return line.text
    how = "retried" if line.broken in FAILED else "held"
    return f"{line.text}; round {how} with {line.went_on}"


def sentence(by: bytes, event: MemberEvent, name_of: Callable[[bytes], str]) -> str:
    """An event in words; empty: it is not told."""
    name = "" if event.peer is None else name_of(event.peer)
    why = f" ({event.why})" if event.why else ""
    match event.kind:
        case "down" if event.why == LEFT:
            return f"{name} left in epoch {event.epoch}"
        case "down":
            return f"{name} was lost in epoch {event.epoch}{why}"
        case "silent":
            return f"{name} fell silent in epoch {event.epoch}{why}"
        case "heard again":
            return f"{name} is heard again in epoch {event.epoch}"
        case "excluded":
            return f"{name} is left out of epoch {event.epoch}{why}"
        case "readmitted":
            return f"{name} takes part in epoch {event.epoch} again"
        case "aborted" if event.final:
            return f"epoch {event.epoch} has no average{why}; training goes on"
        case "aborted":
            return f"an attempt of epoch {event.epoch} failed{why}"
        case "heal":
            return f"{name_of(by)} downloads the state of epoch {event.number}{why}"
        case "healed":
            return f"{name_of(by)} has the state of epoch {event.epoch}"
    return ""
