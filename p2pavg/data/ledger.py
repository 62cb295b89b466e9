"""The ledger: what all peers of one lineage know alike of the data, as a function of its committed rounds."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from p2pavg.data.notes import NAME_BYTES, RoundNotes
from p2pavg.data.runs import Runs, difference, head, lowest_free, packed, size, union, unpacked
from p2pavg.errors import StateError

LAPSES_AFTER = 2  # committed rounds of which a peer was no member: its leases return to the pool
MOST_LEASED_ROUNDS = 8
MOST_STATE_RUNS = 1 << 20


class PositionLedger:
    """Consumed positions, and leases: positions that one peer may draw, and no other.

    `commit` is deterministic: peers that applied the same rounds hold the same ledger. A lease ends when its
    positions are consumed, or when its peer was missing from `LAPSES_AFTER` rounds in a row. What a peer that
    is missing claims, as far as the leader knows, is leased to it: it may be cut off, and come back.
    """

    def __init__(self) -> None:
        self.epoch = 0  # rounds before this one are in it
        self.consumed: Runs = ()
        self.leases: dict[bytes, Runs] = {}
        self._missed: dict[bytes, int] = {}

    def leased_to_others(self, me: bytes) -> Runs:
        """What this peer may not draw, beside what is consumed."""
        return union(*(runs for peer, runs in self.leases.items() if peer != me))

    def commit(self, epoch: int, told: RoundNotes) -> Collection[bytes]:
        """Take in the round of `epoch`; a round that is in it already changes nothing. Returns whose leases
        have lapsed: what such a peer claimed is forgotten, too.
        """
        if epoch < self.epoch:
            return ()
        self.epoch = epoch + 1
        self.consumed = union(self.consumed, told.consumed)
        present = {*told.said, *told.others}
        self._missed = {
            peer: missed
            for peer in self.leases
            if peer not in present and (missed := self._missed.get(peer, 0) + 1) < LAPSES_AFTER
        }
        lapsed = self.leases.keys() - present - self._missed.keys()
        self.leases = {
            peer: left
            for peer, runs in self.leases.items()
            if peer not in lapsed and (left := difference(runs, self.consumed))
        }
        most = self._most(told)
        claimed = [(peer, runs) for peer, runs in told.claims.items() if peer not in lapsed]
        # Of two that claim the same, the one that is away yields, then the larger name.
        for peer, claims in sorted(claimed, key=lambda claim: (claim[0] not in present, claim[0])):
            free, _ = head(difference(claims, union(self.consumed, self.leased_to_others(peer))), most)
            if free:
                self.leases[peer] = union(self.leases.get(peer, ()), free)
        self._grant(told)
        return lapsed

    @staticmethod
    def _most(told: RoundNotes) -> int:
        """Nobody gets more than what some rounds consume, whatever it says."""
        return MOST_LEASED_ROUNDS * size(told.consumed)

    def _grant(self, told: RoundNotes) -> None:
        """The lowest positions that nobody holds go to those that want more, in rank order."""
        most = self._most(told)
        used = union(self.consumed, *self.leases.values())
        for peer, said in told.said.items():
            held = self.leases.get(peer, ())
            if (lacking := min(said.wanted, most) - size(held)) > 0:
                granted = lowest_free(used, lacking)
                self.leases[peer], used = union(held, granted), union(used, granted)

    def state_dict(self) -> dict[str, Any]:
        """Numbers, texts, lists and dicts: part of the swarm's state."""
        return {
            "epoch": self.epoch,
            "consumed": packed(self.consumed),
            "leases": {peer.hex(): packed(runs) for peer, runs in sorted(self.leases.items())},
            "missed": {peer.hex(): missed for peer, missed in sorted(self._missed.items())},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises StateError, before anything changed, for what `state_dict` did not make."""
        try:
            epoch, consumed = state["epoch"], unpacked(state["consumed"], MOST_STATE_RUNS)
            leases = {_name(peer): unpacked(runs, MOST_STATE_RUNS) for peer, runs in state["leases"].items()}
            missed = {_name(peer): count for peer, count in state["missed"].items()}
            if type(epoch) is not int or not all(type(count) is int for count in missed.values()):
                raise ValueError("a number is none")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"the state's ledger of samples is malformed ({error})") from None
        self.epoch, self.consumed, self.leases, self._missed = epoch, consumed, leases, missed


def _name(text: str) -> bytes:
    value = bytes.fromhex(text)
    if len(value) != NAME_BYTES:
        raise ValueError("a name is malformed")
    return value
