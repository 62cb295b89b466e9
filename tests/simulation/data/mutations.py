"""Deliberate bugs of leases and consumption, which the simulation has to catch."""

from __future__ import annotations

from typing import Any

from p2pavg.data import ledger, notes
from p2pavg.data.draws import Draws
from p2pavg.data.ledger import PositionLedger
from p2pavg.data.notes import RoundNotes
from p2pavg.data.runs import lowest_free, size, union
from tests.simulation.mutations import Mutation, Original


def _keep(_: Original) -> Original:
    return lambda self, since=0: None


def _at_begin(original: Original) -> Original:
    def combine(self: Draws, said: Any, members: Any, leader: bytes) -> Any:
        note, refused = original(self, said, members, leader)
        self.ledger.consumed = union(self.ledger.consumed, notes.understand(note)[1].consumed)
        return note, refused

    return combine


def _of_members_alone(_: Original) -> Original:
    """What a leader that died held is free at once, though it is still leased to it."""

    def grant(self: PositionLedger, told: RoundNotes) -> None:
        present = {*told.said, *told.others}
        used = union(self.consumed, *(runs for peer, runs in self.leases.items() if peer in present))
        for peer, said in told.said.items():
            held = self.leases.get(peer, ())
            if (lacking := said.wanted - size(held)) > 0:
                granted = lowest_free(used, lacking)
                self.leases[peer], used = union(held, granted), union(used, granted)

    return grant


def _count_all(original: Original) -> Original:
    return lambda self, said, members, leader: (original(self, said, members, leader)[0], frozenset())


def _own_ledger(_: Original) -> Original:
    return lambda self, state: None


def _never(_: Original) -> Any:
    return 1 << 30


DATA_MUTATIONS: tuple[Mutation, ...] = (
    Mutation("what is given up does not return", Draws, "dropped", _keep, (8,)),
    Mutation("leases of the dead do not return", ledger, "LAPSES_AFTER", _never),
    Mutation("consumed before COMMIT", Draws, "combine", _at_begin, (12,)),
    Mutation("a lease is given twice after a succession", PositionLedger, "_grant", _of_members_alone),
    Mutation("contributions with the same positions are counted", Draws, "combine", _count_all, seeds=(170,)),
    Mutation("a state is loaded without its ledger", Draws, "load_state_dict", _own_ledger, (8,)),
)
