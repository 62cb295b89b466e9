"""Accumulation between two averages: how gradients are weighted, counted for a node, and dropped."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from p2pavg import kinds
from p2pavg.errors import ClosedError, ConfigurationError
from p2pavg.optim.gradients.flat import FlatGradients
from p2pavg.optim.gradients.microbatches import Microbatches
from p2pavg.optim.modules import Places, parameters_at
from p2pavg.optim.outer.settings import Outer
from p2pavg.optim.outer.update import OuterUpdate
from p2pavg.optim.outside import Outside
from p2pavg.optim.process import sigterm
from p2pavg.optim.saved import Saved
from p2pavg.optim.updates.behind import BehindUpdate
from p2pavg.optim.updates.masters import replace_parameters
from p2pavg.optim.updates.update import HALF_CHANGED, WaitingUpdate


class Accumulating(Saved):
    """The part of a CollaborativeOptimizer that accumulates gradients and samples between two averages."""

    _microbatches: Microbatches
    _places: Places
    _outer: Outer | None
    _outside: Outside

    def note(self, samples: int, gradients: Sequence[torch.Tensor | None] | None = None) -> bool:
        """Count a step of a node.

        Args:
            samples: of all ranks of the node, in this step.
            gradients: for each parameter the gradient of the mean over them, which is added to the sums here;
                None: no backward pass reached it. None in all: sums accumulate elsewhere, and come with
                `meet`.

        Returns:
            Whether `meet` is to be called now.
        """
        if self._closed:
            raise ClosedError("this optimizer was closed; build a new one to go on training")
        self._check_groups()
        half = self._update.lost or self._entering is not None
        if half:
            self._enter_again()
        if sigterm.asked():
            sigterm.obey()
        assert isinstance(self._update, WaitingUpdate | BehindUpdate | OuterUpdate)
        if self._outer is None:
            self._outside.begins(self.param_groups)
        if half:
            self._update.count(samples, HALF_CHANGED)
            return False
        if gradients is not None:
            assert isinstance(self._flat, FlatGradients)
            self._flat.add_each(gradients, samples)
        due = self._update.note(samples)
        self._outside.ended(self.param_groups, stepped=False)
        return due

    @property
    def noted(self) -> int:
        """Samples that were noted and not dropped since the last average that has this peer's."""
        return self._training.samples()

    def meet(self, sums: Sequence[torch.Tensor | None] | None = None) -> None:
        """Average the gradients of a node with the swarm, or how far it moved.

        Args:
            sums: for each parameter, the sum of its gradient over all samples that were noted since the last
                call; None: no backward pass reached the parameter. None in all: they are here already.
        """
        assert isinstance(self._update, WaitingUpdate | BehindUpdate | OuterUpdate)
        if sums is not None:
            assert isinstance(self._flat, FlatGradients)
            self._flat.add_each(sums)
        self._update.meet()
        self._outside.ended(self.param_groups, stepped=True)
        self._aim()

    @property
    def moved(self) -> tuple[int, int]:
        """With outer steps: how often they, and states, gave the parameters other values; and how often a
        state was loaded. From anew whenever this peer enters the run.
        """
        assert isinstance(self._update, OuterUpdate)
        return self._update.changes, self._update.loads

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Keep what earlier steps accumulated: gradients are cleared when an epoch ends, so a call is
        harmless.

        Args:
            set_to_none: as torch takes it. Gradients that the swarm averages stay whatever it is.

        Raises:
            ConfigurationError: after a `backward()` without `step()`. Its gradient is in the sum already, and
                only `discard()` can take it out, together with the rest of this peer's epoch.
        """
        if self._flat.pending:
            raise ConfigurationError(
                "zero_grad() after a backward() without step(): call step() to count the batch, or discard() "
                "to drop what this peer accumulated in the epoch"
            )
        self._flat.zero_grad(set_to_none)

    def discard(self) -> None:
        """Drop what this peer accumulated in the epoch, and its samples; the next report names them.

        With outer steps, what is dropped is how far this peer moved since the last outer step.
        """
        if isinstance(self._update, OuterUpdate):
            self._update.discard("discard() was called")  # with what it inherited
        else:
            self._update.settle()
            self._training.discard("discard() was called")
            self._sampling.dropped()
        self._flat.clear()

    @property
    def samples_per_step(self) -> int | None:
        """Samples that a `step()` without `batch_size` counts; None: not known yet.

        Set it where several `backward()` come before one `step()`, and their gradients together are the mean
        over so many samples: then it does not matter how many calls of `backward()` there are.

        Raises:
            ConfigurationError: for another number than the steps so far had.
        """
        return self._microbatches.per_step

    @samples_per_step.setter
    def samples_per_step(self, samples: int) -> None:
        self._microbatches.per_step = samples

    def scale_loss(self, loss: torch.Tensor, samples: int) -> torch.Tensor:
        """Weight a loss so that a microbatch of `samples` counts exactly.

        Args:
            loss: the mean over the microbatch; a tensor with one element.
            samples: how many samples it is the mean of.

        Returns:
            The loss to call `backward()` on.
        """
        kinds.check("the loss of scale_loss()", loss, torch.Tensor)
        weight = self._microbatches.weight(samples)
        return loss if weight == 1.0 else loss * weight

    def _follow_model(self) -> None:
        """Take the model's parameters anew when they were replaced, as load_state_dict(assign=True) does.

        Called when no backward pass has reached the parameters that are known.
        """
        old = self._flat.params
        new = parameters_at(self._places, old)
        if all(before is after for before, after in zip(old, new, strict=True)):
            return
        self._update.settle()
        self._flat.replace(new)
        if self._masters is None:
            replace_parameters(self.inner, old, new)
        else:
            self._masters.follow(new)
        self._update.replaced()
        self._mirror_inner()
