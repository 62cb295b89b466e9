"""The update of outer steps: local steps, and rounds over how far this peer moved."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from p2pavg.errors import P2PAvgError
from p2pavg.optim.gradients.store import F32
from p2pavg.optim.gradients.vectors import all_finite
from p2pavg.optim.interrupts import held_back
from p2pavg.optim.outer.ahead import Ahead, Device, prepared
from p2pavg.optim.outer.fragments import Fragment
from p2pavg.optim.outer.reference import Reference
from p2pavg.optim.outer.settings import Outer
from p2pavg.optim.sampling import SPOILED, Sampling
from p2pavg.optim.training_state import TrainingState
from p2pavg.optim.updates.buffers import AveragedBuffers
from p2pavg.optim.updates.schedule import Schedule
from p2pavg.optim.updates.update import NOTHING, synchronize
from p2pavg.rounds.protocol.ballot import Note
from p2pavg.rounds.training import Average, Contribution, Heal, Inheritance, KeepGoing, Outcome, Training

log = logging.getLogger("p2pavg.optim")

NON_FINITE = "the parameters of this peer became non-finite"


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


@dataclass(frozen=True, slots=True)
class Kept:
    """What is handed in, as it was at the end of a local step."""

    due: Fragment
    params: list[torch.Tensor] | None  # copies, of the fragment; None: they are in Δ already
    deltas: F32  # of buffers
    samples: int
    note: Note


class OuterUpdate:
    """Hands in how far this peer moved since the last outer step, and takes the swarm's step.

    What a peer moved is Δ = θ_ref - θ_local, its weight the samples since. While a round is under way θ_ref
    stays as it is; a round that comes to nothing leaves Δ to be handed in again, larger. When the average
    comes, θ_ref takes the outer step, and θ_local becomes θ_ref with what is not in the average on top: all
    of Δ for a peer whose weight was 0, what was not sent of it with a density, what was moved behind the
    round with `overlap`, nothing otherwise.

    With `overlap` all of this but copying parameters and changing them is done on another thread.
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
        self._handed = self._own = 0  # samples in the contribution under way, and this peer's among them
        self._behind = 0  # local steps since it left
        self._device = Device()
        self._job: Future[tuple[Outcome, Ahead | None]] | None = None
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
            self.discard(drop)
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
        kept = None if empty else self._keep()
        self._behind = 0
        if self._pool is None or empty or wait:
            return self._take(self._outcome(self._contribution(kept)))
        self._job = self._pool.submit(self._round, kept)
        return False

    def _outcome(self, contribution: Contribution) -> Outcome:
        try:
            return self._arrive(contribution)
        except P2PAvgError:
            raise
        except BaseException:  # Ctrl-C: nothing of this boundary may be left undone
            self._take(self._moves.training.withdraw())
            raise

    def _round(self, kept: Kept | None) -> tuple[Outcome, Ahead | None]:
        """A round beside local steps, and what can be done with its average before they pause for it."""
        outcome = self._arrive(self._contribution(kept))
        try:
            return outcome, self._ahead(outcome) if isinstance(outcome, Average) else None
        except Exception:  # the outcome must not be lost: the training thread tries again, and raises it
            log.debug("an outer step could not be prepared", exc_info=True)
            return outcome, None

    def _finish(self) -> bool:
        assert self._job is not None
        wait([self._job])  # an interrupt leaves it as it is, for the next call
        with held_back():
            job, self._job = self._job, None
            return self._take(*job.result())

    def _keep(self) -> Kept | None:
        """On the training thread: what this peer hands in now; None: nothing."""
        moves = self._moves
        if moves.sampling.is_spoiled(moves.training.samples()):
            self._drop(SPOILED)
        samples = moves.training.samples()
        self._handed = self._own = 0
        if samples == 0:
            return None
        due = self._fragments.due(moves.training.epoch)
        params = moves.reference.local(due)
        kept: list[torch.Tensor] | None = None
        if all(param.device.type == "cpu" for param in params):
            self._displace(due, None)
            finite = all_finite(self._moved[: due.stop - due.start])
        else:
            kept = self._device.kept(params)
            finite = kept is not None
        if not finite:
            log.warning("%s: %d samples are discarded, and it goes on from the swarm's", NON_FINITE, samples)
            self._forget_state()
            self._drop(NON_FINITE)
            return None
        self._handed, self._own = samples, samples - self._inherited_samples
        return Kept(due, kept, moves.buffers.deltas(), samples, moves.sampling.note(b"", samples))

    def _contribution(self, kept: Kept | None) -> Contribution:
        if kept is None:
            return NOTHING
        if kept.params is not None:
            self._displace(kept.due, self._device.to_host(kept.params))
        self._moved[self._fragments.extra :][: len(kept.deltas)] = kept.deltas
        return Contribution(self._mean(kept.samples, kept.due), 1.0, kept.samples, note=kept.note)

    def _displace(self, due: Fragment, own: list[torch.Tensor] | None) -> None:
        """Δ <- of the fragment due, with parameters as in `own`, in host memory; None: as they are."""
        if len(self._fragments.each) > 1:
            self._moved[: self._fragments.extra] = 0  # gaps hold what another fragment had there
        self._moves.reference.displacement(self._moved, due, own)

    def _mean(self, samples: int, due: Fragment) -> F32:
        """What own samples and inherited ones moved, on average. What somebody moved in a fragment whose
        turn is over is lost: its samples count as if they had moved nothing.
        """
        if self._inherited is None:
            return self._moved
        if self._inherited_of != due:
            self._inherited[: self._fragments.extra] = 0
            self._inherited_of = due
        return (self._moved * np.float32(self._own) + self._inherited) / np.float32(samples)

    # ---------------------------------------------------------------------- what came of it

    def _take(self, outcome: Outcome, ahead: Ahead | None = None) -> bool:
        """Bring the model up to date. True: a new epoch began, or more is to be handed in.

        ahead: an average's outer step, where it was prepared beside local steps.
        """
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
                    extra = self._step(outcome, ahead)
                    epoch = outcome.epoch + 1
                    self._moves.sampling.committed(outcome, counts(outcome, self._handed))
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

    def _ahead(self, average: Average) -> Ahead:
        taken = self._taken(average)
        moved = None if taken is None else self._moved
        return prepared(average, self._moves.reference, moved, taken, self._settings.keep_local, self._device)

    def _taken(self, average: Average) -> F32 | None:
        """What of this peer's Δ is in the average: nothing (None), all, or what a density sent of it."""
        if not counts(average, self._own):
            return None
        if not _sends_a_share(average):
            return self._moved
        taken = np.empty(self._fragments.numel, np.float32)
        average.result.contribution_into(taken, average.rank)
        if self._inherited is not None:  # what was sent holds it: its unsent rest is this peer's from now on
            taken += self._moved - self._mean(self._handed, self._fragments.due(average.epoch))
        return taken

    def _step(self, average: Average, ahead: Ahead | None) -> Mapping[str, float]:
        moves, reference = self._moves, self._moves.reference
        self.changes += 1
        counted = counts(average, self._own)  # what this peer moved
        ahead = ahead or self._ahead(average)
        due = ahead.after.of
        reference.adopt(ahead.after)
        if counted and not _sends_a_share(average) and (not self._behind or not ahead.keep):
            reference.publish(due)
        else:
            reference.move(reference.views(ahead.shift, due), due, ahead.keep)
        moves.buffers.agree(ahead.tail)
        moves.buffers.follow(ahead.tail, counted=counted)
        if counts(average, self._handed):
            self._inherited, self._inherited_samples = None, 0
        return ahead.figures

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


def _sends_a_share(average: Average) -> bool:
    """Whether contributions to the average were sparse: it holds what was sent of each, and no more."""
    return bool(average.result.layout.shares)


def counts(average: Average, samples: int) -> bool:
    """Whether so many samples, which were handed in, are in an average."""
    return samples > 0 and not average.late
