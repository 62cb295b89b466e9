"""What a lying member may do with each kind of message: drop, forge a field, send unasked, repeat, delay.

`python -m tests.simulation.tricks --seeds 0:10 --pairs 0:10000` plays each trick with each seed, and so many
pairs of tricks, and prints those that cost too much.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cache
from typing import Any

from p2pavg.errors import P2PAvgError
from p2pavg.rounds.protocol.ballot import Ballot, Held, PeerId
from p2pavg.rounds.protocol.messages import Aborted, Begin, Committed, Follow, Message, Prepare, Totals
from p2pavg.rounds.protocol.wire import from_dict, to_dict
from tests.simulation.byzantine import Liar, Told

KINDS: tuple[type[Any], ...] = Message.__args__
DEADLINE_S = 1.5  # what is late by so much comes at about the deadline
OFTEN_S = 0.1  # between two unasked messages to one peer
SHARE = 1 / 3  # of the undisturbed epochs, which honest peers keep
EPOCHS = 1  # that an honest peer may miss on end
LED_EPOCHS = 12  # that one may miss which a lying leader keeps waiting: five seconds
SECONDS = 6.0  # virtual
LONG_SECONDS = 20.0  # of tricks that cost a deadline each time, which is ever more rarely
LED_SECONDS = 16.0  # of a lying leader
WHOLE_SECONDS = 60.0  # of what costs too much in a shorter time: some tricks cost a deadline once
COSTLY = frozenset({"Promise", "Ready", "Done"})  # kinds that are waited for


@dataclass(frozen=True)
class Trick:
    """One thing that the liar does with all messages of a kind; field: which one it forges."""

    kind: type[Any]
    how: str
    field: str = ""

    def __str__(self) -> str:
        return f"{self.how} {self.kind.__name__}" + (f".{self.field}" if self.field else "")

    @property
    def seconds(self) -> float:
        """How long it is played."""
        waits = self.how in ("drop", "delay", "unasked") or self.field == "ballot"
        return LONG_SECONDS if waits and self.kind.__name__ in COSTLY else SECONDS

    def __call__(self, liar: Liar, peer: PeerId, message: Message) -> list[tuple[float, Message]]:
        if self.how == "unasked":
            return [(0.0, message), *self._unasked(liar, peer)]
        if not isinstance(message, self.kind):
            return [(0.0, message)]
        match self.how:
            case "drop":
                return []
            case "repeat":
                return [(0.0, message), (0.0, message), (DEADLINE_S, message)]
            case "delay":
                return [(DEADLINE_S, message)]
        forged: Any = replace(message, **{self.field: other(getattr(message, self.field), liar)})
        return [(0.0, forged)] if sound(forged) else []

    def _unasked(self, liar: Liar, peer: PeerId) -> Iterator[tuple[float, Message]]:
        """What others said last of this kind, as if of itself, about the ballot that it holds."""
        now = liar.swarm.world.now
        said, held = liar.heard.get(self.kind), liar.liar.machine.core.holding
        if said is None or now < liar.told_at.get(peer, 0.0) + OFTEN_S:
            return
        liar.told_at[peer] = now
        if held is not None and hasattr(said, "ballot"):
            said = replace(said, ballot=held.ballot)  # type: ignore[type-var]
        yield 0.0, said


@dataclass(frozen=True)
class Pair:
    """Two tricks at once: the second one is played with what the first one makes of a message."""

    one: Trick
    two: Trick

    def __str__(self) -> str:
        return f"{self.one} and {self.two}"

    @property
    def seconds(self) -> float:
        """How long they are played."""
        return max(self.one.seconds, self.two.seconds)

    def __call__(self, liar: Liar, peer: PeerId, message: Message) -> list[tuple[float, Message]]:
        return [
            (first + second, each)
            for first, made in self.one(liar, peer, message)
            for second, each in self.two(liar, peer, made)
        ]


def sound(message: Message) -> bool:
    """Whether a reader takes it: what is malformed never comes to a machine."""
    try:
        from_dict(to_dict(message))
    except (P2PAvgError, ValueError, TypeError, AttributeError):
        return False
    return True


def other(value: Any, liar: Liar) -> Any:
    """A value of the same type."""
    dice = liar.dice
    match value:
        case bool():
            return not value
        case Enum():
            return dice.choice(list(type(value)))
        case int():
            return dice.choice((0, value + 1, value + 1000, 1 << 40))
        case float():
            return dice.choice((0.0, value + 1.0, 1e9))
        case str():
            return "forged"
        case bytes() if len(value) == len(liar.liar.me):
            return dice.choice(liar.honest).me
        case bytes():
            return dice.randbytes(len(value))
        case Ballot() | Held():
            name = dice.choice([each.name for each in fields(value)])
            return replace(value, **{name: other(getattr(value, name), liar)})
        case tuple() if value:
            at = dice.randrange(len(value))
            return (*value[:at], other(value[at], liar), *value[at + 1 :])
    return value


def tricks() -> list[Trick]:
    """All of them."""
    found = []
    for kind in KINDS:
        found += [Trick(kind, how) for how in ("drop", "repeat", "delay", "unasked")]
        found += [Trick(kind, "forge", field.name) for field in fields(kind)]
    return found


def pairs(count: int, first: int = 0) -> list[Pair]:
    """So many of all pairs, drawn at random; the same ones each time."""
    found, known = [], tricks()
    for number in range(first, first + count):
        one, two = random.Random(f"pair {number}").sample(known, 2)
        found.append(Pair(one, two))
    return found


LEADERS = (Prepare, Begin, Totals, Follow, Committed, Aborted)  # kinds that leaders send


@cache
def undisturbed(seed: int, seconds: float) -> Told:
    """What comes of the same swarm when nobody lies."""
    return Liar(None, seed).run(seconds)


def cost(told: Told, calm: Told, epochs: int = EPOCHS) -> str:
    """What an honest peer lost beyond what is promised; empty: nothing."""
    if told.epochs < SHARE * calm.epochs:
        return f"{told.epochs} epochs instead of {calm.epochs}"
    if told.longest > epochs:
        return f"an honest peer missed {told.longest} epochs on end"
    return ""


def judge(trick: Trick | Pair, seed: int, seconds: float, *, leads: bool = False) -> str:
    """What it costs beyond what is promised, in so many seconds and, if anything, then in a minute as
    well.
    """
    tricks = (trick.one, trick.two) if isinstance(trick, Pair) else ()
    led = leads or any(each.kind in LEADERS for each in tricks)  # which cost something once the liar leads
    most, why = LED_EPOCHS if led else EPOCHS, ""
    for long in (seconds, WHOLE_SECONDS):
        why = cost(Liar(trick, seed, leads=leads).run(long), undisturbed(seed, long), most)
        if not why:
            break
    return why


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.tricks", description=__doc__)
    parser.add_argument("--seeds", default="0:10", help="first:last, the last not included")
    parser.add_argument("--pairs", default="0:0", help="of tricks at once: first:last, the last not included")
    given = parser.parse_args()
    seeds = range(*map(int, given.seeds.split(":")))
    bad = 0
    for trick in tricks():
        for seed in seeds:
            why = judge(trick, seed, trick.seconds)
            bad += bool(why)
            if why:
                print(f"{trick}, seed {seed}: {why}", flush=True)
        if trick.kind in LEADERS:
            for seed in seeds:
                why = judge(trick, seed, LED_SECONDS, leads=True)
                bad += bool(why)
                if why:
                    print(f"as the leader, {trick}, seed {seed}: {why}", flush=True)
    first, last = map(int, given.pairs.split(":"))
    for pair in pairs(last - first, first):
        why = judge(pair, 1, pair.seconds)
        bad += bool(why)
        if why:
            print(f"{pair}: {why}", flush=True)
    played = f"{len(tricks()) * len(seeds)} schedules of members, {last - first} of pairs"
    print(f"{played}: {bad} cost honest peers too much")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
