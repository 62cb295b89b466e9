"""How long a peer that hindered rounds stays out: longer each time. Older offences are forgotten
slowly. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2pavg.rounds.protocol.ballot import PeerId

MOST_EPOCHS_OUT = 64  # after the epoch of the offence
ROUNDS_PER_STRIKE = 4  # completed rounds, times the strikes that a peer has, take one strike off


@dataclass(slots=True)
class _Record:
    strikes: int = 0
    back_at: int = 0  # the epoch from which on the peer may be a member again
    rounds: int = 0  # rounds completed since the last strike came or went


class Offences:
    """The offences of one kind that this peer saw others commit. No other peer's word counts here."""

    def __init__(self) -> None:
        self._records: dict[PeerId, _Record] = {}

    def add(self, peer: PeerId, epoch: int, *, free: int = 1) -> None:
        """The peer made an attempt of this epoch fail.

        After each of the first `free` offences the peer may be a member again in the next epoch; after later
        ones it stays out of 1, 2, 4, ... further epochs.
        """
        record = self._records.setdefault(peer, _Record())
        record.strikes += 1
        record.rounds = 0
        beyond = record.strikes - free
        out = min(MOST_EPOCHS_OUT, 2 ** (beyond - 1)) if beyond > 0 else 0
        record.back_at = max(record.back_at, epoch + 1 + out)

    def completed(self, peer: PeerId) -> None:
        """The peer did its part in a round to the end."""
        record = self._records.get(peer)
        if record is None:
            return
        record.rounds += 1
        if record.rounds >= ROUNDS_PER_STRIKE * record.strikes:
            record.strikes, record.rounds = record.strikes - 1, 0
        if not record.strikes:
            del self._records[peer]

    def strikes(self, peer: PeerId) -> int:
        """How many offences of the peer are remembered."""
        record = self._records.get(peer)
        return record.strikes if record is not None else 0

    def is_out(self, peer: PeerId, epoch: int) -> bool:
        """Whether the peer is one of `out`."""
        record = self._records.get(peer)
        return record is not None and epoch < record.back_at

    def out(self, epoch: int) -> list[PeerId]:
        """Peers that are no members of this epoch's round for what they did in earlier epochs."""
        if not self._records:  # the usual case, and the question comes after every event
            return []
        return sorted(peer for peer, record in self._records.items() if epoch < record.back_at)
