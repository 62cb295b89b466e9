"""The result of a round as it travels to those that were not in it: what it is, and whether its bytes fit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pavg import codecs, native
from p2pavg.allreduce.encoded import Layout, shares_of
from p2pavg.allreduce.jobs import MOST_STATE
from p2pavg.allreduce.partition import chunk_elements, gathered_chunk_elements
from p2pavg.errors import P2PAvgError, StateError
from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.protocol import wire
from p2pavg.rounds.protocol.ballot import LINEAGE_BYTES, PEER_ID_BYTES, Ballot
from p2pavg.rounds.protocol.fields import boolean, integer, items, listed, note, sized
from p2pavg.rounds.protocol.lineage import next_lineage
from p2pavg.rounds.protocol.messages import Committed
from p2pavg.rounds.protocol.roles import Seat

U8 = npt.NDArray[np.uint8]


_peer, _lineage = sized(PEER_ID_BYTES), sized(LINEAGE_BYTES)


@dataclass(frozen=True, slots=True)
class ResultHead:
    """Everything of a committed round but its bytes."""

    ballot: Ballot
    transfer: int
    members: tuple[Seat, ...]
    parts: tuple[Part, ...]
    exact: bool  # it travels uncompressed
    weights: tuple[float, ...]
    samples: tuple[int, ...]
    digests: tuple[bytes, ...]
    note: bytes  # by which all members stepped
    before: bytes  # the lineage that it follows on
    lineage: bytes  # after it

    @classmethod
    def of(cls, commit: act.Commit, layout: Layout, exact: bool) -> ResultHead:
        """Of a round that this peer committed."""
        return cls(
            commit.ballot,
            commit.transfer,
            commit.members,
            layout.parts,
            exact,
            commit.weights,
            commit.samples,
            commit.digests,
            commit.note,
            commit.before,
            commit.lineage,
        )

    @property
    def epoch(self) -> int:
        """That this result ended."""
        return self.ballot.epoch

    def to_message(self) -> dict[str, Any]:
        """Plain data for a control message."""
        committed = Committed(self.ballot, self.weights, self.samples, self.digests)
        return {
            "committed": wire.to_dict(committed),
            "transfer": self.transfer,
            "members": [[seat.peer, seat.voter] for seat in self.members],
            "parts": [[part.owner, part.start, part.count] for part in self.parts],
            "exact": self.exact,
            "note": self.note,
            "before": self.before,
            "lineage": self.lineage,
        }

    @classmethod
    def from_message(cls, data: Mapping[str, Any], numel: int, gathered: bool = False) -> ResultHead:
        """numel: of the gradient. gathered: in this run what is not exact is sparse. Raises StateError for
        anything but what `to_message` gives; the lineage is what its fields make of it.
        """
        try:
            committed = wire.from_dict(data["committed"], newer=True, older=True)
            if not isinstance(committed, Committed):
                raise StateError("a result is described by something else than its COMMITTED")
            head = cls(
                committed.ballot,
                _transfer(data["transfer"]),
                listed(_seat)(data["members"]),
                listed(_part)(data["parts"]),
                boolean(data["exact"]),
                committed.weights,
                committed.samples,
                committed.digests,
                note(data["note"]),
                _lineage(data["before"]),
                _lineage(data["lineage"]),
            )
        except (KeyError, TypeError, AttributeError, P2PAvgError):
            raise StateError("a donor described a result wrongly; another donor will be asked") from None
        if not head._is_sound(numel, gathered and not head.exact):
            raise StateError("a donor described a result wrongly; another donor will be asked")
        return head

    def _is_sound(self, numel: int, gathered: bool) -> bool:
        count, at = len(self.members), 0
        if not count == len(self.weights) == len(self.samples) or len(self.parts) != len(self.digests):
            return False
        for part in self.parts:
            if part.owner >= count or part.start != at:
                return False
            at += part.count
        if gathered:
            votes = [seat.voter for seat in self.members]
            if Plan(self.parts, gathers=True).why_not(votes) is not None or at != len(self.parts) * numel:
                return False
        elif not numel <= at <= (MOST_STATE if self.exact else 1) * numel:
            return False
        peers = [seat.peer for seat in self.members]
        return self.lineage == next_lineage(
            self.before, self.ballot.epoch, peers, self.weights, self.digests, self.note
        )

    def layout(self, codec: codecs.Codec) -> Layout:
        """codec: of the run's results."""
        counts = [part.count for part in self.parts]
        if codecs.is_sparse(codec) and not self.exact:
            shares = shares_of(self.parts, self.weights)
            return Layout(self.parts, gathered_chunk_elements(counts[0]), codec, shares)
        return Layout(self.parts, chunk_elements(counts), codecs.get("none") if self.exact else codec)

    def fits(self, layout: Layout, data: U8) -> bool:
        """Whether these encoded bytes are the result."""
        at = 0
        for part, digest in zip(layout.parts, self.digests, strict=True):
            crcs = bytearray()
            for begin in range(0, part.count, layout.chunk_elements):
                size = layout.codec.encoded_size(min(layout.chunk_elements, part.count - begin))
                crcs += native.crc32(data[at : at + size]).to_bytes(4, "little")
                at += size
            if hashlib.sha256(crcs).digest() != digest:
                return False
        return True

    def to_commit(self) -> act.Commit:
        """As the training thread of a peer that was not in the round is given it."""
        return act.Commit(
            transfer=self.transfer,
            ballot=self.ballot,
            members=self.members,
            weights=self.weights,
            samples=self.samples,
            digests=self.digests,
            note=self.note,
            before=self.before,
            lineage=self.lineage,
            late=True,
            following=True,
            attempts=1,
            failed=(),
        )


def _transfer(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise StateError("a transfer's number is out of range")
    return value


def _seat(value: Any) -> Seat:
    peer, voter = items(value, 2)
    return Seat(_peer(peer), boolean(voter))


def _part(value: Any) -> Part:
    owner, start, count = items(value, 3)
    return Part(integer(owner), integer(start), integer(count))
