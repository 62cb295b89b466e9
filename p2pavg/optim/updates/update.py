"""What happens at a step boundary: hand in the sums, get an outcome, step. First the plain, waiting way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from p2pavg.allreduce.encoded import EncodedResult
from p2pavg.allreduce.encoding import Encodable
from p2pavg.optim.gradients.flat import FlatGradients
from p2pavg.optim.gradients.loss_scale import LossScale
from p2pavg.optim.gradients.microbatches import Microbatches
from p2pavg.optim.gradients.store import F32, Vector
from p2pavg.optim.gradients.vectors import all_finite, flat, tail
from p2pavg.optim.training_state import TrainingState
from p2pavg.optim.updates.buffers import AveragedBuffers
from p2pavg.optim.updates.resync import Resync
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


@dataclass
class Shared:
    """What a way of updating works on."""

    inner: torch.optim.Optimizer
    scheduler: LRScheduler | None
    flat: FlatGradients
    microbatches: Microbatches
    state: TrainingState
    training: Training
    max_grad_norm: float | None
    scale: LossScale
    buffers: AveragedBuffers
    resync: Resync
    leaving: bool = False  # what is handed in now goes to a peer that stays
    averaged_state: F32 | None = None  # averaged parameters and state, for the coming step

    def contribution(self, vector: Vector, factor: float, samples: int) -> Contribution:
        """The vector as the rounds take it, and what goes with it in this epoch."""
        if self.resync.due(self.training.epoch) and not self.leaving:
            return Contribution(self.resync.extended(vector, factor), 1.0, samples)
        return Contribution(self.offer(vector), factor, samples)

    def factor(self, samples: int) -> float:
        """sum * factor is the mean over `samples` samples."""
        return self.microbatches.factor(samples) / self.scale.current

    def offer(self, vector: Vector) -> F32 | Encodable:
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
        """Parameters and optimizer state <- their average, if it came along. What to report of it."""
        state, self.averaged_state = self.averaged_state, None
        return {} if state is None else self.resync.replace(state)

    def load(self, state: State) -> None:
        """Replace the training state by the swarm's; what was accumulated is gone."""
        self.state.load(state.meta, state.buffers)
        self.buffers.restore()
        self.flat.clear()

    def inherit(self, inheritance: Inheritance) -> None:
        """Add the sums of a peer that left to ours."""
        vector = np.empty(self.flat.layout.numel, dtype=np.float32)
        inheritance.result.decode_into(vector)
        if not all_finite(vector):
            log.warning("a peer that left gave a gradient that is not finite; it is not used")
            return
        self.flat.add(vector, 1.0 / self.factor(inheritance.samples))
        self.training.inherited(inheritance.samples)

    def drop(self, why: str, since: int = 0) -> None:
        """Drop this peer's sums and samples, which the next report names.

        since: except so many that came after the sums were cleared already.
        """
        self.training.discard(why, since)
        if not since:
            self.flat.clear()

    def samples(self) -> int:
        """What there is to hand in. Waits for what a GradScaler found on an accelerator."""
        since = self.scale.settle()
        if since is not None:
            self.drop(FOUND_INF, since)
        return self.training.samples()

    def drop_non_finite(self) -> None:
        """Some sum is not finite: it must not leave this peer."""
        log.warning(
            "a gradient is not finite: %d samples of this peer are discarded", self.training.samples()
        )
        self.drop("non-finite gradient")


def synchronize(optimizer: torch.optim.Optimizer) -> None:
    """Wait until the devices of the parameters have done what was asked of them, so that it is timed."""
    devices = {param.device for group in optimizer.param_groups for param in group["params"]}
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


class Update(Protocol):
    """A way of updating. All methods run on the training thread."""

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
        """Wait for what is under way."""

    def leave(self, notice_s: float) -> None:
        """Hand over what was accumulated. Nothing may be counted afterwards."""

    def close(self) -> None:
        """The peer was closed: leave model and optimizer consistent."""


class WaitingUpdate:
    """Averages and steps while the training thread waits, on the model's own parameters."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._handed = False  # whether the last contribution held anything

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
        if due:
            self._arrive()
            while self._shared.training.catching_up:
                self._arrive()

    def settle(self) -> None:
        """Nothing is ever under way."""

    def leave(self, notice_s: float) -> None:
        deadline = time.monotonic() + notice_s
        training = self._shared.training
        self._shared.leaving = True
        while self._arrive(lambda what: training.leave(what, max(0.0, deadline - time.monotonic()))):
            pass

    def close(self) -> None:
        """Nothing to do."""

    def _arrive(self, arrive: Callable[[Contribution], Outcome] | None = None) -> bool:
        """Hand in what was accumulated and do what the swarm decided. True: a new epoch began."""
        shared = self._shared
        contribution = self._contribution()
        self._handed = contribution.samples > 0
        outcome = (arrive or shared.training.arrive)(contribution)
        if isinstance(outcome, Inheritance):
            shared.inherit(outcome)
            return self._arrive(arrive)
        begun = time.perf_counter()
        extra: Mapping[str, float] = {}
        if isinstance(outcome, Average):
            with shared.training.applying():
                extra = self._apply(outcome)
        elif isinstance(outcome, Heal):
            with shared.training.applying():
                shared.load(outcome.state)
        else:
            return False
        synchronize(shared.inner)
        shared.training.applied(time.perf_counter() - begun, extra=extra)
        return True

    def _contribution(self) -> Contribution:
        shared = self._shared
        samples = shared.samples()
        if samples == 0:
            return NOTHING
        factor = shared.factor(samples)
        vector = shared.flat.total(1.0 / factor, shared.buffers.deltas())
        if vector is None:
            shared.drop_non_finite()
            return NOTHING
        return shared.contribution(vector, factor, samples)

    def _apply(self, average: Average) -> Mapping[str, float]:
        shared = self._shared
        layout = shared.flat.layout

        def decode(vector: Vector) -> None:
            shared.decode(average.result, vector)
            moved = tail(vector, layout.extra)
            shared.buffers.agree(moved)
            shared.buffers.follow(moved, counted=self._handed and not average.late)

        with shared.flat.averaged(decode, keep=average.late, max_norm=shared.max_grad_norm):
            extra = shared.reset()
            shared.inner.step()
        if shared.scheduler is not None:
            shared.scheduler.step()
        return extra
