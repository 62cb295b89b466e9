"""The history of averages that a peer has applied, and which of the peer's samples are in that history."""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from p2pavg.rounds.protocol.ballot import Lineage, Note, PeerId
from p2pavg.rounds.protocol.roles import Generation

KEPT_GENERATIONS = 1024


def first_lineage(run: bytes, initial_digest: bytes) -> Lineage:
    """id_0 = H(run_id, digest of the initial parameters and buffers)."""
    return hashlib.sha256(b"p2pavg lineage" + hashlib.sha256(run).digest() + initial_digest).digest()


def next_lineage(
    before: Lineage,
    epoch: int,
    members: Sequence[PeerId],
    weights: Sequence[float],
    digests: Sequence[bytes],
    note: Note,
) -> Lineage:
    """id_t = H(id_{t-1}, epoch, members and weights, digest of the encoded result, note)."""
    state = hashlib.sha256(before)
    state.update(struct.pack("<QII", epoch, len(members), len(digests)))
    weighed = zip(members, map(struct.Struct("<d").pack, weights), strict=True)
    state.update(b"".join(itertools.chain.from_iterable(weighed)))
    state.update(b"".join(digests))
    state.update(note)
    return state.digest()


@dataclass(slots=True)
class History:
    """The last generations of this peer's lineage, and what this peer contributed to each transfer.

    A contribution is remembered from BEGIN on: the others may commit the contribution while this peer never
    learns of that.
    """

    generations: deque[Generation] = field(default_factory=lambda: deque(maxlen=KEPT_GENERATIONS))
    # Epoch -> transfer -> own samples in that transfer.
    offered: dict[int, dict[int, int]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Samples of all peers in this lineage so far."""
        return self.generations[-1].total if self.generations else 0

    def offer(self, epoch: int, transfer: int, samples: int) -> None:
        """A transfer began with `samples` of this peer's samples."""
        self.offered.setdefault(epoch, {})[transfer] = samples
        for old in [known for known in self.offered if known < epoch - KEPT_GENERATIONS]:
            del self.offered[old]

    def own(self, epoch: int, transfer: int) -> int:
        """Own samples in a transfer."""
        return self.offered.get(epoch, {}).get(transfer, 0)

    def inherit(self, epoch: int, offers: Iterable[tuple[int, int]]) -> None:
        """This peer answers for samples that a departing peer offered to these transfers: they may be
        averaged after all.
        """
        for transfer, samples in offers:
            self.offer(epoch, transfer, self.own(epoch, transfer) + samples)

    def counted(self, epoch: int, transfers: Collection[int]) -> int | None:
        """The one of these transfers that made this lineage's average of `epoch`; None: none of them did."""
        made = (g.transfer for g in self.generations if g.epoch == epoch)
        return next((transfer for transfer in made if transfer in transfers), None)

    def append(self, generation: Generation) -> None:
        self.generations.append(generation)

    def knows(self, epoch: int, lineage: Lineage) -> bool:
        """Whether this peer's lineage passed through (epoch, lineage)."""
        generations = self.generations
        if not generations or not generations[0].epoch < epoch <= generations[-1].epoch + 1:
            return False
        return generations[epoch - 1 - generations[0].epoch].lineage == lineage

    def offered_since(self, epoch: int) -> int:
        """Own samples in the averages of this history from `epoch` on."""
        own = self.offered
        return sum(
            own[made.epoch].get(made.transfer, 0)
            for made in self.generations
            if made.epoch >= epoch and made.epoch in own
        )

    def adopt(self, donor: Iterable[Generation], unaveraged: int) -> int:
        """Replace this history by the donor's. Returns how many of this peer's samples are thereby lost.

        The number is negative when the donor's history has samples that an earlier change of lineage had
        lost.

        unaveraged: samples that this peer counted and no applied average has, whether an undecided transfer
        has them or not.
        """
        theirs = {generation.epoch: generation for generation in donor}
        ours = {generation.epoch: generation for generation in self.generations}
        # The two histories are one up to here. Of a donor's history without overlap nothing is known to be in
        # it.
        common = max((e for e in ours if e in theirs and ours[e].lineage == theirs[e].lineage), default=-1)
        lost = unaveraged
        for epoch, transfers in self.offered.items():
            if epoch > common:
                lost += transfers.get(ours[epoch].transfer, 0) if epoch in ours else 0
                lost -= transfers.get(theirs[epoch].transfer, 0) if epoch in theirs else 0
        self.generations.clear()
        self.generations.extend(sorted(theirs.values(), key=lambda generation: generation.epoch))
        return lost
