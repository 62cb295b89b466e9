"""The update of outer steps: local steps, and rounds over how far this peer moved."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from p2pavg.errors import P2PAvgError
from p2pavg.optim.gradients.store import F32
from p2pavg.optim.gradients.vectors import all_finite
from p2pavg.optim.interrupts import held_back
from p2pavg.optim.outer.fragments import Fragment
from p2pavg.optim.outer.reference import Reference
from p2pavg.optim.outer.settings import Outer
from p2pavg.optim.sampling import SPOILED, Sampling
from p2pavg.optim.training_state import TrainingState
from p2pavg.optim.updates.buffers import AveragedBuffers
from p2pavg.optim.updates.schedule import Schedule
from p2pavg.optim.updates.update import NOTHING, synchronize
from p2pavg.rounds.training import Average, Contribution, Heal, Inheritance, KeepGoing, Outcome, Training

log = logging.getLogger("p2pavg.optim")

NON_FINITE = "the parameters of this peer became non-finite"
_LOW_BYTES = 6  # of a digest: what a float64 carries exactly


@dataclass
class Moves:
    """The objects that outer steps work on."""

    inner: torch.optim.Optimizer
    schedule: Schedule  # of outer steps
    settings: Outer
    reference: Reference
    state: TrainingState
    training: Training
    buffers: AveragedBuffers
    sampling: Sampling


class OuterUpdate:
    """Hands in how far this peer moved since the last outer step, and takes the swarm's step.

    What a peer moved is Δ = θ_ref - θ_local, its weight the samples since. While a round is under way θ_ref
    stays as it is; a round that comes to nothing leaves Δ to be handed in again, larger. When the average
    comes, θ_ref takes the outer step, and θ_local becomes θ_ref with what is not in the average on top: all
    of Δ for a peer whose weight was 0, what was moved behind the round with `overlap`, nothing otherwise.
    """

    lost = False  # what raises in the middle of a local step is this peer's affair

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._settings = moves.settings
        self._fragments = moves.reference.fragments
        self._moved = np.zeros(self._fragments.numel, np.float32)  # Δ of the fragment due, as handed in
        self._inherited: F32 | None = None  # sums of samples times Δ of peers that left
        self._inherited_of: Fragment | None = None
        self._inherited_samples = 0
        self.changes = self.loads = 0  # how often parameters were given others, and a state was loaded
        self._handed = 0  # own samples in the contribution under way
        self._behind = 0  # local steps since it left
        self._job: Future[Outcome] | None = None
        self._pool = (
            ThreadPoolExecutor(1, thread_name_prefix="p2pavg-outer") if self._settings.overlap else None
        )
        self._arrive: Callable[[Contribution], Outcome] = moves.training.arrive

    # ---------------------------------------------------------------------- what a way of updating has

    @property
    def epoch(self) -> int:
        """Outer steps that are in the model's parameters."""
        return self._moves.training.epoch

    def join(self) -> None:
        while self._hand_in(empty=True):
            pass

    def count(self, samples: int, drop: str = "", since: int = 0) -> None:
        due = self.note(samples)
        if drop:
            self._drop(drop)
        elif due:
            self.meet()

    def note(self, samples: int) -> bool:
        """Count local steps. True: the parameters as they are now are needed, by `meet`."""
        due = self._moves.training.count(samples)
        if self._job is None:
            return due
        self._behind += 1
        return self._job.done() or self._behind >= self._settings.overlap

    def meet(self) -> None:
        """Hand in how far this peer moved, or take what came of it."""
        if self._job is None:
            self._hand_in()
        else:
            self._finish()

    def settle(self) -> None:
        if self._job is not None:
            self._finish()

    def leave(self, notice_s: float) -> None:
        deadline = time.monotonic() + notice_s
        training = self._moves.training
        self.settle()
        self._arrive = lambda what: training.leave(what, max(0.0, deadline - time.monotonic()))
        while self._hand_in(wait=True):
            pass

    def discard(self, why: str) -> None:
        """Drop what this peer moved since the last outer step, and its samples, which the next report
        names.
        """
        self.settle()
        self._drop(why)

    def replaced(self) -> None:
        """Go on with other parameters of the model; θ_ref stays as it is."""

    def close(self) -> None:
        try:
            if self._job is not None:
                with suppress(P2PAvgError):
                    self._finish()
        finally:
            if self._pool is not None:
                self._pool.shutdown()

    # ---------------------------------------------------------------------- handing in

    def _hand_in(self, *, empty: bool = False, wait: bool = False) -> bool:
        """Hand in how far this peer moved. True: an outcome has come already, and there may be more."""
        contribution = NOTHING if empty else self._contribution()
        self._behind = 0
        if self._pool is None or empty or wait:
            return self._take(self._outcome(contribution))
        self._job = self._pool.submit(self._arrive, contribution)
        return False

    def _outcome(self, contribution: Contribution) -> Outcome:
        try:
            return self._arrive(contribution)
        except P2PAvgError:
            raise
        except BaseException:  # Ctrl-C: nothing of this boundary may be left undone
            self._take(self._moves.training.withdraw())
            raise

    def _finish(self) -> bool:
        job, self._job = self._job, None
        assert job is not None
        return self._take(job.result())

    def _contribution(self) -> Contribution:
        moves = self._moves
        if moves.sampling.is_spoiled(moves.training.samples()):
            self._drop(SPOILED)
        samples = moves.training.samples()
        self._handed = 0
        if samples == 0:
            return NOTHING
        due = self._fragments.due(moves.training.epoch)
        end = due.stop - due.start
        if len(self._fragments.each) > 1:
            self._moved[: self._fragments.extra] = 0  # gaps hold what another fragment had there
        moves.reference.displacement(self._moved, due)
        if not all_finite(self._moved[:end]):
            log.warning("%s: %d samples are discarded, and it goes on from the swarm's", NON_FINITE, samples)
            self._forget_state()
            self._drop(NON_FINITE)
            return NOTHING
        self._handed = samples - self._inherited_samples
        deltas = moves.buffers.deltas()
        self._moved[self._fragments.extra :][: len(deltas)] = deltas
        return Contribution(self._mean(samples, due), 1.0, samples, note=moves.sampling.note(b"", samples))

    def _mean(self, samples: int, due: Fragment) -> F32:
        """What own samples and inherited ones moved, on average. What somebody moved in a fragment whose
        turn is over is lost: its samples count as if they had moved nothing.
        """
        if self._inherited is None:
            return self._moved
        if self._inherited_of != due:
            self._inherited[: self._fragments.extra] = 0
            self._inherited_of = due
        return (self._moved * np.float32(self._handed) + self._inherited) / np.float32(samples)

    # ---------------------------------------------------------------------- what came of it

    def _take(self, outcome: Outcome) -> bool:
        """Bring the model up to date. True: a new epoch began, or more is to be handed in."""
        training = self._moves.training
        if isinstance(outcome, Inheritance):
            self._inherit(outcome)
            return True
        if isinstance(outcome, KeepGoing):
            return False
        begun = time.perf_counter()
        extra: Mapping[str, float] = {}
        with held_back():
            with training.applying():
                if isinstance(outcome, Average):
                    extra = self._step(outcome)
                    epoch = outcome.epoch + 1
                    self._moves.sampling.committed(outcome, self._handed > 0 and not outcome.late)
                else:
                    self._load(outcome)
                    epoch = outcome.state.epoch
                synchronize(self._moves.inner)
                self._moves.state.settle(epoch)
            training.applied(time.perf_counter() - begun, extra=extra)
        if isinstance(outcome, Heal):
            self._moves.schedule.loaded()
        elif (failure := self._moves.schedule.step()) is not None:
            raise failure
        return True

    def _step(self, average: Average) -> Mapping[str, float]:
        moves, settings = self._moves, self._settings
        reference, fragments = moves.reference, self._fragments
        due = fragments.due(average.epoch)
        self.changes += 1
        end = due.stop - due.start
        counted = self._handed > 0 and not average.late
        mean = np.empty(fragments.numel, np.float32)
        average.result.decode_into(mean)
        on_top = None
        if not counted or self._behind:
            on_top = np.zeros(end, np.float32)
            reference.displacement(on_top, due)
            if counted:
                on_top -= self._moved[:end]
                on_top *= np.float32(settings.keep_local)
        told = self._told(mean[:end]) if counted else {}
        reference.step(mean, due)
        if on_top is None:
            reference.publish(due)
        else:
            reference.place(on_top, due)
        tail = mean[fragments.extra :][: fragments.extra_size]
        moves.buffers.agree(tail)
        moves.buffers.follow(tail, counted=counted)
        if counted:
            self._inherited, self._inherited_samples = None, 0
        return {**told, "theta_sha256_low": float(int.from_bytes(reference.digest(due)[:_LOW_BYTES], "big"))}

    def _told(self, mean: F32) -> dict[str, float]:
        """Figures for the report: this peer's move beside the swarm's."""
        own = self._moved[: len(mean)]
        lengths = [float(np.sqrt(np.dot(vector, vector))) for vector in (own, mean)]
        cosine = float(np.dot(own, mean)) / (lengths[0] * lengths[1]) if all(lengths) else 0.0
        return {"delta_norm": lengths[0], "mean_norm": lengths[1], "cosine": cosine}

    def _load(self, heal: Heal) -> None:
        moves = self._moves
        self.changes, self.loads = self.changes + 1, self.loads + 1
        moves.state.load(heal.state.meta, heal.state.buffers)
        moves.sampling.dropped()
        self._inherited, self._inherited_samples = None, 0
        moves.reference.publish()
        moves.buffers.restore()

    def _inherit(self, inheritance: Inheritance) -> None:
        """Take the move of a peer that left: it counts as if this peer had moved so in as many samples."""
        moves = self._moves
        vector = np.empty(self._fragments.numel, np.float32)
        inheritance.result.decode_into(vector)
        if not all_finite(vector):
            log.warning("a peer that left gave a move that is not finite; it is not used")
            moves.training.refused(inheritance.samples, NON_FINITE)
            return
        if not moves.sampling.takes(inheritance):
            moves.training.refused(inheritance.samples, SPOILED)
            return
        vector *= np.float32(inheritance.samples)
        due = self._fragments.due(moves.training.epoch)
        if self._inherited is not None:
            if self._inherited_of != due:
                self._inherited[: self._fragments.extra] = 0
            vector += self._inherited
        self._inherited = vector
        self._inherited_of = due
        self._inherited_samples += inheritance.samples
        moves.training.inherited(inheritance.samples)

    # ---------------------------------------------------------------------- giving up

    def _drop(self, why: str) -> None:
        moves = self._moves
        self.changes += 1
        moves.training.discard(why)
        moves.sampling.dropped()
        self._inherited, self._inherited_samples = None, 0
        moves.reference.publish()
        moves.buffers.restore()

    def _forget_state(self) -> None:
        """Begin the inner optimizer's state anew where it is not finite."""
        for state in self._moves.inner.state.values():
            tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
            if not all(bool(torch.isfinite(value).all()) for value in tensors if value.is_floating_point()):
                state.clear()
