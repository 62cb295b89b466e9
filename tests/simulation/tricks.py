"""What a lying member may do with each kind of message: drop, forge a field, send unasked, repeat, delay.

`python -m tests.simulation.tricks --seeds 0:65` plays each trick with each seed, ten thousand in all, and
prints those that cost too much.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

from p2pavg.errors import P2PAvgError
from p2pavg.rounds.protocol.ballot import Ballot, PeerId
from p2pavg.rounds.protocol.messages import Message
from p2pavg.rounds.protocol.wire import from_dict, to_dict
from tests.simulation.byzantine import Liar, Told

KINDS: tuple[type[Any], ...] = Message.__args__
DEADLINE_S = 1.5  # what is late by so much comes at about the deadline
OFTEN_S = 0.1  # between two unasked messages to one peer
SHARE = 1 / 3  # of the undisturbed epochs, which honest peers keep
EPOCHS = 1  # that an honest peer may miss on end
SECONDS = 6.0  # virtual
UNPROTECTED = frozenset(  # what docs/security.md says that a member may still do
    {
        "forge Progress.epoch",
        "drop Promise",
        "delay Promise",
        "forge Promise.ballot",
        "unasked Ready",
        "drop Done",
        "delay Done",
        "forge Done.ballot",
    }
)


@dataclass(frozen=True)
class Trick:
    """One thing that the liar does with all messages of a kind; field: which one it forges."""

    kind: type[Any]
    how: str
    field: str = ""

    def __str__(self) -> str:
        return f"{self.how} {self.kind.__name__}" + (f".{self.field}" if self.field else "")

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
        case Ballot():
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


def cost(told: Told, undisturbed: Told) -> str:
    """What an honest peer lost beyond what is promised; empty: nothing."""
    if told.epochs < SHARE * undisturbed.epochs:
        return f"{told.epochs} epochs instead of {undisturbed.epochs}"
    if told.longest > EPOCHS:
        return f"an honest peer missed {told.longest} epochs on end"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.tricks", description=__doc__)
    parser.add_argument("--seeds", default="0:10", help="first:last, the last not included")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="virtual, of each run")
    given = parser.parse_args()
    seeds = range(*map(int, given.seeds.split(":")))
    calm = {seed: Liar(None, seed).run(given.seconds) for seed in seeds}
    bad = 0
    for trick in tricks():
        for seed in seeds:
            why = cost(Liar(trick, seed).run(given.seconds), calm[seed])
            known = str(trick) in UNPROTECTED
            bad += bool(why) and not known
            if why:
                print(f"{trick}, seed {seed}: {why}" + " (known)" * known, flush=True)
    print(f"{len(tricks()) * len(seeds)} schedules, {bad} of them cost honest peers too much")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
