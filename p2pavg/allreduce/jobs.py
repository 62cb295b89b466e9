"""Jobs: one averaging attempt on the engine, from promise to commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from p2pavg import codecs
from p2pavg.allreduce.encoded import EncodedResult, Layout, shares_of
from p2pavg.allreduce.encoding import DeviceGradient, Encodable, Encoding, HostEncoding, HostGradient
from p2pavg.allreduce.feedback import Residual
from p2pavg.allreduce.partition import chunk_elements, gathered_chunk_elements
from p2pavg.allreduce.result_memory import ResultMemory
from p2pavg.allreduce.stages import sent_by_stage
from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.transport.engine import NOBODY, SELF, Engine, JobProgress, ReduceJob, Start

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


MOST_STATE = 8  # the longest exact vector, in gradients: parameters, and what optimizers keep


def _by_chance(codec: codecs.Codec, start: int, values: F32, scale: float, out: U8) -> bool:
    """An `EncodeChunk`."""
    assert isinstance(codec, codecs.StochasticInt8)
    return codec.at(codec.epoch, start).encode(values, out, scale)


class NoLinkError(Exception):
    """A member has no link to this peer. `rank` says who."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"no link to rank {rank}")
        self.rank = rank


@dataclass(slots=True)
class JobInProgress:
    """An attempt in progress."""

    transfer: int
    rank: int
    links: tuple[int, ...]
    peers: tuple[bytes, ...]
    voters: tuple[bool, ...]
    plan: Plan
    layout: Layout
    result: U8
    exact: bool
    epoch: int = 0
    begun: bool = False
    weights: tuple[float, ...] = ()
    codec: codecs.Codec = field(default_factory=lambda: codecs.get("none"))  # of contributions
    growing: Encoding | None = None  # our contribution, when it is encoded while it flows
    _expected: tuple[tuple[int, int], ...] = ()
    _owed: tuple[int, ...] = ()

    def encoded(self) -> EncodedResult:
        """The result; whole only after the engine reported the job done."""
        layout = self.layout
        if self.plan.gathers:
            layout = replace(layout, shares=shares_of(layout.parts, self.weights))
        return EncodedResult(layout, self.result)

    def sent_by_stage(self) -> dict[str, int]:
        """Encoded bytes that this peer sent, each counted once, by stage of the plan."""
        sizes = (partial(self._size, codec) for codec in (self.codec, self.layout.codec))
        return sent_by_stage(self.plan, self.rank, self.weights, *sizes)

    def _size(self, codec: codecs.Codec, count: int) -> int:
        whole, rest = divmod(count, self.layout.chunk_elements)
        size = whole * codec.encoded_size(self.layout.chunk_elements)
        return size + (codec.encoded_size(rest) if rest else 0)

    def own_parts(self) -> list[Part]:
        """The parts that this peer contributes to: in an all-gather its own."""
        parts = self.plan.parts
        return [part for part in parts if part.owner == self.rank or not self.plan.gathers]

    def expected(self, rank: int) -> tuple[int, int]:
        """(contribution chunks, result chunks) that this peer awaits from `rank`."""
        return self._expected[rank]

    def owed(self, rank: int) -> int:
        """Chunks of its own that this peer contributes to what `rank` adds up: those that are ready to go.
        Partial means are not among them, which come to be while the contributions of others arrive.
        """
        return self._owed[rank]

    def count(self) -> None:
        """What is expected of whom: once the links are known, and again once the weights are."""
        members = len(self.links)
        due, owed = [[0, 0] for _ in range(members)], [0] * members
        for index, part in enumerate(self.plan.parts):
            chunks = -(-part.count // self.layout.chunk_elements)
            parent = self.plan.parent(index, self.rank)
            if parent is not None:
                due[parent][1] += chunks
            partner = self.plan.partner(index, self.rank)
            givers = (
                *self.plan.children(index, self.rank, members),
                *(() if partner is None else (partner,)),
            )
            for giver in givers if self.weights else ():
                due[giver][0] += chunks if self.plan.weight(index, giver, self.weights) > 0 else 0
            receiver = self.plan.receiver(index, self.rank)
            if receiver is not None and self.weights and not self.plan.sends_partial(index, self.rank):
                owed[receiver] += chunks if self.weights[self.rank] > 0 else 0
            if part.owner == self.rank:
                due[self.rank][0] += chunks if self.weights and self.weights[self.rank] > 0 else 0
        self._expected = tuple((contributions, results) for contributions, results in due)
        self._owed = tuple(owed)


class Jobs:
    """Opens, begins and ends attempts."""

    def __init__(
        self,
        engine: Engine,
        codec: codecs.Codec,
        numel: int,
        allocate: Callable[[int], U8] | None = None,
        feedback: int = 0,
    ) -> None:
        """allocate: host memory for results and residuals, uint8[n]; None: ordinary memory. feedback: of so
        many vectors, which take turns epoch by epoch, add to contributions what the codec took from earlier
        ones, where it takes that much.
        """
        self._engine = engine
        self.codec = codec
        self._result_codec = codecs.for_results(codec)
        self._residuals = [
            Residual(numel, allocate) for _ in range(feedback if codecs.has_feedback(codec) else 0)
        ]
        self._outgoing = ResultMemory()
        self._numel = numel
        self._open: dict[int, JobInProgress] = {}
        self._memory = ResultMemory(allocate)

    def get(self, transfer: int) -> JobInProgress | None:
        """The open job, if there is one."""
        return self._open.get(transfer)

    def open(
        self,
        transfer: int,
        me: bytes,
        members: Sequence[tuple[bytes, bool]],
        plan: Plan,
        links: Mapping[bytes, int],
        exact: bool = False,
        epoch: int = 0,
    ) -> JobInProgress:
        """members: (peer id, votes) in rank order. exact: the vector goes uncompressed, with more behind it.
        epoch: what chance is drawn for, and which vector's turn it is.
        Raises NoLinkError when a member with which we exchange something has no link to us.
        """
        peers = tuple(peer for peer, _ in members)
        voters = tuple(voter for _, voter in members)
        why = plan.why_not(voters)
        if why is not None:
            raise ValueError(f"the plan of the proposed round is impossible: {why}")
        needed = plan.neighbours(peers.index(me), len(peers))
        ids: list[int] = []
        for rank, peer in enumerate(peers):
            link = SELF if peer == me else links.get(peer)
            if link is None and rank in needed:
                raise NoLinkError(rank)
            ids.append(NOBODY if link is None else link)
        sparse = codecs.is_sparse(self.codec)
        if sparse != plan.gathers and not (sparse and sum(voters) == 1):
            raise ValueError("what is sparse is gathered, and nothing else")
        exact = exact or sparse != plan.gathers  # alone
        numel = plan.numel
        if not self._numel <= numel <= (MOST_STATE if exact else 1) * self._numel:
            raise ValueError("the parts of the proposed round do not cover this peer's vector")
        codec, result_codec = self.codec, self._result_codec
        if exact:
            codec = result_codec = codecs.get("none")
        elif isinstance(codec, codecs.StochasticInt8):
            codec = codec.at(epoch, 0)
        counts = [part.count for part in plan.parts]
        chunk = gathered_chunk_elements(numel) if plan.gathers else chunk_elements(counts)
        layout = Layout(plan.parts, chunk, result_codec)
        result, rank = self._memory.take(layout.nbytes), peers.index(me)
        job = JobInProgress(
            transfer, rank, tuple(ids), peers, voters, plan, layout, result, exact, epoch, codec=codec
        )
        job.count()
        self._engine.open_reduce(
            ReduceJob(
                transfer=transfer,
                rank=job.rank,
                links=job.links,
                voters=voters,
                plan=plan,
                chunk_elements=chunk,
                contribution_codec=codec.wire_id,
                result_codec=result_codec.wire_id,
                result=job.result,
            )
        )
        self._open[transfer] = job
        return job

    def prepared(
        self, transfer: int, weights: Sequence[float], gradient: F32 | DeviceGradient
    ) -> F32 | Encodable:
        """The gradient, or one that is encoded here because it takes more than the engine knows.

        When all parts are our own and the gradient is here, nothing is rounded, and the residual waits.
        """
        job = self._open[transfer]
        residual = self._residual(job)
        alone = not job.plan.gathers and all(part.owner == job.rank for part in job.plan.parts if part.count)
        if job.exact or (alone and isinstance(gradient, np.ndarray)):
            return gradient
        if residual is not None:
            share = weights[job.rank] / sum(weights)
            if not isinstance(gradient, np.ndarray):
                return gradient.with_feedback(residual.owed(share))
            return HostGradient(gradient, partial(residual.encode, share=share), self._outgoing.take)
        if isinstance(job.codec, codecs.StochasticInt8) and isinstance(gradient, np.ndarray):
            return HostGradient(gradient, _by_chance, self._outgoing.take)
        return gradient

    def begin(
        self,
        transfer: int,
        weights: Sequence[float],
        source: F32 | Encoding | None,
        scale: float,
    ) -> None:
        """Let gradients flow. source: float32[numel], unchanged until the job ended, or chunks that are being
        encoded, scaled already: call `supply` until they are all in place; None when the own weight is 0.
        """
        job = self._open[transfer]
        job.begun = True
        job.weights = tuple(weights)
        job.count()
        if source is None or isinstance(source, np.ndarray):
            start = Start(job.weights, scale, source)
        else:
            job.growing = source
            start = Start(job.weights, scale, None, source.data, ready=0)
        self._engine.begin(transfer, start)

    def supply(self, transfer: int) -> bool:
        """Let go what has been encoded since. True: there is more to come."""
        job = self._open.get(transfer)
        if job is None or job.growing is None:
            return False
        done = job.growing.chunks_done()
        self._engine.supply(transfer, done)
        return done < sum(-(-part.count // job.layout.chunk_elements) for part in job.own_parts())

    def progress(self, transfer: int) -> JobProgress:
        """How far the exchange with each member is."""
        return self._engine.progress(transfer)

    def running(self) -> list[int]:
        """Transfers that have begun."""
        return [transfer for transfer, job in self._open.items() if job.begun]

    def cancel(self, transfer: int) -> None:
        """Forget the attempt; idempotent."""
        job = self._open.pop(transfer, None)
        if job is not None:
            self._engine.cancel(transfer)
            if isinstance(job.growing, HostEncoding):
                job.growing.stop()

    def finish(self, transfer: int) -> JobInProgress:
        """The attempt was committed."""
        self._engine.finish(transfer)
        job = self._open.pop(transfer)
        residual = self._residual(job)
        if residual is not None and job.growing is not None and job.growing.whole():
            residual.commit()
        return job

    def healed(self) -> None:
        """This peer loaded another one's state."""
        for residual in self._residuals:
            residual.forget()

    def _residual(self, job: JobInProgress) -> Residual | None:
        """That of the vector whose turn the job's epoch is."""
        return self._residuals[job.epoch % len(self._residuals)] if self._residuals else None

    def cancel_all(self) -> None:
        """Forget every attempt."""
        for transfer in list(self._open):
            self.cancel(transfer)
