"""Contributions that an accelerator encodes while they flow. On the loop thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from p2pavg.allreduce.encoding import Encodable, Encoding
from p2pavg.allreduce.jobs import Jobs

INTERVAL_S = 0.001  # between two looks at what is encoded: tens of MB


class Supply:
    """Begins attempts with such contributions, and passes on chunks as they come."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        jobs: Jobs,
        refused: Callable[[int, int, str], None],
        broken: Callable[[Exception], None],
    ) -> None:
        """refused(transfer, own rank, why): a value is not finite, or the codec failed. broken: is told what
        nobody expected.
        """
        self._loop = loop
        self._jobs = jobs
        self._refused = refused
        self._broken = broken

    def begin(self, transfer: int, weights: Sequence[float], gradient: Encodable, scale: float) -> None:
        """As `Jobs.begin`."""
        job = self._jobs.get(transfer)
        assert job is not None
        # Parts of an all-gather are contributions, each of the whole vector.
        parts = [(0 if job.plan.gathers else part.start, part.count) for part in job.own_parts()]
        encoding = gradient.encode(job.codec, parts, job.layout.chunk_elements, scale)
        self._jobs.begin(transfer, weights, encoding, 1.0)
        self._pass_on(transfer, encoding, job.rank)

    def _pass_on(self, transfer: int, encoding: Encoding, rank: int) -> None:
        try:
            self._pass_on_chunks(transfer, encoding, rank)
        except Exception as error:
            self._broken(error)

    def _pass_on_chunks(self, transfer: int, encoding: Encoding, rank: int) -> None:
        if encoding.failed():
            if self._jobs.get(transfer) is not None:
                self._refused(transfer, rank, "its codec cannot encode its gradient")
        elif self._jobs.supply(transfer):
            self._loop.call_later(INTERVAL_S, self._pass_on, transfer, encoding, rank)
        elif self._jobs.get(transfer) is not None and not encoding.finite():
            self._refused(transfer, rank, "its contribution is not finite")
