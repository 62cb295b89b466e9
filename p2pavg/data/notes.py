"""What members of a round say of the samples in their contributions, and what the leader makes of it.

Both travel in the notes of the rounds, around the note of the optimizer. Nothing here is believed further
than
it can be checked: no position is consumed twice, whoever says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from p2pavg.data.runs import Runs, intersection, packed, union, unpacked

NAME_BYTES = 8  # of a peer id: what tells members of a run apart in a ledger
MOST_RUNS = 4096  # of one peer
MOST_MEMBERS = 1024
MOST_WANTED = 1 << 40


@dataclass(frozen=True, slots=True)
class Said:
    """Of one peer's contribution: its samples' positions, what it draws without a lease, what it wants
    to hold.
    """

    drawn: Runs
    claims: Runs
    wanted: int


@dataclass(frozen=True, slots=True)
class RoundNotes:
    """Of a whole round: what was said by whose samples are counted, and who else takes part in the run."""

    said: Mapping[bytes, Said]  # by name, in rank order
    others: Mapping[bytes, Runs]  # what they hold without a lease, as far as the leader knows
    absent: Mapping[bytes, Runs]  # likewise, of peers that are no members: cut off for a while, or gone

    @property
    def consumed(self) -> Runs:
        """All positions in the round's average."""
        return union(*(each.drawn for each in self.said.values()))

    @property
    def claims(self) -> Mapping[bytes, Runs]:
        """What each member draws without a lease."""
        return {**self.absent, **{peer: each.claims for peer, each in self.said.items()}, **self.others}


NOTHING_TOLD = RoundNotes({}, {}, {})


def name(peer: bytes) -> bytes:
    """What a ledger calls a peer."""
    return peer[:NAME_BYTES]


def say(inner: bytes, said: Said) -> bytes:
    """A contribution's note."""
    note: bytes = msgpack.packb([inner, *_row(said)])
    return note


def heard(note: bytes) -> tuple[bytes, Said] | None:
    """What `say` made; None for anything else."""
    try:
        inner, drawn, claims, wanted = msgpack.unpackb(note)
        return _inner(inner), _said(drawn, claims, wanted)
    except (ValueError, TypeError, msgpack.UnpackException):
        return None


def combine(
    notes: Mapping[bytes, bytes],
    members: Sequence[bytes],
    leader: bytes,
    consumed: Runs,
    claims: Mapping[bytes, Runs],
) -> tuple[bytes, frozenset[bytes]]:
    """The round's note, and whose contributions may not be counted: others drew the same positions.

    notes: of the contributions, by peer id. claims: of all peers, by name, as far as the leader knows. The
    leader's inner note goes along, or that of the first member whose contribution is counted.
    """
    notes = {peer: note for peer, note in notes.items() if note}  # who has nothing says nothing
    ranked = [*(peer for peer in members if peer == leader), *(peer for peer in members if peer != leader)]
    inner, taken = None, consumed
    counted: dict[bytes, Said] = {}
    for peer in ranked:
        understood = heard(notes[peer]) if peer in notes else None
        if understood is None or intersection(taken, understood[1].drawn):
            continue
        inner = understood[0] if inner is None else inner
        counted[peer] = understood[1]
        taken = union(taken, understood[1].drawn)
    rows = [[name(peer), *_row(counted[peer])] for peer in members if peer in counted]
    silent = [name(peer) for peer in members if peer not in counted]
    others = [[peer, packed(claims.get(peer, ()))] for peer in silent]
    here = {*map(name, members)}
    absent = [[peer, packed(runs)] for peer, runs in sorted(claims.items()) if peer not in here]
    note: bytes = msgpack.packb([inner or b"", rows, others, absent[: MOST_MEMBERS - len(members)]])
    return note, frozenset(notes) - frozenset(counted)


def understand(note: bytes) -> tuple[bytes, RoundNotes]:
    """The inner note, and what `combine` put around it. What is malformed tells nothing: the same on
    all peers.
    """
    try:
        inner, rows, *held = msgpack.unpackb(note)
        others, absent = held
        if len(rows) + len(others) + len(absent) > MOST_MEMBERS:
            raise ValueError("too many members")
        said = {_name(row[0]): _said(*row[1:]) for row in rows}
        silent, away = ({_name(peer): unpacked(runs, MOST_RUNS) for peer, runs in those} for those in held)
        return _inner(inner), RoundNotes(said, silent, away)
    except (ValueError, TypeError, msgpack.UnpackException):
        return b"", NOTHING_TOLD


def _row(said: Said) -> list[Any]:
    return [packed(said.drawn), packed(said.claims), said.wanted]


def _said(drawn: Any, claims: Any, wanted: Any) -> Said:
    if type(wanted) is not int or not 0 <= wanted <= MOST_WANTED:
        raise ValueError("a wanted number of positions is malformed")
    return Said(unpacked(drawn, MOST_RUNS), unpacked(claims, MOST_RUNS), wanted)


def _inner(value: Any) -> bytes:
    if type(value) is not bytes:
        raise ValueError("an inner note is malformed")
    return value


def _name(value: Any) -> bytes:
    if type(value) is not bytes or len(value) != NAME_BYTES:
        raise ValueError("a name is malformed")
    return value
