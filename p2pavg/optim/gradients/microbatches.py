"""The weights of microbatches: the arithmetic of exact means over uneven batches."""

from __future__ import annotations

import logging

from p2pavg.errors import ConfigurationError
from p2pavg.kinds import MOST_SAMPLES, seen
from p2pavg.optim import tools
from p2pavg.optim.arguments import check_step_fits

log = logging.getLogger("p2pavg.optim")
SEVERAL = (
    "call step() after every backward(), without dividing the loss, or pass step(batch_size=n), where the "
    "gradient of all passes is the mean over n samples, or set opt.samples_per_step = n once; after a batch "
    "that was interrupted before its step(), call opt.discard() once"
)
UNEVEN = (
    "weight uneven microbatches with opt.scale_loss(loss, n) before backward(), or use loss_reduction='sum'"
)


class Microbatches:
    """Decides how many samples a step() counts, and by what factor the gradient sum becomes a mean.

    With loss_reduction="mean", backward() adds the mean over a microbatch, so that all must have `unit`
    samples, or be weighted by n / unit beforehand. With "sum" it adds a sum over samples, and any size will
    do.
    """

    def __init__(self, target_batch_size: int | None, batch_size: int | None, loss_reduction: str) -> None:
        """target_batch_size: None: in lockstep, where each step stands for itself, whatever its size."""
        self._target = target_batch_size
        self._sums = loss_reduction == "sum"
        self._default = batch_size
        self._unit = 1 if self._sums else batch_size
        self._weighted: list[int] = []  # samples of the losses that were weighted since the last step
        self._settled = False  # a step of the default size has passed all checks
        self._counts_steps = target_batch_size is None  # the default is of a step, whatever its passes
        self._began = False  # a step has passed all checks
        self._usual: int | None = None  # passes of a step; None: not known, or they differ
        self._told = False  # that they differ

    def weight(self, samples: int) -> float:
        """The factor for the loss of the coming backward(), which is a mean over `samples`."""
        self._check(samples)
        self._weighted.append(samples)
        if self._sums or self._target is None:
            return 1.0
        if self._unit is None:
            self._unit = samples
        return samples / self._unit

    def take(self, samples: int | None, passes: int = 1) -> int:
        """The samples of the microbatch that ends now. Raises ConfigurationError if its weight is unknown.

        passes: how many backward passes reached the same parameters.
        """
        if samples is None and passes == (self._usual or 1) and not self._weighted and self._settled:
            assert self._default is not None
            return self._default
        losses, self._weighted = self._weighted, []
        weighted = None if not losses else sum(losses) if len(losses) == passes else losses[-1]
        if samples is None and passes > 1 and len(losses) != passes and not self._counts_steps:
            self._weighted = losses
            raise ConfigurationError(
                f"{passes} backward() passes came before one step(), and batch_size_per_step= is the samples "
                f"of one: {tools.samples() or SEVERAL}"
            )
        if samples is None and not losses and self._counts_steps:
            self._compare(passes)
        if samples is None:
            samples = weighted if weighted is not None else self._default
        if samples is None:
            raise ConfigurationError(
                "step() does not know its samples: "
                f"{tools.samples() or 'pass batch_size_per_step or batch_size='}"
            )
        self._check(samples)
        if self._target is None and not self._sums:
            self._unit = samples
        if self._unit is None or (passes > 1 and not losses and not self._settled and not self._sums):
            self._unit = samples  # of the microbatches, whatever the constructor was told of a pass
        if self._default is None:
            self._default = samples
        if weighted is not None and weighted != samples:
            raise ConfigurationError(
                f"scale_loss() was told {weighted} samples and step() {samples}; pass the same number"
            )
        if weighted is None and not self._sums and samples != self._unit:
            if self._began or self._default != self._unit:
                raise ConfigurationError(f"step(batch_size={samples}) after steps of {self._unit}: {UNEVEN}")
            option = "opt.samples_per_step" if self._counts_steps else "batch_size_per_step"
            raise ConfigurationError(
                f"{option}={self._unit}, but step(batch_size={samples}): pass the same number, or {UNEVEN}"
            )
        self._began = True
        self._settled = self._sums or self._default == self._unit
        return samples

    @property
    def per_step(self) -> int | None:
        """Samples of a step that is called without a number."""
        return self._default

    @per_step.setter
    def per_step(self, samples: int) -> None:
        self._check(samples)
        if not self._sums and self._settled and self._target is not None and samples != self._unit:
            raise ConfigurationError(
                f"samples_per_step={samples} after steps of {self._unit}: set it before the first step()"
            )
        self._default, self._counts_steps, self._settled = samples, True, False
        if not self._sums:
            self._unit = samples

    def factor(self, samples: int) -> float:
        """gradient sum * factor is the mean over `samples` samples."""
        assert self._unit is not None, "take() comes first"
        return self._unit / samples

    def _compare(self, passes: int) -> None:
        """Tell once of a step with fewer or more passes than those before, which counts as many samples."""
        if self._usual is None and not self._told:
            self._usual = passes
        elif passes != self._usual and not self._told:
            log.warning(
                "a step() had %d backward() passes and those before it %d, and all count as many samples: "
                "drop the rest of the data that fills no whole step, or pass step(batch_size=n)",
                passes,
                self._usual,
            )
            self._usual, self._told = None, True

    def _check(self, samples: int) -> None:
        if isinstance(samples, bool) or not isinstance(samples, int) or not 1 <= samples <= MOST_SAMPLES:
            raise ConfigurationError(
                f"a microbatch has a whole number of samples, at least 1, up to {MOST_SAMPLES:,}, not "
                f"{seen(samples)}"
            )
        if self._target is not None:
            check_step_fits(samples, self._target)
