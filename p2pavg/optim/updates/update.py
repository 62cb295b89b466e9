"""The work at a step boundary: hand in the sums, get an outcome, step. Here the plain way, which waits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from p2pavg.allreduce.encoded import EncodedResult
from p2pavg.allreduce.encoding import DeviceGradient
from p2pavg.errors import ConfigurationError, P2PAvgError
from p2pavg.optim.gradients.flat import FlatGradients
from p2pavg.optim.gradients.loss_scale import LossScale
from p2pavg.optim.gradients.microbatches import Microbatches
from p2pavg.optim.gradients.store import F32, Vector
from p2pavg.optim.gradients.vectors import MOST, SURELY, all_finite, flat, tail
from p2pavg.optim.interrupts import held_back
from p2pavg.optim.sampling import SPOILED, Sampling
from p2pavg.optim.training_state import TrainingState
from p2pavg.optim.updates.agreement import Agreement
from p2pavg.optim.updates.buffers import AveragedBuffers
from p2pavg.optim.updates.overshoot import Overshoot
from p2pavg.optim.updates.resync import Resync
from p2pavg.optim.updates.schedule import Schedule
from p2pavg.rounds.training import (
    Average,
    Contribution,
    Heal,
    Inheritance,
    Outcome,
    State,
    Training,
)

log = logging.getLogger("p2pavg.optim")

NOTHING = Contribution(None, 0.0, 0)
FOUND_INF = "the GradScaler found inf"
HALF_CHANGED = "computed on parameters that an exception left half changed"
MOST_PEERS = 1024


@dataclass
class Shared:
    """The objects that a way of updating works on."""

    inner: torch.optim.Optimizer
    schedule: Schedule
    flat: FlatGradients
    microbatches: Microbatches
    state: TrainingState
    training: Training
    max_grad_norm: float | None
    scale: LossScale
    buffers: AveragedBuffers
    resync: Resync
    agreement: Agreement
    overshoot: Overshoot
    sampling: Sampling
    departing: bool = False  # what is handed in now goes to a peer that stays
    told_of_non_finite: bool = False
    averaged_state: F32 | None = None  # averaged parameters and state, for the coming step

    def contribution(self, vector: Vector, factor: float, samples: int) -> Contribution:
        """The vector as the rounds take it, and what goes with it in this epoch."""
        if self.departing:
            self.agreement.say_nothing()
            return Contribution(self.offer(vector), factor, samples, note=self.sampling.note(b"", samples))
        note = self.sampling.note(self.agreement.say(), samples)
        if self.resync.due(self.training.epoch):
            return Contribution(self.resync.extended(vector, factor), 1.0, samples, note=note)
        return Contribution(self.offer(vector), factor, samples, note=note)

    def factor(self, samples: int) -> float:
        """sum * factor is the mean over `samples` samples."""
        return self.microbatches.factor(samples) / self.scale.current

    def most(self, factor: float, samples: int) -> float:
        """The largest sum that stays finite when peers add up their means, weighted by samples."""
        return max(SURELY, MOST / (MOST_PEERS * factor * samples))

    def offer(self, vector: Vector) -> F32 | DeviceGradient:
        """The vector as the rounds take it."""
        if isinstance(vector, torch.Tensor):
            assert self.flat.path is not None
            return self.flat.path.gradient(vector)
        return vector

    def decode(self, result: EncodedResult, vector: Vector) -> None:
        """vector <- result, with the same bits wherever it is; what lies behind it is kept for `reset`."""
        numel = self.flat.layout.numel
        if result.layout.numel > numel:
            whole = np.empty(result.layout.numel, np.float32)
            result.decode_into(whole)
            flat(vector).copy_(torch.from_numpy(whole[:numel]))
            self.averaged_state = whole[numel:]
        elif isinstance(vector, torch.Tensor):
            assert self.flat.path is not None
            self.flat.path.decode(result, vector)
        else:
            result.decode_into(vector)

    def reset(self) -> Mapping[str, float]:
        """Replace parameters and optimizer state by their average, if it came along. Returns figures to
        report.
        """
        state, self.averaged_state = self.averaged_state, None
        if state is None:
            return {}
        self.agreement.mended()
        return self.resync.replace(state)

    def load(self, state: State) -> None:
        """Replace the training state by the swarm's; what was accumulated is gone."""
        self.state.load(state.meta, state.buffers)
        self.buffers.restore()
        self.flat.clear()
        self.sampling.dropped()
        self.schedule.loaded()
        self.agreement.mended()
        self.state.settle(state.epoch)

    def inherit(self, inheritance: Inheritance) -> None:
        """Add the sums of a peer that left to ours."""
        vector = np.empty(self.flat.layout.numel, dtype=np.float32)
        inheritance.result.decode_into(vector)
        if not all_finite(vector):
            log.warning("a peer that left gave a gradient that is not finite; it is not used")
            self.training.refused(inheritance.samples, "non-finite gradient of a peer that left")
            return
        if not self.sampling.takes(inheritance):
            self.training.refused(inheritance.samples, SPOILED)
            return
        self.flat.add(vector, 1.0 / self.factor(inheritance.samples))
        self.training.inherited(inheritance.samples)

    def drop(self, why: str, since: int = 0) -> None:
        """Drop this peer's sums and samples, which the next report names.

        since: except so many that came after the sums were cleared already.
        """
        self.training.discard(why, since)
        self.sampling.dropped(since)
        if not since:
            self.flat.clear()

    def samples(self) -> int:
        """Samples to hand in. Waits for the flags of a GradScaler on an accelerator."""
        if torch.is_inference_mode_enabled():
            raise ConfigurationError(
                "step() inside torch.inference_mode() would make states that no later step "
                "can change: call it outside, or use torch.no_grad()"
            )
        since = self.scale.settle()
        if since is not None:
            self.drop(FOUND_INF, since)
        if self.sampling.is_spoiled(self.training.samples()):
            self.drop(SPOILED)
        return self.training.samples()

    def drop_non_finite(self) -> None:
        """Drop sums that are not finite, or too large to be averaged: they must not leave this peer."""
        log.log(
            logging.INFO if self.told_of_non_finite else logging.WARNING,
            "a gradient is not finite, or too large to be averaged: %d samples of this peer are discarded",
            self.training.samples(),
        )
        self.told_of_non_finite = True
        self.drop("non-finite gradient")


