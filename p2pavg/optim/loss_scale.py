"""Working with torch.amp.GradScaler: sums carry the loss scale they were computed under."""

from __future__ import annotations

from typing import Any

import torch

from p2pavg.errors import ConfigurationError


class ScaleProbe:
    """Stands where a GradScaler looks for the optimizer's own scale, and catches the scaler's live tensor.

    The scaler computes `its_scale * optimizer.grad_scale` before step(). That tensor is updated in place when
    the scale changes, so whoever holds it knows the scale of the coming backward pass.
    """

    def __init__(self) -> None:
        self.live: torch.Tensor | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scale, probe = (args[0], args[1]) if isinstance(args[1], cls) else (args[1], args[0])
        probe.live = scale
        return scale.clone()


class LossScale:
    """The factor that the accumulated sums are too large by. 1 until a GradScaler is seen."""

    def __init__(self) -> None:
        self.current = 1.0
        self._probe = ScaleProbe()
        self._given: Any = None

    @property
    def offered(self) -> ScaleProbe:
        """What the scaler finds as `optimizer.grad_scale`."""
        return self._probe

    def give(self, value: Any) -> None:
        """The scaler sets `optimizer.grad_scale` before step(), and None after it."""
        self._given = value

    def check(self, found_inf: torch.Tensor) -> bool:
        """At a step() called by a GradScaler: whether the microbatch is bad. Synchronises with the device.

        Raises ConfigurationError after scaler.unscale_(), which would divide earlier microbatches once more.
        """
        if isinstance(self._given, ScaleProbe):
            raise ConfigurationError(
                "scaler.unscale_(opt) would unscale again what earlier microbatches accumulated; drop it, "
                "and use max_grad_norm= to clip the averaged gradient"
            )
        bad = bool(found_inf.item())
        if self._probe.live is not None:
            self.current = float(self._probe.live)
        return bad

    def change(self) -> float:
        """Before a backward pass adds to the sums: what to multiply them by. 1.0: nothing changed."""
        if self._probe.live is None:
            return 1.0
        before, self.current = self.current, float(self._probe.live)
        return self.current / before
