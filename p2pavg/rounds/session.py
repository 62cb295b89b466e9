"""Session: the training thread's handle on the rounds. Implements `training.Training` over the loop thread's
driver.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVarTuple

from p2pavg.errors import ClosedError
from p2pavg.report import RoundReport
from p2pavg.rounds.measure.logged import Logged
from p2pavg.rounds.protocol.causes import Loss
from p2pavg.rounds.protocol.roles import Generation
from p2pavg.rounds.training import Average, Contribution, Heal, Inheritance, KeepGoing, Outcome
from p2pavg.rounds.turns import short_turns

REPORT_INTERVAL_S = 0.02  # how often count() may wake the loop thread, and only when the target is near
NEAR_S = 0.5  # the target is near when it is reached this soon; before, the loop's own beat reads the count
REPORT_TIMEOUT_S = 5.0
WITHDRAWAL_S = 0.5  # an interrupted wait that takes longer says why

logger = logging.getLogger("p2pavg.rounds")


Ts = TypeVarTuple("Ts")


class LoopSide(Protocol):
    """What the session asks of the driver. Each method runs on the loop thread."""

    def progress(self) -> None: ...

    def claimed(self) -> None: ...

    def arrived(self, contribution: Contribution, answer: Future[Outcome]) -> None: ...

    def withdrawn(self, answer: Future[Outcome]) -> None: ...

    def departing(self, contribution: Contribution, notice_s: float, answer: Future[Outcome]) -> None: ...

    def applied(
        self,
        seconds_update: float,
        extra: Mapping[str, float],
        waited: float | None,
        recorded: Future[RoundReport | None],
    ) -> None: ...

    def discarded(self, samples: int, why: str) -> None: ...

    def refused(self, samples: int, why: str) -> None: ...

    def tell_history(self, answer: Future[tuple[Generation, ...]]) -> None: ...


class Session:
    """Counts samples and meets the loop thread at step boundaries.

    Only the training thread changes the sample count and the epoch; the loop thread reads them at its own
    beat, and writes `stop_at` (the own count at which the training thread must stop and ask) and `attention`
    (ask at the next boundary).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, epoch: int, note_trainer: Callable[[], None]) -> None:
        self._loop = loop
        self._note_trainer = note_trainer
        self._side: LoopSide | None = None
        self._samples = 0
        self._epoch = epoch
        self._report_at = 0.0
        self._applying = threading.RLock()
        self._calm = threading.Event()  # nobody applies, or waits to
        self._calm.set()
        self._pending: Outcome | None = None
        self.standing: tuple[int, bytes] = (epoch, b"")  # (epoch, lineage) of the parameters
        self.next_standing = self.standing  # after the outcome that was given last
        self._contributed = 0
        self._failure: BaseException | None = None
        self._open: tuple[Contribution, Future[Outcome]] | None = None  # the last wait
        self.called_off = threading.Event()  # nobody wants the outcome of the wait any more
        self.refusal = ""  # why no round can have the contribution that was handed in last
        self.vain = ""  # why the last round came to nothing for good
        self.stop_at: float = math.inf
        self._target = 0
        self._since = time.monotonic()  # of the epoch
        self.attention = False
        self._word = threading.Event()  # the loop thread may want this peer at a boundary now
        self.leads = False  # this peer is the leader
        self._catching_up = False
        self.at_boundary = False
        self._step_began = self._since
        self.step_seconds = 0.0  # of the last step, without waiting
        self.step_samples = 0
        self.steps = 0
        self._last_report: RoundReport | None = None
        self._recorded: Future[RoundReport | None] | None = None
        self.logged = Logged()

    def connect(self, side: LoopSide) -> None:
        """Attach the driver; before this, `count` must not be called."""
        self._side = side

    @property
    def epoch(self) -> int:
        """The epoch that is being accumulated."""
        return self._epoch

    @property
    def catching_up(self) -> bool:
        """Whether this peer applies what the others made without it, and goes on to do so."""
        return self._catching_up and not self.called_off.is_set()

    def samples(self) -> int:
        """Samples counted since the last average that included them."""
        return self._samples

    def unaveraged(self) -> int:
        """Samples that no average has, not even one that was given last and is not applied yet."""
        given = isinstance(self._pending, Average) and not self._pending.late
        return self._samples - (self._contributed if given else 0)

    def count(self, samples: int) -> bool:
        """Add a microbatch. O(1); wakes no thread before the target is near. True: call `arrive` now. Raises
        what ended the session.
        """
        self._samples += samples
        self.steps += 1
        now = time.monotonic()
        self.step_seconds, self.step_samples = now - self._step_began, samples
        self._step_began = now
        self._note_trainer()
        if self._wanted():
            if self._failure is not None:
                raise self._failure
            return True
        if now >= self._report_at:
            self._report_at = now + REPORT_INTERVAL_S
            if self._near(now):
                self._post(self._connected.progress)
        return False

    def _near(self, now: float) -> bool:
        """Whether all peers, at their pace in this epoch, reach the target soon."""
        left = self.stop_at - self._samples
        return left * (now - self._since) <= NEAR_S * (self._target - left)

    def arrive(self, contribution: Contribution, timeout: float | None = None) -> Outcome:
        """Wait at a step boundary until the loop thread knows what to do. Raises P2PAvgError.

        timeout: seconds after which the wait is withdrawn (KeepGoing), unless a round with this contribution
        has begun.
        """
        if self._failure is not None:
            raise self._failure
        answer: Future[Outcome] = Future()
        self._open = contribution, answer
        if self.called_off.is_set():  # `call_off` may have been too early for this wait
            timeout = 0.0
        self.at_boundary = True
        try:
            with short_turns():
                self._post(self._connected.arrived, contribution, answer)
                outcome = self._outcome(answer, timeout)
            return self._given(contribution, outcome)
        finally:
            self.at_boundary = False
            self._step_began = time.monotonic()

    def withdraw(self) -> Outcome:
        """After something interrupted `arrive`: end that wait. KeepGoing, unless a round with the
        contribution has begun; then its outcome, which is to be followed. Raises P2PAvgError.
        """
        assert self._open is not None
        contribution, answer = self._open
        self._post(self._connected.withdrawn, answer)
        if not _comes(answer, WITHDRAWAL_S):
            logger.warning("the round under way is brought to its end first; interrupt again to give it up")
        return self._given(contribution, answer.result())

    def call_off(self) -> None:
        """Set `called_off`, and end at once the wait under way, unless a round with its contribution has
        begun. Any thread.
        """
        self.called_off.set()
        self._word.set()
        if self._open is not None and not self._open[1].done():
            with suppress(ClosedError):
                self._post(self._connected.withdrawn, self._open[1])

    def _given(self, contribution: Contribution, outcome: Outcome) -> Outcome:
        self._contributed = contribution.samples
        self._pending = None if isinstance(outcome, KeepGoing | Inheritance) else outcome
        return outcome

    def leave(self, contribution: Contribution, notice_s: float) -> Outcome:
        """Hand over what was accumulated, within `notice_s` seconds. KeepGoing: it is over, either way.

        An Average or an Inheritance that comes instead is to be applied, and `leave` called again.
        """
        if self._failure is not None:
            raise self._failure
        answer: Future[Outcome] = Future()
        self.at_boundary = True
        try:
            self._post(self._connected.departing, contribution, notice_s, answer)
            if not _comes(answer, notice_s + REPORT_TIMEOUT_S):
                return KeepGoing()
            return self._given(contribution, answer.result())
        finally:
            self.at_boundary = False

    def history(self) -> tuple[Generation, ...]:
        """The generations that led to `standing`. Raises ClosedError."""
        answer: Future[tuple[Generation, ...]] = Future()
        self._post(self._connected.tell_history, answer)
        if not _comes(answer, REPORT_TIMEOUT_S):
            raise ClosedError("this peer is closed; build a new optimizer to train on")
        return answer.result()

    def claimed(self) -> None:
        """This peer draws samples that no peer leased: the others are told. Any thread."""
        with suppress(ClosedError):
            self._post(self._connected.claimed)

    def inherited(self, samples: int) -> None:
        """Another peer's sums are in ours."""
        self._samples += samples

    def refused(self, samples: int, why: str) -> None:
        """Samples that this session has not counted cannot be used: the next report names them."""
        self._post(self._connected.refused, samples, why)

    def wait_until_wanted(self, timeout: float) -> bool:
        """For whoever has nothing to compute: block until `count` would have said so. False: not in time, or
        called off.
        """
        deadline = time.monotonic() + timeout
        while True:
            self._word.clear()
            if self.called_off.is_set():
                return False
            if self._wanted():
                return True
            left = deadline - time.monotonic()
            if left <= 0 or not self._word.wait(left):
                return self._wanted()

    def _wanted(self) -> bool:
        return self.attention or self._samples >= self.stop_at or self._failure is not None

    def _outcome(self, answer: Future[Outcome], timeout: float | None) -> Outcome:
        if not _comes(answer, timeout):
            self._post(self._connected.withdrawn, answer)
        return answer.result()

    @contextmanager
    def applying(self) -> Iterator[None]:
        """Held while parameters or optimizer state change."""
        self._calm.clear()
        try:
            with self._applying:
                yield
                self.standing = self.next_standing
        finally:
            self._calm.set()

    @contextmanager
    def reading(self) -> Iterator[Callable[[], bool]]:
        """Held while parameters and optimizer state are read, which are those of `standing`. Gives a function
        that tells whether somebody may go on reading: False when the training thread waits for it.
        """
        self._calm.wait()
        with self._applying:
            yield self._calm.is_set

    def applied(
        self, seconds_update: float, *, extra: Mapping[str, float] | None = None, waited: float | None = None
    ) -> None:
        """The last Average or Heal is in the parameters."""
        pending, self._pending = self._pending, None
        self.standing = self.next_standing
        if isinstance(pending, Average):
            if not pending.late:
                self._samples -= self._contributed
            self._epoch = pending.epoch + 1
            extra = {**self.logged.take(), **(extra or {})}
        elif isinstance(pending, Heal):
            lost, self._samples = self._samples, 0
            if lost:
                self._post(self._connected.discarded, lost, Loss.HEALED)
            self._epoch = pending.state.epoch
        self._since = self._step_began = time.monotonic()
        self._recorded = Future()
        self._post(self._connected.applied, seconds_update, dict(extra or {}), waited, self._recorded)

    @property
    def last_report(self) -> RoundReport | None:
        """What the last applied epoch measured."""
        recorded = self._recorded
        if recorded is not None:
            if not _comes(recorded, REPORT_TIMEOUT_S):
                return self._last_report  # the next caller gets it
            with suppress(CancelledError):
                self._last_report = recorded.result() or self._last_report
            self._recorded = None
        return self._last_report

    def discard(self, why: str, since: int = 0) -> None:
        """Drop the samples counted so far, except the last `since`; the next report names them."""
        lost, self._samples = self._samples - since, since
        if lost:
            self._post(self._connected.discarded, lost, why)
            self._post(self._connected.progress)

    # The loop thread's side.

    def set_stop(self, others: int | None, target: int) -> None:
        """The others are known to have `others` samples: stop when the rest to `target` is counted here.
        None: never.
        """
        self._target = target
        self.stop_at = math.inf if others is None else max(1, target - others)
        self._word.set()

    def set_catching_up(self, catching_up: bool) -> None:
        """Whether this peer applies what the others made without it."""
        self._catching_up = catching_up

    def set_attention(self, wanted: bool) -> None:
        """Whether this peer is wanted at its next boundary, however many samples it has."""
        self.attention = wanted
        if wanted:
            self._word.set()

    def left(self, report: RoundReport) -> None:
        """The last report: what was lost by leaving."""
        self._recorded, self._last_report = None, report

    @property
    def failure(self) -> BaseException | None:
        """What every call raises from now on, if there is anything."""
        return self._failure

    def fail(self, error: BaseException) -> None:
        """Every later `arrive` raises `error`."""
        self._failure = error
        self._word.set()

    @property
    def _connected(self) -> LoopSide:
        """The driver. Raises ClosedError before `connect`."""
        if self._side is None:
            raise ClosedError("this peer has not joined a run yet; call Peer.training() first")
        return self._side

    def _post(self, call: Callable[[*Ts], object], *arguments: *Ts) -> None:
        """Have the loop thread make this call."""
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            raise ClosedError("this peer is closed; build a new optimizer to train on") from None


def _comes(answer: Future[Any], seconds: float | None) -> bool:
    """Whether the answer comes within so many seconds; None: however long it takes. A TimeoutError raised
    here, or by the answer, is somebody else's, such as a signal handler's of the user.
    """
    there = threading.Event()
    answer.add_done_callback(lambda _: there.set())
    return there.wait(seconds)