@dataclass(frozen=True, slots=True)
class Unapplied:
    """A committed average with which the optimizer has not stepped yet.

    counted: this peer's sums are in it, and are no longer in the accumulation once it was decoded.
    """

    average: Average
    counted: bool
    decoded: bool = False


def versions(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """Equal as long as nothing wrote to the parameters, or to what the optimizer keeps."""
    tensors = [param for group in optimizer.param_groups for param in group["params"]]
    kept = [value for state in optimizer.state.values() for value in state.values()]
    tensors += [value for value in kept if isinstance(value, torch.Tensor)]
    return [(id(tensor), tensor._version) for tensor in tensors]


def synchronize(optimizer: torch.optim.Optimizer) -> None:
    """Wait until the devices of the parameters have done their work, so that it is in the measured time."""
    devices = {param.device for group in optimizer.param_groups for param in group["params"]}
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


class Update(Protocol):
    """A way of updating. All methods run on the training thread."""

    lost: bool
    """Something raised when parameters had changed in part: only the swarm's state can help."""

    @property
    def epoch(self) -> int:
        """Global steps that are in the model's parameters."""

    def join(self) -> None:
        """Take over the swarm's state when it has gone on without us."""

    def count(self, samples: int, drop: str = "", since: int = 0) -> None:
        """A microbatch ended: average and step when it is time.

        drop: why the sums are worthless, if so, except the last `since` samples: they were cleared before.
        """

    def settle(self) -> None:
        """Wait for a round and a step that are under way."""

    def leave(self, notice_s: float) -> None:
        """Hand over what was accumulated. Nothing may be counted afterwards."""

    def replaced(self) -> None:
        """Go on with other parameters of the model, which have the right values."""

    def close(self) -> None:
        """Leave model and optimizer consistent, after the peer was closed."""


class WaitingUpdate:
    """Averages and steps while the training thread waits, on the model's own parameters."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._handed = False  # whether the last contribution held anything
        self._unapplied: Unapplied | None = None
        self.lost = False

    @property
    def epoch(self) -> int:
        return self._shared.training.epoch

    def join(self) -> None:
        while self._arrive():
            pass

    def count(self, samples: int, drop: str = "", since: int = 0) -> None:
        due = self._shared.training.count(samples)
        if drop:
            self._shared.drop(drop, since)
        self.settle()
        if due:
            self.meet()

    def note(self, samples: int) -> bool:
        """Like `count`, of samples whose sums are elsewhere. True: they are to be here for `meet`, now."""
        due = self._shared.training.count(samples)
        self.settle()
        return due

    def meet(self) -> None:
        """Average with the others, and step."""
        self._arrive()
        while self._shared.training.catching_up:
            self._arrive()

    def settle(self) -> None:
        """Step with an average that an exception kept from being applied."""
        if self._unapplied is not None:
            self._apply(self._unapplied)

    def leave(self, notice_s: float) -> None:
        deadline = time.monotonic() + notice_s
        with suppress(Exception):  # it was raised before, from step()
            self.settle()
        if self.lost or self._unapplied is not None:
            return
        training = self._shared.training
        self._shared.departing = True
        while self._arrive(lambda what: training.leave(what, max(0.0, deadline - time.monotonic()))):
            pass

    def replaced(self) -> None:
        self._shared.state.settle(self.epoch)

    def close(self) -> None:
        """Nothing to do."""

    def _arrive(self, arrive: Callable[[Contribution], Outcome] | None = None) -> bool:
        """Hand in the accumulated sums and follow the swarm's decision. True: a new epoch began."""
        shared = self._shared
        contribution = self._contribution()
        self._handed = contribution.samples > 0
        try:
            outcome = (arrive or shared.training.arrive)(contribution)
        except P2PAvgError:
            raise
        except BaseException:  # Ctrl-C: nothing of this boundary may be left undone
            self.lost = True
            try:
                outcome = shared.training.withdraw()
            except P2PAvgError:
                self.lost = False
                raise
            self.lost = False
            self._follow(outcome)
            raise
        if isinstance(outcome, Inheritance):
            shared.inherit(outcome)
            return self._arrive(arrive)
        return self._follow(outcome)

    def _follow(self, outcome: Outcome) -> bool:
        """Follow the swarm's decision. True: a new epoch began."""
        shared = self._shared
        if isinstance(outcome, Average):
            self._apply(Unapplied(outcome, counted=self._handed and not outcome.late))
        elif isinstance(outcome, Heal):
            begun = time.perf_counter()
            self.lost = True
            with held_back():
                with shared.training.applying():
                    shared.load(outcome.state)
                    synchronize(shared.inner)
                shared.training.applied(time.perf_counter() - begun)
                self.lost = False
        elif isinstance(outcome, Inheritance):
            shared.inherit(outcome)
            return False
        else:
            return False
        return True

    def _contribution(self) -> Contribution:
        shared = self._shared
        samples = shared.samples()
        if samples == 0:
            return NOTHING
        factor = shared.factor(samples)
        most = shared.most(factor, samples)
        vector = shared.flat.total(1.0 / factor, shared.buffers.deltas(), most)
        if vector is None:
            shared.drop_non_finite()
            return NOTHING
        return shared.contribution(vector, factor, samples)

    def _apply(self, unapplied: Unapplied) -> None:
        """Step with an average. What the optimizer or a hook raises goes to the caller; the next boundary
        tries again, or, when parameters had changed by then, needs the swarm's state (`lost`).
        """
        shared = self._shared
        before = versions(shared.inner)
        begun = time.perf_counter()
        # An exception may come from anywhere in here, the decoding included.
        self._unapplied = replace(unapplied, decoded=True)
        shared.overshoot.saw(unapplied.average.samples)
        try:
            with held_back():
                with shared.training.applying():
                    extra = self._step(unapplied)
                    failure = shared.schedule.step()
                    synchronize(shared.inner)
                    shared.state.settle(unapplied.average.epoch + 1)
                    shared.sampling.committed(unapplied.average, unapplied.counted)
                self._unapplied = None
                shared.training.applied(time.perf_counter() - begun, extra=extra)
        except BaseException:
            if self._unapplied is not None and versions(shared.inner) != before:
                self._unapplied, self.lost = None, True
            raise
        if failure is not None:
            raise failure

    def _step(self, unapplied: Unapplied) -> Mapping[str, float]:
        shared = self._shared
        average, layout = unapplied.average, shared.flat.layout
        moved: list[F32] = []

        def decode(vector: Vector) -> None:
            shared.decode(average.result, vector)
            moved.append(tail(vector, layout.extra).copy())

        keep = average.late or unapplied.decoded
        with shared.flat.averaged(decode, keep=keep, max_norm=shared.max_grad_norm):
            extra = shared.reset()
            with shared.agreement.heeded(shared.sampling.inner(average), unapplied.counted):
                shared.inner.step()
        shared.buffers.agree(moved[0])
        shared.buffers.follow(moved[0], counted=unapplied.counted)
        return extra
