"""Averaging plain tensors: every call is an epoch to which each waiting peer brings one sample."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from p2pavg import codecs
from p2pavg.errors import ConfigurationError, RoundFailedError
from p2pavg.report import RoundReport
from p2pavg.rounds.session import Session
from p2pavg.rounds.training import Average, Contribution, KeepGoing, Snapshot, TrainingSpec

if TYPE_CHECKING:
    from p2pavg.peer.peer import Peer

logger = logging.getLogger("p2pavg.peer.peer")
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


class NoState:
    """A peer that only averages has nothing that a newcomer needs."""

    def snapshot(self) -> Snapshot:
        """An empty snapshot."""
        return {}, {}

    def load(self, meta: Mapping[str, Any], buffers: Mapping[str, U8]) -> None:
        """Load an empty snapshot: nothing changes."""


class Averager:
    """Carries tensors into a flat float32 vector, through one round, and back."""

    def __init__(self, compression: str | codecs.Codec) -> None:
        self._codec = codecs.get(compression)
        self._session: Session | None = None
        self._vector: F32 = np.empty(0, np.float32)
        self._sizes: tuple[int, ...] = ()
        self._one_at_a_time = threading.Lock()
        self._told_alone = False
        self.cpu_seconds = 0.0

    def average(
        self, peer: Peer, tensors: Sequence[Any] | Any, weight: float, group_size: int | None, timeout: float
    ) -> RoundReport:
        """Average in place; blocks. Arguments and errors are those of `Peer.all_reduce`."""
        listed = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        flats = [_Flat.of(tensor) for tensor in listed]
        started = time.thread_time()
        with self._one_at_a_time:
            session = self._ready(peer, tuple(flat.size for flat in flats), group_size)
            direct = flats[0].direct if len(flats) == 1 else None
            vector = self._staging() if direct is None else direct
            if direct is None:
                at = 0
                for flat in flats:
                    flat.read(vector[at : at + flat.size])
                    at += flat.size
            self._round(session, vector, weight, timeout)
            if direct is None:
                at = 0
                for flat in flats:
                    flat.write(vector[at : at + flat.size])
                    at += flat.size
            report = session.last_report
            self.cpu_seconds += time.thread_time() - started
        assert report is not None
        if group_size is None and len(report.members) == 1 and not self._told_alone:
            self._told_alone = True
            logger.warning(
                "all_reduce averaged over this peer alone, because no other was in the run when it was "
                "called; all_reduce(..., group_size=N) waits until N peers call it"
            )
        return report

    def _staging(self) -> F32:
        if self._vector.size == 0:
            self._vector = np.empty(sum(self._sizes), np.float32)
        return self._vector

    def _ready(self, peer: Peer, sizes: tuple[int, ...], group_size: int | None) -> Session:
        if self._session is None:
            numel = sum(sizes)
            if numel == 0:
                raise ConfigurationError("there is nothing to average: the tensors have no elements")
            digest = hashlib.sha256(repr(sizes).encode()).digest()
            spec = TrainingSpec(
                target_batch_size=group_size or 1,
                numel=numel,
                schema=hashlib.sha256(b"tensors" + digest).digest(),
                initial_digest=digest,
                compression=self._codec,
                state=NoState(),
                weighted=True,
            )
            self._session = peer.training(spec)
            self._sizes = sizes
        if sizes != self._sizes:
            raise ConfigurationError(
                f"this peer averages tensors of {self._sizes} elements, not {sizes}; "
                f"use another Peer and run_id for those"
            )
        peer.set_target(group_size)
        return self._session

    def _round(self, session: Session, vector: F32, weight: float, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        contribution = Contribution(vector if weight > 0 else None, 1.0, 1, float(weight))
        while True:
            if session.samples() == 0:
                session.count(1)
            outcome = session.arrive(contribution, max(0.0, deadline - time.monotonic()))
            if isinstance(outcome, KeepGoing):
                left = deadline - time.monotonic()
                if left <= 0 or not session.wait_until_wanted(left):
                    session.discard("no group came together")
                    raise RoundFailedError(
                        f"no group came together within {timeout:.0f} s; "
                        f"check that all peers call all_reduce, or raise timeout="
                    )
                continue
            start = time.monotonic()
            if isinstance(outcome, Average) and not outcome.late:
                outcome.result.decode_into(vector)
                session.applied(time.monotonic() - start)
                return
            session.applied(0.0)


class _Flat:
    """One tensor or array, seen as a run of float32."""

    def __init__(self, array: Any, tensor: Any | None) -> None:
        self._array = array
        self._tensor = tensor
        self.size = int(array.size if tensor is None else tensor.numel())
        writable = (
            tensor is None
            and array.dtype == np.float32
            and array.flags.c_contiguous
            and array.flags.writeable
        )
        self.direct: F32 | None = array.reshape(-1) if writable else None

    @classmethod
    def of(cls, value: Any) -> _Flat:
        """Wrap a tensor or array. Raises ConfigurationError for one that holds no floats."""
        if isinstance(value, np.ndarray):
            if value.dtype not in (np.float32, np.float16) or not value.flags.writeable:
                raise ConfigurationError(
                    f"only writable float32 and float16 arrays can be averaged, not {value.dtype}; "
                    f"convert it first"
                )
            return cls(value, None)
        import torch

        if not isinstance(value, torch.Tensor) or value.dtype not in (
            torch.float32,
            torch.float16,
            torch.bfloat16,
        ):
            kind = getattr(value, "dtype", type(value).__name__)
            raise ConfigurationError(
                f"only float32, float16 and bfloat16 tensors and arrays can be averaged, not {kind}; "
                f"convert it first"
            )
        data = value.detach()
        if data.device.type == "cpu" and data.dtype == torch.float32 and data.is_contiguous():
            return cls(data.numpy(), None)
        return cls(None, data)

    def read(self, out: F32) -> None:
        """out <- the values as float32."""
        if self._tensor is None:
            out[:] = self._array.reshape(-1)
        else:
            import torch

            torch.from_numpy(out).copy_(self._tensor.reshape(-1))

    def write(self, values: F32) -> None:
        """The tensor or array <- values, rounded to its dtype."""
        if self._tensor is None:
            self._array[...] = values.reshape(self._array.shape)
        else:
            import torch

            self._tensor.copy_(torch.from_numpy(values).reshape(self._tensor.shape))
