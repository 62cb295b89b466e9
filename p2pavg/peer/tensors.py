"""Averaging plain tensors: every call is an epoch to which each waiting peer brings one sample."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from p2pavg import codecs
from p2pavg.errors import ClosedError, ConfigurationError, RoundFailedError
from p2pavg.report import RoundReport
from p2pavg.rounds.protocol.causes import Cause
from p2pavg.rounds.session import Session
from p2pavg.rounds.training import Average, Contribution, KeepGoing, Snapshot, TrainingSpec

if TYPE_CHECKING:
    from p2pavg.peer.peer import Peer

logger = logging.getLogger("p2pavg.peer.peer")
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
FIRST_PAUSE_S = 0.02  # after a round that came to nothing, and twice as long after each further one
MOST_PAUSE_S = 0.5


class NoState:
    """A peer that only averages has nothing that a newcomer needs."""

    def snapshot(self) -> Snapshot:
        """An empty snapshot."""
        return {}, {}

    def load(self, meta: Mapping[str, Any], buffers: Mapping[str, U8]) -> None:
        """Load an empty snapshot: nothing changes."""


class Call:
    """One call of `all_reduce`, from its first moment."""

    def __init__(self, tensors: Sequence[Any] | Any, weight: float, size: int | None, timeout: float) -> None:
        """Raises ConfigurationError for tensors that cannot be averaged. size: of the group."""
        listed = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        self.flats = [_Flat.of(tensor) for tensor in listed]
        self.sizes = tuple(flat.size for flat in self.flats)
        if not sum(self.sizes):
            raise ConfigurationError("there is nothing to average: the tensors have no elements")
        self.weight, self.size, self.timeout = float(weight), size, timeout
        self.called_off = threading.Event()
        self._deadline = time.monotonic() + timeout

    def left(self) -> float:
        """Seconds until the call gives up."""
        return max(0.0, self._deadline - time.monotonic())

    def late(self, why: str) -> RoundFailedError:
        """The call gives up. why: its last round came to nothing, if one did."""
        within = f"within {self.timeout:g} s"
        if why == Cause.NOTHING_TO_AVERAGE.words:
            return RoundFailedError(
                f"no peer with a weight above 0 called all_reduce {within}; give one of them a weight, or "
                f"raise timeout="
            )
        return RoundFailedError(
            f"no group came together {within}{f' (last: {why})' if why else ''}; "
            f"check that all peers call all_reduce, or raise timeout="
        )


class Averager:
    """Carries tensors into a flat float32 vector, through one round, and back: one call after the other, on a
    thread of its own.
    """

    def __init__(self, peer: Peer, compression: str | codecs.Codec) -> None:
        self._peer = weakref.proxy(peer)
        self._codec = codecs.get(compression)
        self._session: Session | None = None
        self._vector: F32 = np.empty(0, np.float32)
        self._sizes: tuple[int, ...] = ()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="p2pavg-all-reduce")
        self._told_alone = False
        self._told_vain: set[str] = set()  # why rounds came to nothing, since the last average
        self.cpu_seconds = 0.0

    def close(self) -> None:
        """Take no further call."""
        self._thread.shutdown(wait=False)

    async def average(
        self, tensors: Sequence[Any] | Any, weight: float, group_size: int | None, timeout: float
    ) -> RoundReport:
        """Average in place. Arguments and errors are those of `Peer.all_reduce`."""
        call = Call(tensors, weight, group_size, timeout)
        self._check(call.sizes)
        try:
            work = self._thread.submit(self._average, call)
        except RuntimeError:
            raise ClosedError("this peer is closed; build a new one") from None
        done = asyncio.wrap_future(work)
        done.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # told, or not wanted
        try:
            await asyncio.wait({done}, timeout=call.left())
            if not done.done() and work.cancel():
                raise RoundFailedError(
                    f"an earlier all_reduce of this peer was under way for all of the {timeout:g} s of this "
                    f"call; await that one first, or raise timeout="
                )
            if not done.done() and self._session is None:
                call.called_off.set()
                raise RoundFailedError(
                    f"this peer had not met the others of the run within {timeout:g} s; raise timeout="
                )
            await asyncio.wait({done})
        except asyncio.CancelledError:
            if not work.cancel():
                self._call_off(call)
                if self._session is not None:  # else it enters the run, and then ends by itself
                    await asyncio.wait({done})  # a round that has begun reads the tensors
            raise
        return done.result()

    def _call_off(self, call: Call) -> None:
        """Nobody waits for the call, which is under way: it takes back what it declared."""
        call.called_off.set()
        if self._session is not None and self._session.called_off is call.called_off:
            self._session.call_off()

    def _average(self, call: Call) -> RoundReport:
        started = time.thread_time()
        try:
            session = self._ready(call)
            if call.called_off.is_set():
                raise CancelledError
            session.called_off, session.refusal = call.called_off, ""
            direct = call.flats[0].direct if len(call.flats) == 1 else None
            vector = self._staging() if direct is None else direct
            if direct is None:
                at = 0
                for flat in call.flats:
                    flat.read(vector[at : at + flat.size])
                    at += flat.size
            self._round(session, vector, call)
            if direct is None:
                at = 0
                for flat in call.flats:
                    flat.write(vector[at : at + flat.size])
                    at += flat.size
            report = session.last_report
        finally:
            self.cpu_seconds += time.thread_time() - started
        assert report is not None
        if call.size is None and len(report.members) == 1 and not self._told_alone:
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

    def _check(self, sizes: tuple[int, ...]) -> None:
        """Raises ConfigurationError when this peer averages tensors of other sizes."""
        if self._sizes and sizes != self._sizes:
            raise ConfigurationError(
                f"this peer averages tensors of {self._sizes} elements, not {sizes}; "
                f"use another Peer and run_id for those"
            )

    def _ready(self, call: Call) -> Session:
        self._check(call.sizes)
        if self._session is None:
            digest = hashlib.sha256(repr(call.sizes).encode()).digest()
            spec = TrainingSpec(
                target_batch_size=call.size or 1,
                numel=sum(call.sizes),
                schema=hashlib.sha256(b"tensors" + digest).digest(),
                initial_digest=digest,
                compression=self._codec,
                state=NoState(),
                weighted=True,
            )
            self._session = self._peer.training(spec)
            self._sizes = call.sizes
        self._peer.set_target(call.size)
        return self._session

    def _round(self, session: Session, vector: F32, call: Call) -> None:
        """Until an average is in the vector. Raises RoundFailedError, and leaves the vector as it was."""
        contribution = Contribution(vector if call.weight > 0 else None, 1.0, 1, call.weight)
        least, pause, last = call.size or 1, FIRST_PAUSE_S, ""
        while True:
            if session.samples() == 0:
                session.count(1)
            session.vain = ""
            outcome = session.arrive(contribution, call.left())
            made = isinstance(outcome, Average) and not outcome.late
            wanted = made and not call.called_off.is_set()
            if isinstance(outcome, Average) and wanted and outcome.samples >= least:
                start = time.monotonic()
                outcome.result.decode_into(vector)
                session.applied(time.monotonic() - start)
                self._told_vain.clear()
                return
            if not isinstance(outcome, KeepGoing):
                session.applied(0.0)
            if session.refusal:
                session.discard(session.refusal)
                raise RoundFailedError(
                    f"this call brought nothing to the average ({session.refusal}), and the tensors are "
                    f"as they were; look for NaN, infinity, and values too large for weight= or compression="
                )
            if call.called_off.is_set():
                session.discard("the call was cancelled")
                raise CancelledError
            if isinstance(outcome, Average) and made:  # of fewer than were asked for
                report = session.last_report
                causes = () if report is None else dict.fromkeys(report.causes)
                last = f"{outcome.samples} of {least} were averaged{': ' * bool(causes)}{', '.join(causes)}"
                if outcome.hindered:
                    raise RoundFailedError(
                        f"the group lost members ({last}), and the tensors are as they were; see to those "
                        f"peers, and call again"
                    )
                continue
            if session.vain:
                last = session.vain
                self._tell_vain(last)
                call.called_off.wait(min(pause, call.left()))
                pause = min(2 * pause, MOST_PAUSE_S)
            if call.left() <= 0 or (
                isinstance(outcome, KeepGoing) and not session.wait_until_wanted(call.left())
            ):
                session.discard("no group came together")
                raise CancelledError if call.called_off.is_set() else call.late(last)

    def _tell_vain(self, why: str) -> None:
        if why not in self._told_vain:
            self._told_vain.add(why)
            logger.warning("all_reduce got no average (%s); it tries again until its timeout", why)


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
            _check_layout(value.shape, [step // value.itemsize for step in value.strides])
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
        if value.layout != torch.strided or value.is_meta:
            kind = "on the meta device" if value.is_meta else f"of layout {value.layout}"
            raise ConfigurationError(
                f"only tensors whose elements are all in memory can be averaged, not one {kind}; convert it "
                "first"
            )
        _check_layout(value.shape, value.stride())
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


def _check_layout(shape: Sequence[int], strides: Sequence[int]) -> None:
    """Raises ConfigurationError where elements share memory, as after expand(): an average of each has no
    place there. strides: in elements.
    """
    reach = 0  # the furthest element of the dimensions that were looked at
    for step, size in sorted(
        (abs(step), size) for step, size in zip(strides, shape, strict=True) if size > 1
    ):
        if step <= reach:
            raise ConfigurationError(
                "elements of a tensor share memory, as after expand(): average a clone() of it instead"
            )
        reach += step * (size - 1)
