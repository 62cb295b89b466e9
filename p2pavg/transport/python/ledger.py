"""Which chunks of a reduce job have come, have gone and are still due. No I/O, no arithmetic.

A chunk is known by its number in the whole vector: the chunks of part 0, then those of part 1, and so on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from p2pavg.transport.engine import JobProgress, Missing, ReduceJob
from p2pavg.transport.frames import Header, Kind


@dataclass(frozen=True, slots=True)
class Chunk:
    """Where one chunk lies: elements [start, start + count), and its bytes in both encoded layouts."""

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
        self.contribution_bytes = contribution_at
        self.result_bytes = result_at

        self.begun = False
        self._contributors = 0  # bit per rank
        self._contributed = [0] * len(self.chunks)  # of my own chunks: bit per rank that is in
        self._have_result = bytearray(len(self.chunks))
        self._crcs = [0] * len(self.chunks)  # of results
        self._results_due = len(self.chunks)
        self._contribution_gone = bytearray(len(self.chunks))
        self._contributions_to_go = 0
        self._result_gone = [0] * len(self.chunks)  # bit per rank that it was sent to
        self._voters = sum(1 << rank for rank, votes in enumerate(job.voters) if votes)
        self._results_to_go = 0  # to voters
        self._counts = [[0] * self._members for _ in range(4)]

    # -- where things lie

    def owner(self, number: int) -> int:
        return self._job.parts[self.chunks[number].part].owner

    def number(self, part: int, index: int) -> int | None:
        """The chunk's number; None when the job has no such chunk."""
        if not 0 <= part < len(self._job.parts):
            return None
        number = self._first[part] + index
        return number if index >= 0 and number < self._first[part + 1] else None

    def owned_by(self, rank: int) -> list[int]:
        return [
            number
            for index, part in enumerate(self._job.parts)
            if part.owner == rank
            for number in range(self._first[index], self._first[index + 1])
        ]

    def others(self) -> list[int]:
        """All other ranks, starting with the next one, so that peers do not all start with the same one."""
        return [(self.rank + step) % self._members for step in range(1, self._members)]

    # -- begin

    def begin(self, contributors: Iterable[int]) -> None:
        """contributors: the ranks with weight > 0."""
        self.begun = True
        self._contributors = sum(1 << rank for rank in set(contributors))
        mine = len(self.owned_by(self.rank))
        if self.contributes(self.rank):
            self._contributions_to_go = len(self.chunks) - mine
        other_voters = (self._voters & ~(1 << self.rank)).bit_count()
        self._results_to_go = mine * other_voters

    def contributes(self, rank: int) -> bool:
        return bool(self._contributors >> rank & 1)

    # -- what arrives

    def refusal(self, rank: int, header: Header) -> str | None:
        """Why this CONTRIBUTION or RESULT frame of `rank` cannot be part of the job; None when it can."""
        job = self._job
        number = self.number(header.part, header.chunk)
        if header.sender != rank:
            return f"it signs as rank {header.sender}"
        if number is None:
            return f"there is no chunk {header.chunk} in part {header.part}"
        chunk, owner = self.chunks[number], self.owner(number)
        if header.kind is Kind.CONTRIBUTION:
            codec, size = job.contribution_codec, chunk.contribution_bytes
            if owner != self.rank:
                return f"part {header.part} is not ours"
            if not self.contributes(rank):
                return "its weight is 0"
        else:
            codec, size = job.result_codec, chunk.result_bytes
            if owner != rank:
                return f"part {header.part} is not its own"
        if header.codec != codec:
            return f"codec {header.codec}, not {codec}"
        if header.count != chunk.count or header.length != size:
            return f"{header.count} elements in {header.length} bytes, not {chunk.count} in {size}"
        return None

    def contribution_due(self, rank: int, number: int) -> bool:
        return not self._contributed[number] >> rank & 1

    def contributions_in(self, number: int) -> int:
        """How many members' contributions to my chunk are in."""
        return self._contributed[number].bit_count()

    def take_contribution(self, rank: int, number: int) -> bool:
        """rank's contribution to my chunk is in (my own one too). True: it was the last."""
        self._contributed[number] |= 1 << rank
        self._counts[0][rank] += 1
        return self._contributed[number] == self._contributors

    def result_due(self, number: int) -> bool:
        return not self._have_result[number]

    def take_result(self, number: int, crc: int) -> None:
        """The encoded result of a chunk is in place: received, or for my own chunks made."""
        self._have_result[number] = 1
        self._crcs[number] = crc
        self._results_due -= 1
        self._counts[1][self.owner(number)] += 1

    def result_crc(self, number: int) -> int:
        return self._crcs[number]

    # -- what leaves

    def gone(self, kind: Kind, rank: int, number: int) -> None:
        """My contribution to, or result for, `rank` was handed to the kernel. Again changes nothing."""
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
        """(contributions, results) of mine among what `rank` misses; what is not ready is left out."""
        contributions: list[int] = []
        results: list[int] = []
        for part, index in missing.contributions:
            number = self.number(part, index)
            if number is not None and self.owner(number) == rank and self.contributes(self.rank):
                contributions.append(number)
        for part, index in missing.results:
            number = self.number(part, index)
            if number is not None and self.owner(number) == self.rank and self._have_result[number]:
                results.append(number)
        return contributions, results

    # -- where it stands

    @property
    def done(self) -> bool:
        return self.begun and not (self._results_due or self._contributions_to_go or self._results_to_go)

    def missing(self, rank: int) -> Missing:
        contributions: tuple[tuple[int, int], ...] = ()
        if self.contributes(rank) and rank != self.rank:
            contributions = tuple(
                (self.chunks[number].part, self.chunks[number].index)
                for number in self.owned_by(self.rank)
                if self.contribution_due(rank, number)
            )
        results = tuple(
            (self.chunks[number].part, self.chunks[number].index)
            for number in self.owned_by(rank)
            if rank != self.rank and self.result_due(number)
        )
        return Missing(contributions, results)

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
        """Per part, sha256 over the little-endian CRC-32s of its encoded result chunks."""
        return tuple(
            hashlib.sha256(
                b"".join(
                    crc.to_bytes(4, "little") for crc in self._crcs[self._first[part] : self._first[part + 1]]
                )
            ).digest()
            for part in range(len(self._job.parts))
        )
