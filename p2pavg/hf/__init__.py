"""transformers' Trainer in a swarm: `Trainer(model=…, train_dataset=…, **trainer_kwargs(opt, args))`.

Trainer counts its own steps. Here its `global_step` is the swarm's epoch: it stops, evaluates, logs and saves
by that, on a peer that came later as well. Imported by nobody in this package; needs `p2pavg[hf]`.

Start at `trainer_kwargs`. May import every floor below.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_utils import has_length

from p2pavg.errors import ConfigurationError
from p2pavg.optim.optimizer import CollaborativeOptimizer
from p2pavg.optim.updates.shown_schedule import ShownSchedule

log = logging.getLogger("p2pavg.hf")

ENDLESS = 1 << 40  # steps of this peer: the swarm's epochs end the training
LOGGED = ("peers", "samples", "samples_per_second", "seconds_communication", "egress_bytes_per_hour")


def trainer_kwargs(opt: CollaborativeOptimizer, args: TrainingArguments) -> dict[str, Any]:
    """What a Trainer needs to train as a peer: args=, optimizers= and callbacks=.

    opt: wrapped around an optimizer of the model's parameters, with its schedule as scheduler= and its
    clipping as max_grad_norm=. args: max_steps are epochs of the swarm; batch size and accumulation are this
    peer's. Each process shuffles with a seed of its own, and a resumed one goes on with another order.

    Your own callbacks go behind these: `callbacks=[*kwargs.pop("callbacks"), mine]`. Raises
    ConfigurationError for settings that would train something else than one process with the swarm's batch.
    """
    _check(opt, args)
    ours = copy.copy(args)
    ours.max_steps = ENDLESS
    ours.max_grad_norm = 0.0  # the average is clipped
    ours.data_seed = int.from_bytes(opt.peer.peer_id[:4], "big")
    ours.ignore_data_skip = True
    ours.dataloader_drop_last = True  # all steps bring the same number of samples
    opt.watches_gradients = (
        False  # Trainer clips to infinity at each step, for its log, and to nothing else now
    )
    opt.samples_per_step = args.train_batch_size * args.gradient_accumulation_steps
    swarm = SwarmCallback(opt, args.max_steps)
    opt.register_step_pre_hook(swarm.check_began)
    reporters = [kind() for kind in get_reporting_integration_callbacks(args.report_to)]
    ours.report_to = []  # they come after our callback, which adds to what they report
    return {
        "args": ours,
        "optimizers": (opt, ShownSchedule(opt)),
        "callbacks": [swarm, *reporters],
    }


def _check(opt: CollaborativeOptimizer, args: TrainingArguments) -> None:
    if not isinstance(opt, CollaborativeOptimizer):
        raise ConfigurationError(f"trainer_kwargs() takes a CollaborativeOptimizer, not {type(opt).__name__}")
    if args.max_steps <= 0:
        raise ConfigurationError(
            "set TrainingArguments(max_steps=…), the swarm's epochs: num_train_epochs would count passes of "
            "this peer alone over its data"
        )
    clips = opt.options.max_grad_norm or 0.0
    if args.max_grad_norm and args.max_grad_norm != clips:
        raise ConfigurationError(
            f"TrainingArguments(max_grad_norm={args.max_grad_norm}) would clip sums of microbatches: pass "
            f"max_grad_norm={args.max_grad_norm} to CollaborativeOptimizer, which clips the average, or "
            f"max_grad_norm=0 to TrainingArguments"
        )
    if args.fsdp or args.deepspeed:
        raise ConfigurationError(
            "FSDP and DeepSpeed take the optimizer apart: leave fsdp= and deepspeed= out; where one GPU is "
            "too small, shard the model yourself and train a whole node as one peer, with node_group="
        )
    if args.world_size > 1:
        raise ConfigurationError(
            f"{args.world_size} processes were started together, and Trainer would average between them: "
            "start each peer by itself, without torchrun or accelerate launch"
        )
    if args.auto_find_batch_size:
        raise ConfigurationError(
            "auto_find_batch_size changes the samples of a step in the middle of a run: find the size "
            "beforehand, and set per_device_train_batch_size"
        )
    per_step = args.train_batch_size * args.gradient_accumulation_steps
    if opt.samples_per_step not in (None, args.train_batch_size, per_step):
        raise ConfigurationError(
            f"CollaborativeOptimizer(batch_size_per_step={opt.samples_per_step}), and TrainingArguments make "
            f"{per_step} samples a step: leave batch_size_per_step out, it is told by trainer_kwargs()"
        )
    if opt.options.scheduler is None and args.lr_scheduler_type not in ("constant", None):
        log.warning(
            "the learning rate stays constant: the schedule of TrainingArguments (%s) is not used, pass one "
            "as CollaborativeOptimizer(scheduler=get_scheduler(…, inner, num_training_steps=%d))",
            getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type),
            args.max_steps,
        )


def _whole_steps(loader: Any, every: int, ended: Callable[[], None]) -> None:
    """Let a pass over the data give whole steps only: `every` batches of one size. The rest is left for the
    next pass. ended: called when a pass has no more.
    """
    base = getattr(loader, "base_dataloader", loader)
    if isinstance(base.dataset, IterableDataset):
        vars(base)["drop_last"] = True  # Trainer passes its setting on for other data alone
    plain = type(loader)

    def batches(self: Any) -> Iterator[Any]:
        step = []
        for batch in plain.__iter__(self):
            step.append(batch)
            if len(step) == every:
                yield from step
                step.clear()
        ended()

    itself: Any = vars(object)["__class__"]  # accelerate's loaders show another class and let nobody set it
    itself.__set__(loader, type(plain.__name__, (plain,), {"__iter__": batches}))


def _own_order(loader: Any, seed: int) -> None:
    """Samplers whose order is the same in all processes get a seed of this one."""
    batches = getattr(loader, "batch_sampler", None)
    sampler: Any = getattr(batches, "sampler", None)
    if getattr(sampler, "generator", seed) is None:  # it draws from torch's, which Trainer seeds
        sampler.generator = torch.Generator().manual_seed(seed)
    if type(batches).__name__ == "BatchRebalanceSampler":
        vars(batches)["seed"] = seed


def _keep_scaled(scaler: torch.amp.GradScaler, opt: CollaborativeOptimizer) -> None:
    """Trainer unscales the gradients at each step, to tell their norm. They are sums of several steps here,
    of which the optimizer unscales the average.
    """
    unscale = scaler.unscale_

    def unless_ours(optimizer: torch.optim.Optimizer) -> None:
        if optimizer is not opt:
            unscale(optimizer)

    scaler.unscale_ = unless_ours  # type: ignore[method-assign]


class SwarmCallback(TrainerCallback):
    """Makes `state.global_step` the swarm's epoch, and says what the swarm measured."""

    def __init__(self, opt: CollaborativeOptimizer, epochs: int) -> None:
        self._opt = opt
        self._epochs = epochs
        self._before = 0  # the epoch before this step
        self._steps = self._steps_logged = 0
        self._logged = self._began = 0
        self._trains = False
        self._norm: torch.Tensor | None = None
        self._logs_at = 1
        opt.inner.register_step_pre_hook(self._measure)

    def _measure(self, inner: torch.optim.Optimizer, *_: Any) -> None:
        """The averaged gradient's norm, in an epoch that is logged."""
        if (self._opt.epoch + 1) % self._logs_at == 0:
            params = (param for group in inner.param_groups for param in group["params"])
            grads = [param.grad for param in params if param.grad is not None]
            self._norm = torch.nn.utils.get_total_norm(grads)

    def check_began(self, *_: Any) -> None:
        """Before each step(): without this callback a Trainer would train for ever."""
        if not self._trains:
            raise ConfigurationError(
                "Trainer has not the callbacks that trainer_kwargs() made: pass yours behind them, "
                "callbacks=[*kwargs.pop('callbacks'), mine]"
            )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        optimizer = kwargs["optimizer"]
        if args.max_steps != ENDLESS or getattr(optimizer, "optimizer", optimizer) is not self._opt:
            raise ConfigurationError(
                "Trainer has another args= or optimizers= than trainer_kwargs() made: pass all that it "
                "returns, and change TrainingArguments before"
            )
        held = {id(param) for group in self._opt.param_groups for param in group["params"]}
        if not all(id(param) in held for param in kwargs["model"].parameters() if param.requires_grad):
            raise ConfigurationError(
                "the model has trainable parameters that the optimizer does not hold: build the optimizer "
                "from this very model, after adapters were added and layers frozen"
            )
        if (scaler := getattr(optimizer, "scaler", None)) is not None:
            _keep_scaled(scaler, self._opt)
        loader, every = kwargs["train_dataloader"], args.gradient_accumulation_steps
        if has_length(loader) and len(loader) < every:
            raise ConfigurationError(
                f"the data fill {len(loader)} batches, and a step takes {every} whole ones: use a smaller "
                "batch or less accumulation"
            )
        _whole_steps(loader, every, lambda: setattr(control, "should_epoch_stop", True))
        _own_order(loader, args.data_seed)
        self._trains = True
        state.max_steps = self._epochs
        state.compute_steps(args, self._epochs)
        self._logs_at = max(1, state.logging_steps)
        self._logged = self._began = state.global_step  # Trainer has noted it, to divide its sums by
        state.global_step = self._before = self._opt.epoch

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._before = state.global_step
        state.global_step = self._opt.epoch - 1  # Trainer adds one

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        self._steps += 1
        delayed = state.global_step < args.eval_delay
        for strategy, every, flag in (
            (args.logging_strategy, state.logging_steps, "should_log"),
            (args.eval_strategy, state.eval_steps, "should_evaluate"),
            (args.save_strategy, state.save_steps, "should_save"),
        ):
            if self._before == state.global_step or (delayed and flag == "should_evaluate"):
                setattr(control, flag, False)  # no epoch ended
            elif strategy == "steps" and every and state.global_step // every > self._before // every:
                setattr(control, flag, True)  # several at once, perhaps
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any],
        **kwargs: Any,
    ) -> None:
        if "loss" in logs:  # Trainer divided a sum over steps by epochs
            steps = self._steps - self._steps_logged
            logs["loss"] *= (state.global_step - self._logged) / max(1, steps)
            self._steps_logged, self._logged = self._steps, state.global_step
            self._opt.log(loss=logs["loss"])
            logs.update(self._measured())
        if "train_loss" in logs:
            logs["train_loss"] *= max(state.global_step - self._began, 1e-3) / max(1, self._steps)
            seconds = max(logs.get("train_runtime", 0.0), 1e-9)
            logs["train_samples_per_second"] = self._steps * (self._opt.samples_per_step or 0) / seconds
        if state.log_history:
            state.log_history[-1].update(logs)

    def _measured(self) -> Mapping[str, float]:
        report = self._opt.last_report
        numbers = {} if report is None else report.flat()
        found = {f"swarm/{name}": numbers[name] for name in LOGGED if name in numbers}
        if self._norm is not None:
            found["grad_norm"] = float(self._norm)  # of the average, as it was stepped with
        return found
