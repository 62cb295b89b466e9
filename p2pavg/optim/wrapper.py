"""An optimizer that wraps another, as schedulers, GradScalers and users see it."""

from __future__ import annotations

from typing import Any

import torch

from p2pavg.errors import ConfigurationError
from p2pavg.optim.gradients.loss_scale import LossScale
from p2pavg.optim.training_state import parameters_of
from p2pavg.optim.updates.masters import Masters


class Wrapper(torch.optim.Optimizer):
    """Looks like the optimizer inside: the same groups, state and defaults."""

    _step_supports_amp_scaling = True

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([{"params": parameters_of(inner)}], {})
        self.inner = inner
        self._masters: Masters | None = None
        self._scale = LossScale()
        self._groups = len(inner.param_groups)

    def _mirror_inner(self) -> None:
        """Show the inner optimizer's groups, state and defaults as this one's own."""
        groups = self.inner.param_groups
        self.param_groups = groups if self._masters is None else self._masters.groups()
        self.state = self.inner.state
        self.defaults = self.inner.defaults

    @property
    def grad_scale(self) -> Any:
        """For torch.amp.GradScaler alone."""
        return self._scale.offered

    @grad_scale.setter
    def grad_scale(self, value: Any) -> None:
        self._scale.give(value)

    @grad_scale.deleter
    def grad_scale(self) -> None:
        self._scale.give(None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ConfigurationError: all peers agreed on the parameters when they joined."""
        if hasattr(self, "inner"):
            raise ConfigurationError(
                "parameters cannot be added while the swarm trains; call add_param_group() on the inner "
                "optimizer, with requires_grad=False until needed, before wrapping it"
            )
        super().add_param_group(param_group)

    def _check_groups(self) -> None:
        """Raises ConfigurationError when the inner optimizer has got more groups since it was wrapped."""
        if len(self.inner.param_groups) > self._groups:
            added = [param for group in self.inner.param_groups[self._groups :] for param in group["params"]]
            shapes = ", ".join(str(list(param.shape)) for param in added)
            raise ConfigurationError(
                f"the inner optimizer was given parameters that no other peer trains (of shape {shapes}): "
                "call its add_param_group() before you wrap it, with requires_grad=False until needed"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises ConfigurationError: copies of a place in a swarm would speak for one peer."""
        raise ConfigurationError("a CollaborativeOptimizer cannot be copied or pickled; use its state_dict()")
