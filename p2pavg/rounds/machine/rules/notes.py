"""The note of a round, which its leader makes of the notes that came with contributions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from p2pavg.rounds.protocol.ballot import Note, PeerId

# (notes of contributions by peer, members in rank order, leader) -> the round's note, and whose contributions
# cannot be counted.
Combine = Callable[[Mapping[PeerId, Note], Sequence[PeerId], PeerId], tuple[Note, frozenset[PeerId]]]


def of_leader(
    notes: Mapping[PeerId, Note], members: Sequence[PeerId], leader: PeerId
) -> tuple[Note, frozenset[PeerId]]:
    """The leader's note, if it has one, else that of the first peer that has; every contribution counts."""
    return notes[leader if leader in notes else min(notes)], frozenset()
