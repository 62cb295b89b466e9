"""The reference: the parameters that the whole swarm shares, and the step that moves them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from p2pavg import native
from p2pavg.errors import StateError
from p2pavg.native import compiled
from p2pavg.optim.gradients.store import F32, dense_stride
from p2pavg.optim.outer.fragments import Fragment, Fragments
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
    """θ_ref and its velocity, float32 in host memory, one fragment after the other.

    After every outer step θ_ref has the same bits on all peers, whatever computes there: it moves by our own
    kernel, on committed bytes, and by nothing else. A parameter of another dtype starts from θ_ref rounded to
    it.
    """

    def __init__(self, params: Sequence[torch.Tensor], fragments: Fragments, settings: Outer) -> None:
        self.params = list(params)
        self.fragments = fragments
        self._settings = settings
        self.theta: F32 = np.zeros(fragments.total, np.float32)
        self.velocity: F32 | None = np.zeros(fragments.total, np.float32) if settings.momentum else None
        self.read()

    def views(self, vector: F32, of: Fragment | None = None) -> list[torch.Tensor]:
        """Each parameter's part of a vector that holds a fragment, or all of θ_ref, in the parameter's shape
        and strides, without a copy.
        """
        there, data = of or self.fragments.whole, torch.from_numpy(vector)
        return [
            data.as_strided(
                tuple(self.params[index].shape),
                dense_stride(self.params[index]),
                self.fragments.offsets[index] - there.start,
            )
            for index in there.params
        ]

    def _rows(
        self, vector: F32, of: Fragment | None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(parameter, its part of θ_ref in the parameter's dtype, its part of the vector)."""
        there = of or self.fragments.whole
        starts = self.views(self.theta[there.start : there.stop], there)
        for index, start, part in zip(there.params, starts, self.views(vector, there), strict=True):
            param = self.params[index]
            yield param, start if param.dtype == torch.float32 else start.to(param.dtype).float(), part

    def read(self) -> None:
        """θ_ref <- the parameters, when a run begins from them."""
        with torch.no_grad():
            torch._foreach_copy_(self.views(self.theta), [param.detach() for param in self.params])

    def publish(self, of: Fragment | None = None) -> None:
        """The parameters of a fragment, or all, <- θ_ref."""
        there = of or self.fragments.whole
        starts = self.views(self.theta[there.start : there.stop], there)
        with torch.no_grad():
            torch._foreach_copy_([self.params[index] for index in there.params], starts)

    def displacement(self, out: F32, of: Fragment | None = None) -> None:
        """out, as long as θ_ref or the fragment at least, <- θ_ref - θ_local, where θ_ref counts as the
        parameter's dtype has it.
        """
        with torch.no_grad():
            for param, start, moved in self._rows(out, of):
                torch.sub(start, param.detach().to("cpu").float(), out=moved)

    def place(self, moved: F32, of: Fragment | None = None) -> None:
        """The parameters of a fragment, or all, <- θ_ref - moved: θ_ref with local steps on top."""
        with torch.no_grad():
            for param, start, step in self._rows(moved, of):
                param.copy_(start - step)

    def step(self, mean: F32, of: Fragment | None = None) -> None:
        """One outer step of a fragment, or of all, on the mean displacement, which may go on behind it."""
        there = of or self.fragments.whole
        at = slice(there.start, there.stop)
        velocity = None if self.velocity is None else self.velocity[at]
        outer_step(self.theta[at], velocity, mean[: there.stop - there.start], self._settings)

    def digest(self, of: Fragment | None = None) -> bytes:
        """SHA-256 of the values of a fragment of θ_ref, or of all, in the order of the parameters, float32
        little-endian.
        """
        found, fragments = hashlib.sha256(), self.fragments
        for index in sorted((of or fragments.whole).params):
            offset = fragments.offsets[index]
            found.update(self.theta[offset : offset + fragments.sizes[index]].data)
        return found.digest()


class KeptReference:
    """What of the reference is kept beside the model's parameters: its velocity, and with `whole` θ_ref
    too.
    """

    def __init__(self, reference: Reference, *, whole: bool) -> None:
        self._reference = reference
        self._whole = whole

    def _vectors(self) -> dict[str, F32]:
        count = len(self._reference.fragments.each)
        suffix = "" if count == 1 else f" in {count} fragments"  # they lie in another order
        found = {} if self._reference.velocity is None else {f"velocity{suffix}": self._reference.velocity}
        return found | ({f"reference{suffix}": self._reference.theta} if self._whole else {})

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
