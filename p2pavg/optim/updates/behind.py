"""Delayed updates and offload: rounds and steps on master parameters, behind the training thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, suppress

import numpy as np
import torch

from p2pavg.optim.gradients.flat import Taken
from p2pavg.optim.gradients.store import F32, Vector
from p2pavg.optim.gradients.vectors import clip_norm, tail
from p2pavg.optim.interrupts import held_back
from p2pavg.optim.sample import Sample
from p2pavg.optim.updates.masters import Masters
from p2pavg.optim.updates.update import NOTHING, Shared, Unapplied, versions
from p2pavg.rounds.training import Average, Contribution, Heal, Inheritance, KeepGoing, Outcome


class BehindUpdate:
    """Averages and steps on another thread, on masters; the model gets them at a step boundary.

    The sums of epoch t leave the accumulation, and the training thread goes on with t + 1 at once, on the
    parameters that it has. It copies the masters into the model at the first step() after the inner step.
    While the update of t is under way, it accumulates at most what it brought to t, then waits: so no
    gradient is more than one epoch older than the parameters that it moves. What a failed or late round did
    not average is added back.

    delay: False waits for every update before step() returns (offload alone). warmup: epochs without delay.
    """

    def __init__(self, shared: Shared, masters: Masters, delay: bool, warmup: int) -> None:
        self._shared = shared
        self._masters = masters
        self._delay = delay
        self._warmup = warmup
        self._pool = ThreadPoolExecutor(
            1,
            thread_name_prefix="p2pavg-update",
            initializer=torch.set_num_threads,
            initargs=(masters.threads,),
        )
        self._counting = threading.Lock()  # the sample count changes on both threads
        self._job: Future[Outcome] | None = None
        self._taken: Taken | None = None
        self._epoch = shared.training.epoch
        self._share = 0  # samples of the contribution under way
        self._since = 0  # samples counted after it left
        self._moved: F32 | None = None  # by how much the last average moved the buffers
        self._counted = False  # the sums under way are in an average, and may be overwritten
        self._host: F32 | None = None  # averages in host memory, where the sums are on a device
        self._scale = 1.0  # loss scale of the sums under way
        self._waiting_since: float | None = None
        self._unapplied: Unapplied | None = None
        self._failure: Exception | None = None  # of the scheduler
        self._shown = Sample(masters.live, self._epoch)  # what the model's parameters were last given
        self._half = False  # the job raised when parameters had changed in part
        self.lost = False
        self._arrive: Callable[[Contribution], Outcome] = lambda what: shared.training.arrive(what)

    @property
    def epoch(self) -> int:
        return self._epoch

    def join(self) -> None:
        while True:
            self._submit(NOTHING, None)
            if isinstance(self._finish(), KeepGoing):
                return

    def count(self, samples: int, drop: str = "", since: int = 0) -> None:
        if drop:
            self.settle()
        with self._counting:
            due = self._shared.training.count(samples)
        if drop:
            self._shared.drop(drop, since)
        if self._is_due(samples, due):
            self.meet()

    def note(self, samples: int) -> bool:
        """Like `count`, of samples whose sums are elsewhere. True: they are to be here for `meet`, now."""
        with self._counting:
            due = self._shared.training.count(samples)
        return self._is_due(samples, due)

    def _is_due(self, samples: int, due: bool) -> bool:
        """due: the swarm waits for this peer. Brings model and sums up to date, if it can without waiting."""
        self._since += samples  # first of all: an error from below must leave this microbatch counted
        self._try_again()
        if self._job is not None and self._job.done():
            self._finish()
        elif self._job is not None:
            if self._since < self._share:
                return False
            self._finish()
            due = True  # what was counted meanwhile is a whole share
        return due or self._shared.training.catching_up

    def meet(self) -> None:
        """Hand in, so that the average and the step are made behind the next epoch."""
        self._hand_in()
        if not self._delay or self._epoch < self._warmup:
            self._finish()
        while self._shared.training.catching_up:
            if self._job is None:
                self._hand_in()
            self._finish()

    def settle(self) -> None:
        if self._job is not None:
            self._finish()
        self._try_again()

    def _try_again(self) -> None:
        """Step with what an exception kept the optimizer from stepping with."""
        if self._job is None and self._unapplied is not None:
            self._taken, self._counted = None, self._unapplied.counted
            self._job = self._pool.submit(self._apply, self._unapplied, None)
            self._finish()

    def leave(self, notice_s: float) -> None:
        deadline = time.monotonic() + notice_s
        training = self._shared.training
        with suppress(Exception):  # it was raised before, from step()
            self.settle()  # first: a job that has not begun yet must arrive as usual
        if self.lost or self._unapplied is not None:
            return
        self._shared.departing = True
        self._arrive = lambda what: training.leave(what, max(0.0, deadline - time.monotonic()))
        while True:
            self._hand_in()
            if isinstance(self._finish(), KeepGoing):
                return

    def close(self) -> None:
        try:
            if self._job is not None:
                with suppress(Exception):
                    self._finish()
        finally:
            self._pool.shutdown()

    # ---------------------------------------------------------------------- on the training thread

    def _hand_in(self) -> None:
        shared = self._shared
        samples = shared.samples()
        taken = None
        if Sample(self._masters.live, self._shown.epoch).data != self._shown.data:
            shared.agreement.tell_of_change()
        if samples:
            factor = shared.factor(samples)
            self._scale = shared.scale.current
            most = shared.most(factor, samples)
            taken = shared.flat.take(1.0 / factor, shared.buffers.deltas(), most)
            if taken is None:
                shared.drop_non_finite()
        if taken is None:
            self._submit(NOTHING, None)
        else:
            self._submit(shared.contribution(taken.vector, factor, samples), taken)

    def _submit(self, contribution: Contribution, taken: Taken | None) -> None:
        self._taken = taken
        self._share, self._since = contribution.samples, 0
        self._counted = False
        if self._shared.flat.path is not None:
            self._shared.flat.path.fork()
        self._job = self._pool.submit(self._round, contribution, taken)

    def _finish(self) -> Outcome:
        """Wait for the job, and bring model and sums up to date. Raises what the job raised."""
        assert self._job is not None
        self._waiting_since = time.perf_counter()
        try:
            wait([self._job])  # an interrupt leaves it as it is, for the next call
        finally:
            self._waiting_since = None
        with held_back():
            return self._follow(self._job)

    def _follow(self, job: Future[Outcome]) -> Outcome:
        """Bring model and sums up to date with a job that is done."""
        shared, taken = self._shared, self._taken
        self._job = self._taken = None
        try:
            outcome = job.result()
        except BaseException:
            self.lost, self._half = self._half, False
            if taken is not None and not self._counted:
                self._merge(taken)
            raise
        if isinstance(outcome, Heal):
            begun = time.perf_counter()
            self.lost = True
            with shared.training.applying():
                self._masters.wait_published()
                shared.load(outcome.state)
                self._masters.round()
                self._publish(outcome.state.epoch)
            shared.training.applied(time.perf_counter() - begun)
            self.lost = False
        else:
            if taken is not None and not self._counted:
                self._merge(taken)
            if isinstance(outcome, Inheritance):
                shared.inherit(outcome)
            if isinstance(outcome, Average):
                self._publish(outcome.epoch + 1)
                assert self._moved is not None
                shared.buffers.follow(self._moved, counted=self._counted)
        self._epoch = shared.training.epoch
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return outcome

    def _publish(self, epoch: int) -> None:
        self._masters.publish()
        self._shown = Sample(self._masters.live, epoch)

    def replaced(self) -> None:
        self._shown = Sample(self._masters.live, self._shown.epoch)

    def _merge(self, taken: Taken) -> None:
        self._shared.flat.merge(taken, self._shared.scale.current / self._scale)

    # ----------------------------------------------------------------------- on the update's thread

    def _round(self, contribution: Contribution, taken: Taken | None) -> Outcome:
        outcome = self._arrive(contribution)
        if not isinstance(outcome, Average):
            return outcome
        self._counted = taken is not None and not outcome.late  # our sums are in the average
        return self._apply(Unapplied(outcome, self._counted), taken if self._counted else None)

    def _apply(self, unapplied: Unapplied, counted: Taken | None) -> Outcome:
        """Step with an average. counted: our sums that are in it, whose memory it may take.

        What the optimizer or a hook raises goes to the training thread; the next boundary tries again, or,
        when parameters had changed by then, needs the swarm's state (`lost`).
        """
        shared, average = self._shared, unapplied.average
        before = versions(shared.inner)
        begun = time.perf_counter()
        self._unapplied = unapplied
        shared.overshoot.saw(average.samples)
        try:
            with self._aside():
                vector = self._decoded(average, counted)
            with shared.training.applying(), self._aside():
                extra = self._step(unapplied, vector)
                self._failure = shared.schedule.step()
                shared.state.settle(average.epoch + 1)
                shared.sampling.committed(average, unapplied.counted)
        except BaseException:
            if versions(shared.inner) != before:
                self._unapplied, self._half = None, True
            raise
        finally:
            if counted is not None:
                with self._aside():
                    shared.flat.recycle(counted)
        self._unapplied = None
        now = time.perf_counter()
        waiting_since = self._waiting_since
        waited = now - waiting_since if waiting_since is not None else 0.0
        behind = self._delay and average.epoch >= self._warmup
        with self._counting:
            shared.training.applied(
                now - begun,
                extra={"seconds_step_waited": waited, **extra},
                waited=waited if behind else None,
            )
        return average

    def _decoded(self, average: Average, counted: Taken | None) -> Vector:
        shared = self._shared
        layout = shared.flat.layout
        vector = self._room(counted)
        shared.decode(average.result, vector)
        if shared.max_grad_norm is not None:
            clip_norm(vector[: layout.marks], shared.max_grad_norm)
        self._moved = tail(vector, layout.extra).copy()
        return vector

    def _step(self, unapplied: Unapplied, vector: Vector) -> Mapping[str, float]:
        shared = self._shared
        assert self._moved is not None
        self._masters.wait_published()
        extra = shared.reset()
        with shared.agreement.heeded(shared.sampling.inner(unapplied.average), unapplied.counted):
            self._masters.step(vector, shared.flat.layout)
        shared.buffers.agree(self._moved)
        return extra

    def _aside(self) -> AbstractContextManager[None]:
        """Inside the block, an accelerator works beside the training thread; its work is done at the end."""
        path = self._shared.flat.path
        return nullcontext() if path is None else path.aside()

    def _room(self, counted: Taken | None) -> Vector:
        """The memory for the average: that of the sums that are in it, unless the masters are elsewhere."""
        flat = self._shared.flat
        elsewhere = self._masters.offloaded and flat.path is not None
        if counted is not None and not elsewhere:
            return counted.vector
        if flat.path is not None and not elsewhere:
            return torch.empty(flat.layout.numel, dtype=torch.float32, device=flat.params[0].device)
        if not elsewhere:
            return np.empty(flat.layout.numel, dtype=np.float32)
        if self._host is None:
            self._host = np.empty(flat.layout.numel, dtype=np.float32)
        return self._host
