"""The arithmetic of one reduce job on top of its ledger: encode what leaves, add what comes, make results."""

from __future__ import annotations

import numpy as np

from p2pavg.codecs import Codec, is_sound, is_sparse
from p2pavg.native import crc32
from p2pavg.transport.engine import F32, U8, ReduceJob, Start
from p2pavg.transport.python.buffers import BufferPool
from p2pavg.transport.python.ledger import Ledger


class NonFiniteError(ValueError):
    """A value that is not finite would enter the mean. rank: the member that sent it."""

    def __init__(self, rank: int) -> None:
        super().__init__("its contribution is not finite")
        self.rank = rank


class Reducer:
    """Adds up contributions, in an accumulator per chunk from its first contribution until its result."""

    def __init__(
        self, job: ReduceJob, contribution: Codec, result: Codec, exact: Codec, pool: BufferPool
    ) -> None:
        """exact: the codec "none". Raises ValueError when `result` or the codecs do not fit the plan."""
        if not is_sparse(contribution) == is_sparse(result) == job.plan.gathers:
            raise ValueError("what is sparse is gathered, and nothing else")
        self.spec = job
        self.ledger = Ledger(job, contribution.encoded_size, result.encoded_size)
        self._contribution = contribution
        self._result = result
        self._exact = exact
        self._pool = pool
        self._start = Start((), 0.0)
        self._sums: dict[int, U8] = {}
        self._partials: dict[
            int, U8
        ] = {}  # of chunks for which I am a deputy or swap, encoded for the receiver
        self._others: dict[int, U8] = {}  # partial means of those with which I swap
        if len(job.result) != self.ledger.result_bytes:
            raise ValueError(f"the job's result has {len(job.result)} bytes, not {self.ledger.result_bytes}")

    def begin(self, start: Start) -> None:
        """Take the weights and this peer's contribution. Raises ValueError when they do not fit the job."""
        job, weights = self.spec, start.weights
        if len(weights) != len(job.links):
            raise ValueError(f"{len(weights)} weights for {len(job.links)} members")
        if min(weights) < 0 or not any(weights):
            raise ValueError("weights must not be negative, and one must be positive")
        if weights[job.rank] > 0 and start.source is None and start.encoded is None:
            raise ValueError("this peer has a weight but nothing to contribute")
        numel, nbytes = self.ledger.own_numel, self.ledger.own_bytes
        if start.source is not None and len(start.source) != numel:
            raise ValueError(f"the source has {len(start.source)} elements, the job {numel}")
        if start.encoded is not None and len(start.encoded) != nbytes:
            raise ValueError(f"{len(start.encoded)} encoded bytes, not {nbytes}")
        self._start = start
        self.ledger.begin(weights)
        for number in self.ledger.absent(weights):
            zeros = self.result_view(number)
            zeros[:] = bytes(len(zeros))
            self.ledger.take_result(number, crc32(zeros))

    @property
    def contributes(self) -> bool:
        """Whether this peer has a weight of its own."""
        return self._start.weights[self.spec.rank] > 0

    # -- contributions

    def contribution(self, number: int, scratch: U8) -> memoryview:
        """The encoded chunk to send, in `scratch` or where it was encoded beforehand. Of a chunk that this
        peer deputies or swaps, that is the partial mean.

        Raises NonFiniteError.
        """
        chunk, start = self.ledger.chunks[number], self._start
        if self.ledger.reduces(number):
            return self._partials[number][: chunk.result_bytes].data
        if start.encoded is not None:
            return start.encoded[
                chunk.contribution_at : chunk.contribution_at + chunk.contribution_bytes
            ].data
        assert start.source is not None
        out = scratch[: chunk.contribution_bytes]
        source = start.source[chunk.start : chunk.start + chunk.count]
        if not self._contribution.encode(source, out, start.scale):
            raise NonFiniteError(self.spec.rank)
        return out.data

    def add(self, rank: int, number: int, body: U8) -> bool:
        """Add rank's encoded chunk to one that I reduce. True: that completed it. Raises NonFiniteError."""
        acc = self._sum(number)
        codec = self._result if self.ledger.is_partial(rank, number) else self._contribution
        if not codec.decode_add(body, acc, self.ledger.weight(rank, number)):
            raise NonFiniteError(rank)
        return self.ledger.take_contribution(rank, number)

    def add_own(self, number: int) -> bool:
        """Add what only I contribute to one that I reduce. True: that completed it. Raises NonFiniteError."""
        if self.spec.plan.gathers:
            self._encode_own(number)
            return self.ledger.take_contribution(self.spec.rank, number)
        self._sum(number)
        return self.ledger.whole(number)

    def _sum(self, number: int) -> F32:
        """The accumulator of a chunk; a fresh one holds my own contribution, or zeros."""
        count = self.ledger.chunks[number].count
        raw = self._sums.get(number)
        if raw is not None:
            return raw[: 4 * count].view(np.float32)
        raw = self._sums[number] = self._pool.take(4 * count)
        acc = raw[: 4 * count].view(np.float32)
        weight = self._start.weights[self.spec.rank]
        if weight == 0:
            acc.fill(0)
            return acc
        self._put_own(number, raw, weight)
        self.ledger.take_contribution(self.spec.rank, number)
        return acc

    def _encode_own(self, number: int) -> None:
        """A chunk of an all-gather's own part <- this peer's contribution, as it is."""
        chunk, start, ledger = self.ledger.chunks[number], self._start, self.ledger
        out = self.result_view(number)
        if start.encoded is not None:
            at = chunk.contribution_at - ledger.own_at
            out[:] = start.encoded[at : at + chunk.contribution_bytes].data
            return
        assert start.source is not None
        source = start.source[chunk.start - ledger.own_start :][: chunk.count]
        if not self._contribution.encode(source, out, start.scale):
            raise NonFiniteError(self.spec.rank)

    def _put_own(self, number: int, raw: U8, weight: float) -> None:
        chunk, start = self.ledger.chunks[number], self._start
        room = raw[: 4 * chunk.count]
        if start.source is not None:
            source = start.source[chunk.start : chunk.start + chunk.count]
            finite = self._exact.encode(source, room, weight * start.scale)
        else:
            assert start.encoded is not None
            body = start.encoded[chunk.contribution_at : chunk.contribution_at + chunk.contribution_bytes]
            room.fill(0)
            finite = self._contribution.decode_add(body, room.view(np.float32), weight)
        if not finite:
            raise NonFiniteError(self.spec.rank)

    # -- results

    def finish_chunk(self, number: int) -> None:
        """Divide and encode a sum that is complete, into `result` or as a partial mean, and forget it.

        Raises NonFiniteError.
        """
        chunk, mine = self.ledger.chunks[number], self.ledger.receiver(number) is None
        if self.spec.plan.gathers:
            self.ledger.take_result(number, crc32(self.result_view(number)))
            return
        raw = self._sums.pop(number)
        if mine:
            out = self.result_view(number)
        else:
            self._partials[number] = self._pool.take(chunk.result_bytes)
            out = self._partials[number][: chunk.result_bytes].data
        acc = raw[: 4 * chunk.count].view(np.float32)
        finite = self._result.encode(acc, out, 1.0 / self.ledger.upward(number))
        self._pool.give(raw)
        if not finite:
            raise NonFiniteError(self.spec.rank)
        if mine:
            self.ledger.take_result(number, crc32(out))

    def keep(self, number: int, body: U8) -> None:
        """Keep the partial mean of the one with which I swap."""
        self._others[number] = self._pool.take(len(body))
        self._others[number][: len(body)] = body
        self.ledger.take_other(number)

    def unite(self, number: int) -> bool:
        """Make the result of both partial means, as they are encoded: so both sides have the same bits. True:
        it is in place; False: one is not here yet. Raises NonFiniteError.
        """
        sides = self.ledger.sides(number)
        if sides is None:
            return False
        chunk = self.ledger.chunks[number]
        raw = self._pool.take(4 * chunk.count)
        acc = raw[: 4 * chunk.count].view(np.float32)
        total = float(sum(self._start.weights))
        for turn, (rank, weight) in enumerate(sides):
            held = self._partials if rank == self.spec.rank else self._others
            body = held[number][: chunk.result_bytes]
            if turn:
                finite = self._result.decode_add(body, acc, weight)
            else:
                self._result.decode(body, acc, weight)
                finite = bool(np.isfinite(acc).all())
            if not finite:
                raise NonFiniteError(rank)
        out = self.result_view(number)
        finite = self._result.encode(acc, out, 1.0 / total)
        self._pool.give(raw)
        if number in self._others:
            self._pool.give(self._others.pop(number))
        if not finite:
            raise NonFiniteError(self.spec.rank)
        self.ledger.take_result(number, crc32(out))
        return True

    def result_view(self, number: int) -> memoryview:
        chunk = self.ledger.chunks[number]
        return self.spec.result[chunk.result_at : chunk.result_at + chunk.result_bytes].data

    def is_sound(self, number: int, body: memoryview) -> bool:
        """Whether a chunk that came as a result can be one. Of a mean its owner answers for that; what is
        gathered was another peer's alone.
        """
        chunk = self.ledger.chunks[number]
        return not self.spec.plan.gathers or is_sound(self._result, body, chunk.count)

    def release(self) -> None:
        for held in (self._sums, self._partials, self._others):
            for raw in held.values():
                self._pool.give(raw)
            held.clear()
