"""Checks of what a user hands to CollaborativeOptimizer: each mistake is one sentence that names the fix."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR

from p2pavg import kinds
from p2pavg.errors import ConfigurationError

REDUCTIONS = ("mean", "sum")
LOCKSTEP = "step"
LEAST_NORM = 1.2e-38  # of float32, short of its subnormal numbers
LEAST_USD, MOST_USD = 1e-6, 1e9  # an hour
RESERVED = "p2pavg."  # how names of p2pavg's own extras begin
WRAPPERS = {
    "CollaborativeOptimizer": "wrap the optimizer inside it, after close()",
    "AcceleratedOptimizer": "wrap the torch optimizer first, and hand the result to accelerator.prepare()",
    "LightningOptimizer": "wrap the torch optimizer in configure_optimizers()",
    "ZeroRedundancyOptimizer": "its state is spread over ranks; wrap the optimizer that it was built with",
}


def check_optimizer(optimizer: object) -> None:
    """Raises ConfigurationError for an optimizer that cannot step on averaged gradients."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"optimizer must be a torch.optim.Optimizer that is already built, not {type(optimizer).__name__}"
        )
    name = type(optimizer).__name__
    if name in WRAPPERS:
        raise ConfigurationError(f"{name} is a wrapper itself; {WRAPPERS[name]}")
    if not any(group["params"] for group in optimizer.param_groups):
        raise ConfigurationError("the optimizer has no parameters: build it from those of the model")
    if any(param.is_meta for group in optimizer.param_groups for param in group["params"]):
        raise ConfigurationError(
            "parameters are on the meta device, without values: materialise the model (to_empty(), then load "
            "its weights) before you build the optimizer"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            "LBFGS evaluates the loss several times per step; use a first-order optimizer"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigurationError(
            "SparseAdam needs sparse gradients; use Adam and embeddings with sparse=False"
        )


def check_modules(modules: Iterable[torch.nn.Module]) -> None:
    """Raises ConfigurationError for a wrapper that puts gradients elsewhere."""
    for root in modules:
        for module in root.modules():
            if getattr(module, "gradient_as_bucket_view", False):
                raise ConfigurationError(
                    f"{type(module).__name__}(gradient_as_bucket_view=True) puts gradients into buffers of "
                    "its own; train the model without that wrapper, or without that option"
                )


def check_alone(params: Iterable[torch.Tensor]) -> None:
    """Raises ConfigurationError when DistributedDataParallel averages the gradients of these parameters
    between several processes, of which each would be a peer.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return
    held = {id(param) for param in params}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.nn.parallel.DistributedDataParallel) and any(
            id(param) in held for param in thing.parameters()
        ):
            raise ConfigurationError(
                f"DistributedDataParallel averages the gradients of {distributed.get_world_size()} processes "
                "that each would be a peer: pass node_group=torch.distributed.group.WORLD, which makes them "
                "one, or start each by itself, without torchrun or accelerate launch"
            )


def check_scheduler(scheduler: object, optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigurationError unless `scheduler` is None or can step `optimizer` without arguments."""
    if scheduler is None:
        return
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigurationError(
            "ReduceLROnPlateau needs a metric: leave scheduler=None and call its step(metric) on every peer"
        )
    if not isinstance(scheduler, LRScheduler):
        raise ConfigurationError(f"scheduler must be an LRScheduler, not {type(scheduler).__name__}")
    nested: Any = (
        scheduler._schedulers[0] if isinstance(scheduler, SequentialLR | ChainedScheduler) else scheduler
    )
    if getattr(nested, "optimizer", optimizer) is not optimizer:
        raise ConfigurationError("scheduler must be built on the optimizer that you wrap, before wrapping it")


def check_sizes(target_batch_size: object, batch_size_per_step: object) -> None:
    """Raises ConfigurationError unless both are whole numbers of samples that fit each other, or the target
    is "step".
    """
    if target_batch_size is None:
        raise ConfigurationError(
            "target_batch_size is missing: how many samples of all peers together make one optimizer step, "
            'such as 4096, or "step" for one step() of each peer'
        )
    if isinstance(target_batch_size, str):
        if target_batch_size != LOCKSTEP:
            raise ConfigurationError(
                'target_batch_size must be a whole number of samples, or "step" for one step() of each peer, '
                f"not {kinds.seen(target_batch_size)}"
            )
        target_batch_size = kinds.MOST_SAMPLES
    for name, value in (
        ("target_batch_size", target_batch_size),
        ("batch_size_per_step", batch_size_per_step),
    ):
        if value is None and name == "batch_size_per_step":
            continue
        if not _is_whole(value, 1, kinds.MOST_SAMPLES):
            raise ConfigurationError(
                f"{name} must be a whole number of samples, from 1 to {kinds.MOST_SAMPLES:,}, not "
                f"{kinds.seen(value)}"
            )
    if isinstance(batch_size_per_step, int) and isinstance(target_batch_size, int):
        check_step_fits(batch_size_per_step, target_batch_size)


def check_overlap(overlap: int, target: int, batch_size_per_step: int | None) -> None:
    """Raises ConfigurationError for more local steps behind a round than one peer alone takes for an outer
    step. target: samples of that.
    """
    if batch_size_per_step is not None and overlap > (steps := -(-target // batch_size_per_step)):
        raise ConfigurationError(
            f"Outer(overlap={overlap}) is more than the {steps} local steps that an outer step has at most, "
            f"of {target} samples: the next one would begin before the last has ended; take at most {steps}"
        )


def check_extras(extras: Mapping[str, object]) -> None:
    """Raises ConfigurationError for what has no name, or no state that could be saved and loaded."""
    for name, value in extras.items():
        if not isinstance(name, str) or name.startswith(RESERVED):
            raise ConfigurationError(
                f"a name in extras must be a text that does not begin with {RESERVED!r}, not "
                f"{kinds.seen(name)}"
            )
        calls = [getattr(value, call, None) for call in ("state_dict", "load_state_dict")]
        if isinstance(value, type) or not all(callable(call) for call in calls):
            raise ConfigurationError(
                f"extras[{name!r}] must have state_dict() and load_state_dict(), which {kinds.seen(value)} "
                "has not"
            )


def check_closure(closure: object) -> None:
    """Raises ConfigurationError unless it can be called."""
    if not callable(closure):
        raise ConfigurationError(
            f"step({kinds.seen(closure)}): its first argument is a function that computes the loss; samples "
            "go into step(batch_size=n)"
        )


def check_sync(target_batch_size: object, batch_size_per_step: object, sync_every: int) -> None:
    """Raises ConfigurationError unless Outer(sync_every=) can tell the samples of an outer step."""
    if target_batch_size is not None:
        raise ConfigurationError(
            "Outer(sync_every=...) sets the samples of an outer step by the peers present: leave "
            f"target_batch_size={kinds.seen(target_batch_size)} out"
        )
    if not _is_whole(batch_size_per_step, 1, kinds.MOST_SAMPLES):
        raise ConfigurationError(
            "Outer(sync_every=...) needs batch_size_per_step=, the samples of one step(), equal on all peers"
        )
    assert isinstance(batch_size_per_step, int)
    if sync_every * batch_size_per_step > kinds.MOST_SAMPLES:
        raise ConfigurationError(
            f"Outer(sync_every={sync_every}) steps of {batch_size_per_step} samples are more than "
            f"{kinds.MOST_SAMPLES:,} samples between two averages; let there be fewer steps"
        )


def check_step_fits(batch_size: int, target_batch_size: int) -> None:
    """Raises ConfigurationError when one step brings more samples than an epoch has."""
    if batch_size > target_batch_size:
        raise ConfigurationError(
            f"target_batch_size={target_batch_size} is below the {batch_size} samples of one step; "
            f"set it to at least {batch_size}"
        )


def check_run_id(run_id: object) -> None:
    """Raises ConfigurationError unless it is a non-empty string."""
    if not isinstance(run_id, str) or not run_id:
        raise ConfigurationError("run_id must be a non-empty string that all peers of the run share")


def check_reduction(loss_reduction: object) -> None:
    """Raises ConfigurationError unless it is "mean" or "sum"."""
    if loss_reduction not in REDUCTIONS:
        raise ConfigurationError(f'loss_reduction must be "mean" or "sum", not {kinds.seen(loss_reduction)}')


def check_clipping(max_grad_norm: object) -> None:
    """Raises ConfigurationError unless it is None or a positive number."""
    if max_grad_norm is None:
        return
    number = isinstance(max_grad_norm, int | float) and not isinstance(max_grad_norm, bool)
    if not number or not max_grad_norm >= LEAST_NORM:  # type: ignore[operator]
        raise ConfigurationError(
            f"max_grad_norm must be a number above 0, of float32, or None, not {kinds.seen(max_grad_norm)}"
        )


def check_notice(leave_notice_s: object) -> None:
    """Raises ConfigurationError unless it is a number of seconds, 0 or more."""
    number = isinstance(leave_notice_s, int | float) and not isinstance(leave_notice_s, bool)
    if not number or not 0 <= leave_notice_s <= kinds.MOST_SECONDS:  # type: ignore[operator]
        raise ConfigurationError(
            f"leave_notice_s must be a number of seconds from 0 to {kinds.MOST_SECONDS:,.0f}, not "
            f"{kinds.seen(leave_notice_s)}"
        )


def check_checkpoints(checkpoint_dir: object, checkpoint_epochs: object) -> None:
    """Raises ConfigurationError unless checkpoint_epochs is None or a whole number, with a directory."""
    if checkpoint_epochs is None:
        return
    kinds.check_whole("checkpoint_epochs", checkpoint_epochs, 1, kinds.MOST_EPOCHS)
    if checkpoint_dir is None:
        raise ConfigurationError("checkpoint_epochs needs checkpoint_dir: name a directory")


def check_warmup(delay_warmup_epochs: object) -> None:
    """Raises ConfigurationError unless it is a number of epochs."""
    kinds.check_whole("delay_warmup_epochs", delay_warmup_epochs, 0, kinds.MOST_EPOCHS)


def check_grad_dtype(grad_dtype: object) -> None:
    """Raises ConfigurationError unless it is None or a torch.dtype of floats."""
    if grad_dtype is not None and not (isinstance(grad_dtype, torch.dtype) and grad_dtype.is_floating_point):
        raise ConfigurationError(
            f"grad_dtype must be a float dtype such as torch.float32, not {kinds.seen(grad_dtype)}"
        )


def check_resync(resync_epochs: object) -> None:
    """Raises ConfigurationError unless it is None or a number of epochs."""
    if resync_epochs is not None:
        kinds.check_whole("resync_epochs", resync_epochs, 1, kinds.MOST_EPOCHS)


def check_buffers(buffers: object) -> None:
    """Raises ConfigurationError unless it is "average" or "leader"."""
    if buffers not in ("average", "leader"):
        raise ConfigurationError(f'buffers must be "average" or "leader", not {kinds.seen(buffers)}')


def _is_whole(value: object, least: int, most: int) -> bool:
    """Whether `value` is an int from `least` to `most`; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def check_lockstep(**options: object) -> None:
    """Raises ConfigurationError for options that lockstep does not go with; None and False go with it."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise ConfigurationError(
                f'target_batch_size="step" averages at every step(), which {name} does not go with: leave '
                f"{name} out, or say how many samples make an epoch"
            )


def check_spending(usd_per_hour: object, prices: object) -> None:
    """Raises ConfigurationError unless it is None, or a number above 0 with the path of a price table."""
    if usd_per_hour is None:
        return
    number = isinstance(usd_per_hour, int | float) and not isinstance(usd_per_hour, bool)
    if not number or not LEAST_USD <= usd_per_hour <= MOST_USD:  # type: ignore[operator]
        raise ConfigurationError(
            f"max_egress_usd_per_hour must be a number of dollars from {LEAST_USD:f} to {MOST_USD:,.0f}, or "
            f"None, not {kinds.seen(usd_per_hour)}"
        )
    if prices is None:
        raise ConfigurationError(
            "max_egress_usd_per_hour needs prices=, the path of a price table, to know what a round costs"
        )


def check_outer(**options: object) -> None:
    """Raises ConfigurationError for options that outer steps do not go with; None and False go with all."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise ConfigurationError(_OUTER_WITHOUT[name])


def check_dense(density: float | None, buffers: int) -> None:
    """Raises ConfigurationError for averaged buffers, so many values, of which a share would be sent."""
    if density is not None and buffers:
        raise ConfigurationError(
            "Outer(density=...) averages no buffers; this model has some, such as BatchNorm's statistics: "
            "use a model without (LayerNorm, GroupNorm), or leave density out"
        )


def check_sparse(**options: object) -> None:
    """Raises ConfigurationError for options that a density says itself; None goes with all."""
    for name, value in options.items():
        if value is not None:
            raise ConfigurationError(
                f"Outer(density=...) {_DENSITY_IS[name]}; leave {name}={kinds.seen(value)} out"
            )


_DENSITY_IS = {
    "compression": "is a codec of its own",
    "plan": "has a plan of its own, in which every peer sends to all others",
}


_OUTER_WITHOUT = {
    "delay_updates": "outer steps hide a round by Outer(overlap=), not by delay_updates; leave that out",
    "resync_epochs": "outer steps keep all peers equal to the bit by themselves; leave resync_epochs out",
    "grad_dtype": "outer steps average parameters, not gradients; leave grad_dtype out",
}
