"""Lightning in a swarm: `Trainer(strategy=CollaborativeStrategy(run_id, target_batch_size, …), max_steps=…)`.

Trainer's `global_step` is the swarm's epoch: max_steps, checkpoints and callbacks go by that, on a peer that
came later as well. Imported by nobody in this package; needs `p2pavg[lightning]`.

Start at `CollaborativeStrategy`. May import every floor below.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.types import LRSchedulerConfig

from p2pavg.errors import ConfigurationError
from p2pavg.optim.arguments import LOCKSTEP
from p2pavg.optim.optimizer import CollaborativeOptimizer
from p2pavg.optim.updates.shown_schedule import ShownSchedule

log = logging.getLogger("p2pavg.lightning")

LOGGED = ("peers", "samples", "samples_per_second", "seconds_communication", "egress_bytes_per_hour")


REFUSED = {  # callbacks that would train something else
    StochasticWeightAveraging: "changes the rate of this peer alone; use EMAWeightAveraging, or average the "
    "weights of checkpoints",
    LearningRateFinder: "would train the swarm with rates that are too high; run it without this strategy",
    BatchSizeFinder: "would train the swarm with batches of other sizes; run it without this strategy",
}


class CollaborativeStrategy(SingleDeviceStrategy):
    """One device that trains as a peer: the optimizer of configure_optimizers() is wrapped.

    run_id, target_batch_size, **options: as of CollaborativeOptimizer. A scheduler of configure_optimizers()
    with interval "step" is stepped once per epoch of the swarm. Samples are counted from the batches: the
    length of their first tensor.
    """

    strategy_name = "p2pavg"
    optimizers: list[Any]
    lr_scheduler_configs: list[Any]

    def __init__(self, run_id: str, target_batch_size: int | str, **options: Any) -> None:
        super().__init__()
        self._what = run_id, target_batch_size
        self._options = options
        self._clip: float | None = None  # what the Trainer was told
        self._batch = self._batches = self._samples = 0  # of one batch; in this step
        self._every: int | None = None  # batches of a step
        self._last_state: dict[str, Any] | None = None  # when the peer was closed

    @property
    def optimizer(self) -> CollaborativeOptimizer:
        """The peer's optimizer, while it trains."""
        found = self.optimizers[0] if self.optimizers else None
        if not isinstance(found, CollaborativeOptimizer):
            raise ConfigurationError("the strategy has no optimizer before fit() has begun")
        return found

    @property
    def root_device(self) -> torch.device:
        """The process's GPU, if the Trainer uses one."""
        cuda = isinstance(self.accelerator, CUDAAccelerator)
        return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Wrap first, then load."""
        return True

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Wrap the optimizer, and take over its schedule and the Trainer's clipping."""
        self._check(trainer)
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ConfigurationError(
                f"configure_optimizers() gives {len(self.optimizers)} optimizers, and a strategy wraps one: "
                "put the parameter groups into one, or wrap each yourself in a plain loop, with a run id each"
            )
        inner = self.optimizers[0]
        options = {"max_grad_norm": self._clipping(trainer), **self._options}
        if (scheduler := self._schedule()) is not None:
            options.setdefault("scheduler", scheduler)
        opt = CollaborativeOptimizer(inner, *self._what, **options)
        self.optimizers = [opt]
        self.lr_scheduler_configs = [LRSchedulerConfig(ShownSchedule(opt), interval="step")]
        self._last_state, self._every = None, None
        self._batch = self._batches = self._samples = 0
        if not any(isinstance(callback, SwarmMetrics) for callback in trainer.callbacks):
            trainer.callbacks.append(SwarmMetrics())

    def _check(self, trainer: Trainer) -> None:
        for callback in trainer.callbacks:
            for kind, why in REFUSED.items():
                if isinstance(callback, kind):
                    raise ConfigurationError(f"{kind.__name__} does not go with a swarm: it {why}")
        if trainer.max_steps == -1 and self._what[1] != LOCKSTEP:
            log.warning(
                "Trainer ends after max_epochs=%s passes of this peer alone over its data: pass max_steps=, "
                "which are epochs of the swarm, and max_epochs=-1",
                trainer.max_epochs,
            )

    def _clipping(self, trainer: Trainer) -> float | None:
        if trainer.gradient_clip_val is not None:
            self._clip = float(trainer.gradient_clip_val)
        value, wanted = self._clip, self._options.get("max_grad_norm")
        if value and str(trainer.gradient_clip_algorithm).lower().endswith("value"):
            raise ConfigurationError(
                "gradient_clip_algorithm='value' would clip sums of microbatches: clip by norm, or in a "
                "hook of the optimizer, inner.register_step_pre_hook(…)"
            )
        if value and wanted not in (None, value):
            raise ConfigurationError(
                f"Trainer(gradient_clip_val={value}) and max_grad_norm={wanted} disagree: give one of them"
            )
        trainer.gradient_clip_val = None  # the average is clipped
        return value or wanted

    def _schedule(self) -> Any:
        configs = self.lr_scheduler_configs
        if not configs:
            return None
        if len(configs) > 1 or "scheduler" in self._options:
            raise ConfigurationError("one optimizer has one schedule: chain several with SequentialLR")
        config = configs[0]
        if config.reduce_on_plateau:
            raise ConfigurationError(
                "ReduceLROnPlateau needs a metric that all peers share: use a schedule of epochs"
            )
        if config.interval != "step" or config.frequency != 1:
            raise ConfigurationError(
                'a schedule with interval "epoch" counts passes of this peer over its data: give '
                '{"scheduler": …, "interval": "step"}, which is one epoch of the swarm'
            )
        return config.scheduler

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Count the batch."""
        count = _length(args[0])
        if count is None:
            raise ConfigurationError(
                "the batch holds no tensor whose length is its number of samples: give batches of tensors"
            )
        lockstep = self.optimizer.options.lockstep
        if not lockstep and self._batch not in (0, count):
            raise ConfigurationError(
                f"a batch of {count} samples after batches of {self._batch}: use DataLoader(drop_last=True), "
                'or target_batch_size="step", where any number may come'
            )
        self._batch = count
        self._batches += 1
        self._samples += count
        found = super().training_step(*args, **kwargs)
        if found is None and self.lightning_module.automatic_optimization:  # there is no backward()
            self._batches -= 1
            self._samples -= count
        return found

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """A step(), of as many samples as the batches since the last one, that of the closure included."""
        opt = self.optimizer
        trainer = self.lightning_module.trainer
        automatic = self.lightning_module.automatic_optimization
        found = closure()
        if self._samples or not automatic:
            self._count(opt, trainer.accumulate_grad_batches)
            found = super().optimizer_step(optimizer, lambda: found, model, **kwargs)
        loop = trainer.fit_loop.epoch_loop
        progress = (
            loop.automatic_optimization.optim_progress.optimizer.step
            if automatic
            else loop.manual_optimization.optim_step_progress
        )
        progress.total.completed = opt.epoch - 1  # the loop adds one
        return found

    def _count(self, opt: CollaborativeOptimizer, every: int) -> None:
        """Tell the samples of the coming step(): those of its batches; of one more on the same batch, its."""
        samples, batches = self._samples or self._batch, self._batches
        self._samples = self._batches = 0
        if self._every not in (None, every) and not opt.options.lockstep:
            raise ConfigurationError(
                f"a step had {self._every} batches and has {every} now, which changes what a sample weighs: "
                'leave GradientAccumulationScheduler out, or train with target_batch_size="step"'
            )
        self._every = every
        if not opt.options.lockstep and (opt.samples_per_step is None or batches == every):
            opt.samples_per_step = samples
        else:  # the last step of a pass: its losses were divided by the usual number of batches
            opt.scale_loss(torch.ones(()), samples)

    def optimizer_state(self, optimizer: Any) -> Any:
        """The run's state; after the fit that at its end."""
        return super().optimizer_state(optimizer) if self._last_state is None else self._last_state

    def teardown(self) -> None:
        """Leave the swarm."""
        opt = self.optimizers[0] if self.optimizers else None
        if isinstance(opt, CollaborativeOptimizer) and self._last_state is None:
            self._last_state = opt.state_dict()
            opt.close()
        super().teardown()


class SwarmMetrics(Callback):
    """Logs what the swarm measured, at each epoch's end."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, CollaborativeStrategy) or not strategy.optimizer.stepped:
            return
        report = strategy.optimizer.last_report
        if report is not None:
            numbers = report.flat()
            swarm = {f"swarm/{name}": float(numbers[name]) for name in LOGGED}
            pl_module.log_dict({"swarm/epoch": float(strategy.optimizer.epoch), **swarm}, batch_size=1)


def _length(batch: Any) -> int | None:
    """Of the first tensor that has one."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((found for part in parts if (found := _length(part)) is not None), None)
