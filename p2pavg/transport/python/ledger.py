"""The ledger of a reduce job: which chunks have come, have gone and are still due. No I/O, no arithmetic.

A chunk is known by its number in the whole vector: the chunks of part 0, then those of part 1, and so on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from p2pavg.transport.engine import JobProgress, Missing, ReduceJob
from p2pavg.transport.frames import PACKED, Header, Kind


@dataclass(frozen=True, slots=True)
class Chunk:
    """The place of one chunk: elements [start, start + count), and its bytes in both encoded layouts."""

    part: int
    index: int  # inside the part
    start: int
    count: int
    contribution_at: int
    contribution_bytes: int
    result_at: int
    result_bytes: int


class Ledger:
    def __init__(
        self, job: ReduceJob, contribution_size: Callable[[int], int], result_size: Callable[[int], int]
    ) -> None:
        """contribution_size, result_size: encoded bytes of n elements."""
        self.rank = job.rank
        self._job = job
        self._members = len(job.links)
        plan, parts = job.plan, range(len(job.parts))
        self._parents = [plan.parent(part, job.rank) for part in parts]  # None: I make the result
        self._partners = [plan.partner(part, job.rank) for part in parts]  # None: I do not swap
        self._children = [plan.children(part, job.rank, self._members) for part in parts]
        self._reduces = [plan.reduces(part, job.rank) for part in parts]
        self.chunks: list[Chunk] = []
        self._first: list[int] = []  # number of the first chunk of each part
        contribution_at = result_at = 0
        for index, part in enumerate(job.parts):
            self._first.append(len(self.chunks))
            for chunk, offset in enumerate(range(0, part.count, job.chunk_elements)):
                count = min(job.chunk_elements, part.count - offset)
                sent, returned = contribution_size(count), result_size(count)
                self.chunks.append(
                    Chunk(
                        index, chunk, part.start + offset, count, contribution_at, sent, result_at, returned
                    )
                )
                contribution_at += sent
                result_at += returned
        self._first.append(len(self.chunks))
        self.result_bytes = result_at
        # What this peer contributes: in an all-gather its own part, else the whole vector.
        self.own_chunk, self.own_start, self.own_at = 0, 0, 0
        self.own_numel, self.own_bytes = plan.numel, contribution_at
        if plan.gathers:
            self.own_bytes //= len(parts)
            for index in parts:
                if self._parents[index] is None:  # mine
                    self.own_chunk, self.own_start = self._first[index], job.parts[index].start
                    self.own_at = index * self.own_bytes

        self.begun = False
        self._weights: list[
            dict[int, float]
        ] = []  # for each part that I reduce: weights of the contributions, by rank
        self._contributors: list[int] = []  # the same ranks as bits
        self._upward: list[float] = []  # the weight of what I send to my parent, for each part
        self._contributed = [0] * len(
            self.chunks
        )  # for each chunk that I reduce: a bit per rank whose contribution is in
        self._have_other = bytearray(len(self.chunks))  # the partial mean of the one with which I swap
        self._have_result = bytearray(len(self.chunks))
        self._crcs = [0] * len(self.chunks)  # of results
        self._results_due = len(self.chunks)
        self._contribution_gone = bytearray(len(self.chunks))
        self._contributions_to_go = 0
        self._result_gone = [0] * len(
            self.chunks
        )  # for each chunk: a bit per rank to which its result was sent
        self._voters = sum(1 << rank for rank, votes in enumerate(job.voters) if votes)
        self._results_to_go = 0  # how many results voters are still to be sent
        self._counts = [[0] * self._members for _ in range(4)]

    # -- where things lie

    def parent(self, number: int) -> int | None:
        """The rank that takes this peer's contribution to the chunk and sends its result; None: this peer
        makes the result.
        """
        return self._parents[self.chunks[number].part]

    def partner(self, number: int) -> int | None:
        """The rank with which this peer swaps partial means of the chunk; None: there is none."""
        return self._partners[self.chunks[number].part]

    def receiver(self, number: int) -> int | None:
        """The rank to which this peer sends what it contributes to the chunk, or adds up."""
        parent = self.parent(number)
        return self.partner(number) if parent is None else parent

    def giver(self, number: int) -> int:
        """The rank from which the chunk's result comes."""
        parent = self.parent(number)
        return self.rank if parent is None else parent

    def children(self, number: int) -> tuple[int, ...]:
        """The ranks that contribute to the chunk at this peer, and get its result from there."""
        return self._children[self.chunks[number].part]

    def reduces(self, number: int) -> bool:
        """Whether this peer adds up contributions to the chunk."""
        return self._reduces[self.chunks[number].part]

    def turn(self, number: int) -> float:
        """How far into its part the chunk is, from 0 to 1. All parts advance together: a deputy that got one
        after the other would use its links to owners one after the other.
        """
        part, index = self.chunks[number].part, self.chunks[number].index
        return (index + 0.5) / (self._first[part + 1] - self._first[part])

    def is_partial(self, rank: int, number: int) -> bool:
        """Whether `rank` contributes a partial mean to the chunk, in the result codec."""
        return self._job.plan.sends_partial(self.chunks[number].part, rank)

    def number(self, part: int, index: int) -> int | None:
        """The chunk's number; None when the job has no such chunk."""
        if not 0 <= part < len(self._job.parts):
            return None
        number = self._first[part] + index
        return number if index >= 0 and number < self._first[part + 1] else None

    def _of(self, parts: Iterable[int]) -> list[int]:
        return [number for part in parts for number in range(self._first[part], self._first[part + 1])]

    def reduced(self) -> list[int]:
        """The chunks that I reduce, as owner or deputy."""
        return self._of(part for part, reduces in enumerate(self._reduces) if reduces)

    def below(self, rank: int) -> list[int]:
        """The chunks to which `rank` contributes at me: it is my child, or swaps with me."""
        partners = self._partners
        return self._of(
            p for p, children in enumerate(self._children) if rank in children or rank == partners[p]
        )

    def above(self, rank: int) -> list[int]:
        """The chunks in which `rank` is my parent."""
        return self._of(part for part, parent in enumerate(self._parents) if rank == parent)

    def others(self) -> list[int]:
        """All other ranks, starting with the next one, so that peers do not all start with the same one."""
        return [(self.rank + step) % self._members for step in range(1, self._members)]

    # -- begin

    def begin(self, weights: Sequence[float]) -> None:
        """Take the weights, by rank."""
        self.begun = True
        plan = self._job.plan
        for part, children in enumerate(self._children):
            ranks = (self.rank, *children) if self._reduces[part] else ()
            added = {
                rank: weights[rank] if rank == self.rank else plan.weight(part, rank, weights)
                for rank in ranks
            }
            self._weights.append({rank: weight for rank, weight in added.items() if weight > 0})
            self._contributors.append(sum(1 << rank for rank in self._weights[-1]))
            partner = self._partners[part]
            if partner is not None and (weight := plan.weight(part, partner, weights)) > 0:
                self._weights[-1][partner] = weight
            self._upward.append(plan.weight(part, self.rank, weights))
            length = self._first[part + 1] - self._first[part]
            if plan.receiver(part, self.rank) is not None and self._upward[-1] > 0:
                self._contributions_to_go += length
            if not (plan.gathers and self._upward[-1] == 0):
                self._results_to_go += length * sum(self._job.voters[child] for child in children)

    def absent(self, weights: Sequence[float]) -> list[int]:
        """The chunks of an all-gather that nobody sends, as their owner has no weight."""
        owners = [part.owner for part in self._job.parts] if self._job.plan.gathers else []
        return self._of(part for part, owner in enumerate(owners) if weights[owner] == 0)

    def weight(self, rank: int, number: int) -> float:
        """The weight of `rank`'s contribution to a chunk that I reduce; 0: it contributes nothing."""
        return self._weights[self.chunks[number].part].get(rank, 0.0)

    def upward(self, number: int) -> float:
        """The weight of what I send to the chunk's receiver or, without one, of all; 0: I send nothing."""
        return self._upward[self.chunks[number].part]

    def only_mine(self, number: int) -> bool:
        """Whether nobody but me contributes to a chunk that I reduce."""
        return self._contributors[self.chunks[number].part] == 1 << self.rank

    # -- what arrives

    def refusal(self, rank: int, header: Header) -> str | None:
        """Why this CONTRIBUTION or RESULT frame of `rank` cannot be part of the job; None when it can."""
        job = self._job
        number = self.number(header.part, header.chunk)
        if header.sender != rank:
            return f"it signs as rank {header.sender}"
        if number is None:
            return f"there is no chunk {header.chunk} in part {header.part}"
        chunk = self.chunks[number]
        if header.kind is Kind.CONTRIBUTION and not self.is_partial(rank, number):
            codec, size = job.contribution_codec, chunk.contribution_bytes
        else:
            codec, size = job.result_codec, chunk.result_bytes
        if header.kind is Kind.CONTRIBUTION:
            if rank not in self.children(number) and rank != self.partner(number):
                return f"its part {header.part} is not ours to reduce"
            if not self.weight(rank, number):
                return "its weight is 0"
        elif self.parent(number) != rank:
            return f"part {header.part} is not its own to return"
        if header.codec != codec:
            return f"codec {header.codec}, not {codec}"
        fits = header.length < size if header.flags & PACKED else header.length == size
        if header.count != chunk.count or not fits:
            return f"{header.count} elements in {header.length} bytes, not {chunk.count} in {size}"
        return None

    def contribution_due(self, rank: int, number: int) -> bool:
        if rank == self.partner(number):
            return not self._have_other[number]
        return not self._contributed[number] >> rank & 1

    def whole(self, number: int) -> bool:
        """Whether all contributions to a chunk that I reduce are in, those of the other side apart."""
        return self._contributed[number] == self._contributors[self.chunks[number].part]

    def take_contribution(self, rank: int, number: int) -> bool:
        """Note that a rank's contribution to a chunk that I reduce is in. True: it was the last."""
        self._contributed[number] |= 1 << rank
        self._counts[0][rank] += 1
        return self.whole(number)

    def take_other(self, number: int) -> None:
        """Note that the partial mean of the one with which I swap is here."""
        self._have_other[number] = 1
        partner = self.partner(number)
        assert partner is not None
        self._counts[0][partner] += 1

    def sides(self, number: int) -> tuple[tuple[int, float], ...] | None:
        """(rank, weight) of both sides that swap, the owner's first, or of the one that has a weight, once
        all partial means are here; None: they are not.
        """
        partner, plan = self.partner(number), self._job.plan
        if partner is None or not self.whole(number):
            return None
        if self.weight(partner, number) and not self._have_other[number]:
            return None
        owner = plan.parts[self.chunks[number].part].owner
        both = {self.rank: self.upward(number), partner: self.weight(partner, number)}
        ranks = (owner, self.rank if partner == owner else partner)
        return tuple((rank, both[rank]) for rank in ranks if both[rank] > 0)

    def result_due(self, number: int) -> bool:
        return not self._have_result[number]

    def take_result(self, number: int, crc: int) -> None:
        """Note that the encoded result of a chunk is in place, received or made here."""
        self._have_result[number] = 1
        self._crcs[number] = crc
        self._results_due -= 1
        self._counts[1][self.giver(number)] += 1

    def result_crc(self, number: int) -> int:
        return self._crcs[number]

    # -- what leaves

    def gone(self, kind: Kind, rank: int, number: int) -> None:
        """Note that a chunk for `rank` was handed to the kernel. May be called again."""
        if kind is Kind.CONTRIBUTION:
            if not self._contribution_gone[number]:
                self._contribution_gone[number] = 1
                self._contributions_to_go -= 1
                self._counts[2][rank] += 1
        elif not self._result_gone[number] >> rank & 1:
            self._result_gone[number] |= 1 << rank
            self._counts[3][rank] += 1
            if self._voters >> rank & 1:
                self._results_to_go -= 1

    def resendable(self, rank: int, missing: Missing) -> tuple[list[int], list[int]]:
        """My contributions and results among the chunks that `rank` misses, unless they are not ready."""
        contributions: list[int] = []
        results: list[int] = []
        for part, index in missing.contributions:
            number = self.number(part, index)
            if number is None or self.receiver(number) != rank or not self.upward(number):
                continue
            if not self.reduces(number) or self.whole(number):
                contributions.append(number)
        for part, index in missing.results:
            number = self.number(part, index)
            if number is not None and rank in self.children(number) and self._have_result[number]:
                results.append(number)
        return contributions, results

    # -- where it stands

    @property
    def done(self) -> bool:
        return self.begun and not (self._results_due or self._contributions_to_go or self._results_to_go)

    def missing(self, rank: int) -> Missing:
        contributions = [
            number
            for number in self.below(rank)
            if self.weight(rank, number) and self.contribution_due(rank, number)
        ]
        results = [number for number in self.above(rank) if self.result_due(number)]
        return Missing(self._names(contributions), self._names(results))

    def _names(self, numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
        return tuple((self.chunks[number].part, self.chunks[number].index) for number in numbers)

    def progress(self, first_byte_at: float, last_byte_at: float) -> JobProgress:
        contributions_received, results_received, contributions_sent, results_sent = map(tuple, self._counts)
        return JobProgress(
            contributions_received,
            results_received,
            contributions_sent,
            results_sent,
            first_byte_at,
            last_byte_at,
        )

    def digests(self) -> tuple[bytes, ...]:
        """For each part, SHA-256 over the little-endian CRC-32s of its encoded result chunks."""
        return tuple(
            hashlib.sha256(
                b"".join(
                    crc.to_bytes(4, "little") for crc in self._crcs[self._first[part] : self._first[part + 1]]
                )
            ).digest()
            for part in range(len(self._job.parts))
        )
