"""The reference: the parameters that the whole swarm shares, and the step that moves them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from p2pavg import native
from p2pavg.errors import StateError
from p2pavg.native import compiled
from p2pavg.optim.gradients.layout import Layout
from p2pavg.optim.gradients.store import F32, dense_stride
from p2pavg.optim.outer.settings import Outer

_PIECE = 1 << 16  # elements that the portable step works on at a time: they fit a cache
_DUST = np.float32(2.0**-100)


def outer_step(theta: F32, velocity: F32 | None, delta: F32, settings: Outer) -> None:
    """theta and velocity, float32[n], <- one step on delta, float32[n]. The same bits with and without
    C++.
    """
    if native.available():
        compiled.outer_step(theta, velocity, delta, settings.lr, settings.momentum, settings.nesterov)
        return
    lr, momentum = np.float32(settings.lr), np.float32(settings.momentum)
    for at in range(0, len(theta), _PIECE):
        piece = slice(at, at + _PIECE)
        direction = _without_dust(delta[piece])
        if velocity is not None:
            moved = _without_dust(momentum * velocity[piece] + direction)
            velocity[piece] = moved
            direction = direction + momentum * moved if settings.nesterov else moved
        theta[piece] -= _without_dust(lr * direction)


def _without_dust(values: F32) -> F32:
    found: F32 = np.where(np.abs(values) < _DUST, np.float32(0), values)
    return found


class Reference:
    """θ_ref and its velocity, float32 in host memory, laid out as the exchanged vector.

    After every outer step θ_ref has the same bits on all peers, whatever computes there: it moves by our own
    kernel, on committed bytes, and by nothing else. A parameter of another dtype starts from θ_ref rounded to
    it.
    """

    def __init__(self, params: Sequence[torch.Tensor], layout: Layout, settings: Outer) -> None:
        self.params = list(params)
        self._layout = layout
        self._settings = settings
        self.theta: F32 = np.zeros(layout.numel, np.float32)
        self.velocity: F32 | None = np.zeros(layout.numel, np.float32) if settings.momentum else None
        self.read()

    def views(self, vector: F32) -> list[torch.Tensor]:
        """Each parameter's part of a vector, in the parameter's shape and strides, without a copy."""
        whole = torch.from_numpy(vector)
        return [
            whole.as_strided(tuple(param.shape), dense_stride(param), offset)
            for param, offset in zip(self.params, self._layout.offsets, strict=True)
        ]

    def read(self) -> None:
        """θ_ref <- the parameters, when a run begins from them."""
        with torch.no_grad():
            torch._foreach_copy_(self.views(self.theta), [param.detach() for param in self.params])

    def publish(self) -> None:
        """The parameters <- θ_ref."""
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.views(self.theta))

    def displacement(self, out: F32) -> None:
        """out, float32[numel], <- θ_ref - θ_local, where θ_ref counts as the parameter's dtype has it."""
        with torch.no_grad():
            for param, start, moved in zip(self.params, self.views(self.theta), self.views(out), strict=True):
                local = param.detach().to("cpu")
                began = start if local.dtype == torch.float32 else start.to(local.dtype).float()
                torch.sub(began, local.float(), out=moved)

    def place(self, moved: F32) -> None:
        """The parameters <- θ_ref - moved, float32[numel]: θ_ref with local steps on top."""
        with torch.no_grad():
            for param, start, step in zip(
                self.params, self.views(self.theta), self.views(moved), strict=True
            ):
                began = start if param.dtype == torch.float32 else start.to(param.dtype).float()
                param.copy_(began - step)

    def step(self, mean: F32) -> None:
        """One outer step on the mean displacement, float32[numel]; what lies behind the parameters is
        ignored.
        """
        end = self._layout.marks
        velocity = None if self.velocity is None else self.velocity[:end]
        outer_step(self.theta[:end], velocity, mean[:end], self._settings)

    def digest(self) -> bytes:
        """SHA-256 of θ_ref's values in the order of the parameters, float32 little-endian."""
        found = hashlib.sha256()
        for offset, size in zip(self._layout.offsets, self._layout.sizes, strict=True):
            found.update(self.theta[offset : offset + size].data)
        return found.digest()


class Kept:
    """What of the reference is kept beside the model's parameters: its velocity, and with `whole` θ_ref
    too.
    """

    def __init__(self, reference: Reference, *, whole: bool) -> None:
        self._reference = reference
        self._whole = whole

    def _vectors(self) -> dict[str, F32]:
        found = {} if self._reference.velocity is None else {"velocity": self._reference.velocity}
        return found | ({"reference": self._reference.theta} if self._whole else {})

    def state_dict(self) -> dict[str, Any]:
        return {name: torch.from_numpy(vector).clone() for name, vector in self._vectors().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raises StateError when it was saved with another model, or other outer steps."""
        wanted = self._vectors()
        for name, vector in wanted.items():
            saved = state_dict.get(name)
            if (
                not isinstance(saved, torch.Tensor)
                or saved.dtype != torch.float32
                or len(saved) != len(vector)
            ):
                raise StateError(
                    f"the saved state has no {name} of this model's outer steps; build it as it was saved"
                )
            vector[:] = saved.numpy()
