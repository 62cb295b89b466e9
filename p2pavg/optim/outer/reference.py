"""The reference: the parameters that the whole swarm shares, and the step that moves them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from p2pavg import native
from p2pavg.errors import StateError
from p2pavg.native import compiled
from p2pavg.optim.gradients.accumulation import check_averaged
from p2pavg.optim.gradients.store import F32, dense_stride
from p2pavg.optim.outer.fragments import Fragment, Fragments
from p2pavg.optim.outer.settings import Outer
from p2pavg.optim.updates.masters import Masters

_PIECE = 1 << 16  # elements that the portable step works on at a time: they fit a cache
_DUST = np.float32(2.0**-100)
UNSENT = "moves not sent"


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


@dataclass(frozen=True, slots=True)
class Stepped:
    """A fragment of θ_ref, and of its velocity, after an outer step: float32 in host memory."""

    of: Fragment
    theta: F32
    velocity: F32 | None


class Reference:
    """θ_ref and its velocity, float32 in host memory, one fragment after the other.

    After every outer step θ_ref has the same bits on all peers, whatever computes there: it moves by our own
    kernel, on committed bytes, and by nothing else. A parameter of another dtype starts from θ_ref rounded to
    it.

    masters: with offload, what the inner optimizer steps on. They are then the local parameters, and the
    model shows them.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        fragments: Fragments,
        settings: Outer,
        masters: Masters | None = None,
    ) -> None:
        check_averaged(params)
        self.params = list(params) if masters is None else masters.params
        self._masters = masters
        self.hidden: list[torch.Tensor] | None = None  # θ_local, while the model shows θ_ref
        self._unsent: F32 | None = None  # Δ of a state that is being loaded
        self.fragments = fragments
        self._settings = settings
        self.theta: F32 = np.zeros(fragments.total, np.float32)
        self.velocity: F32 | None = np.zeros(fragments.total, np.float32) if settings.momentum else None
        self.read()

    def views(self, vector: F32 | torch.Tensor, of: Fragment | None = None) -> list[torch.Tensor]:
        """Each parameter's part of a vector that holds a fragment, or all of θ_ref, in the parameter's shape
        and strides, without a copy.
        """
        there = of or self.fragments.whole
        data = vector if isinstance(vector, torch.Tensor) else torch.from_numpy(vector)
        return [
            data.as_strided(
                tuple(self.params[index].shape),
                dense_stride(self.params[index]),
                self.fragments.offsets[index] - there.start,
            )
            for index in there.params
        ]

    def _starts(self, theta: F32, of: Fragment) -> list[torch.Tensor]:
        """Parameters as θ, of a fragment, gives them: rounded to their dtype, as float32."""
        return [
            start if self.params[index].dtype == torch.float32 else start.to(self.params[index].dtype).float()
            for index, start in zip(of.params, self.views(theta, of), strict=True)
        ]

    @contextmanager
    def kept_if_raises(self) -> Iterator[None]:
        """Around the loading of a state: where that raises, θ_ref and its velocity are again what they were,
        and the parameters are θ_ref.
        """
        before = self.theta.copy(), None if self.velocity is None else self.velocity.copy()
        try:
            yield
        except Exception:
            self.theta[:] = before[0]
            if self.velocity is not None and before[1] is not None:
                self.velocity[:] = before[1]
            self.publish()
            raise

    def local(self, of: Fragment) -> list[torch.Tensor]:
        """θ_local of a fragment, where it is now."""
        own = self.params if self.hidden is None else self.hidden
        return [own[index].detach() for index in of.params]

    def read(self) -> None:
        """θ_ref <- the model's parameters, when a run begins from them."""
        if self._masters is not None:
            self._masters.collect(None)
        with torch.no_grad():
            torch._foreach_copy_(self.views(self.theta), [param.detach() for param in self.params])

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around a change of the local parameters, which the model shows afterwards."""
        if self._masters is not None:
            self._masters.wait_published()
        with torch.no_grad():
            yield
        if self._masters is not None:
            self._masters.show()

    def publish(self, of: Fragment | None = None) -> None:
        """The parameters of a fragment, or all, <- θ_ref. Of all: θ_local is forgotten where it is hidden."""
        there = of or self.fragments.whole
        if of is None:
            self.hidden = None
        starts = self.views(self.theta[there.start : there.stop], there)
        with self.changing():
            torch._foreach_copy_([self.params[index] for index in there.params], starts)

    def displacement(
        self, out: F32, of: Fragment | None = None, kept: Sequence[torch.Tensor] | None = None
    ) -> None:
        """out, as long as θ_ref or the fragment at least, <- θ_ref - θ_local, where θ_ref counts as the
        parameter's dtype has it. kept: the fragment's θ_local in host memory; None: as the parameters are.
        """
        there = of or self.fragments.whole
        own = [param.to("cpu") for param in self.local(there)] if kept is None else kept
        starts = self._starts(self.theta[there.start : there.stop], there)
        for local, start, moved in zip(own, starts, self.views(out, there), strict=True):
            torch.sub(start, local.float(), out=moved)

    def unsent(self) -> F32 | None:
        """Δ of all parameters, which with a density holds what earlier averages left; None without one."""
        if self._settings.density is None:
            return None
        found = np.zeros(self.fragments.total, np.float32)
        self.displacement(found)
        return found

    def keep_unsent(self, moved: F32 | None) -> None:
        """Remember Δ of a state that is being loaded, for `restore_unsent`; None: it has none."""
        self._unsent = moved

    def restore_unsent(self) -> None:
        """The parameters <- θ_ref - Δ, where a state brought Δ, unless that is not finite."""
        moved, self._unsent = self._unsent, None
        if moved is not None and np.isfinite(moved).all():
            self.move(self.views(-moved), self.fragments.whole, 1.0)

    def stepped(self, mean: F32, of: Fragment | None = None, *, gathered: bool = False) -> Stepped:
        """One outer step of a fragment, or of all, on the mean displacement, which may go on behind it. The
        reference stays as it is until `adopt`.

        gathered: the mean is of sparse contributions. With a density another one is all that a peer alone
        moved, and is taken as it is: the outer learning rate makes up for what others have not sent.
        """
        there = of or self.fragments.whole
        at = slice(there.start, there.stop)
        theta = self.theta[at].copy()
        velocity = None if self.velocity is None else self.velocity[at].copy()
        settings = self._settings
        if settings.density is not None and not gathered:
            settings = replace(settings, lr=1.0)
        outer_step(theta, velocity, mean[: len(theta)], settings)
        return Stepped(there, theta, velocity)

    def adopt(self, after: Stepped) -> None:
        """θ_ref and its velocity <- those after an outer step, in the memory that they have."""
        at = slice(after.of.start, after.of.stop)
        torch.from_numpy(self.theta[at]).copy_(torch.from_numpy(after.theta))
        if self.velocity is not None and after.velocity is not None:
            torch.from_numpy(self.velocity[at]).copy_(torch.from_numpy(after.velocity))

    def shift(self, out: F32, after: Stepped, moved: F32 | None, keep: float) -> None:
        """out, as long as the fragment at least, <- what brings local parameters behind an outer step: they
        become keep · θ_local + out. With θ the reference before the step and θ' after it, that is θ' +
        keep · (θ_local - (θ - moved)); moved, of the fragment: what of θ_local is in the mean; None: nothing.
        """
        there = after.of
        before = self._starts(self.theta[there.start : there.stop], there)
        own = [torch.zeros(()) for _ in before] if moved is None else self.views(moved, there)
        ends = self._starts(after.theta, there)
        for end, start, gone, room in zip(ends, before, own, self.views(out, there), strict=True):
            torch.sub(gone, start, out=room).mul_(keep).add_(end)

    def move(self, shift: Sequence[torch.Tensor], of: Fragment, keep: float) -> None:
        """The parameters of a fragment <- keep · θ_local + shift, of their shapes."""
        with self.changing():
            for index, step in zip(of.params, shift, strict=True):
                param = self.params[index]
                moved = step.to(param.device)
                if keep == 1 and param.dtype == torch.float32:
                    param.add_(moved)
                else:
                    param.copy_(moved.add(param, alpha=keep))

    def digest(self, of: Fragment | None = None, after: Stepped | None = None) -> bytes:
        """SHA-256 of the values of a fragment of θ_ref, or of all, in the order of the parameters, float32
        little-endian. after: of what θ_ref becomes.
        """
        found, fragments = hashlib.sha256(), self.fragments
        there = after.of if after is not None else of or fragments.whole
        theta = self.theta[there.start : there.stop] if after is None else after.theta
        for index in sorted(there.params):
            offset = fragments.offsets[index] - there.start
            found.update(theta[offset : offset + fragments.sizes[index]].data)
        return found.digest()


class KeptReference:
    """What of the reference is kept beside the parameters: its velocity; with `whole` θ_ref, where the
    parameters are the model's; and with `unsent` what of this peer's moves a density has not sent.
    """

    def __init__(self, reference: Reference, *, whole: bool = False, unsent: bool = False) -> None:
        self._reference = reference
        self._whole = whole
        self._has_unsent = unsent

    def _vectors(self) -> dict[str, F32]:
        count = len(self._reference.fragments.each)
        suffix = "" if count == 1 else f" in {count} fragments"  # they lie in another order
        found = {} if self._reference.velocity is None else {f"velocity{suffix}": self._reference.velocity}
        return found | ({f"reference{suffix}": self._reference.theta} if self._whole else {})

    def state_dict(self) -> dict[str, Any]:
        found = {name: torch.from_numpy(vector).clone() for name, vector in self._vectors().items()}
        unsent = self._reference.unsent() if self._has_unsent else None
        return found if unsent is None else {**found, UNSENT: torch.from_numpy(unsent)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raises StateError when it was saved with another model, or other outer steps."""
        held = state_dict if isinstance(state_dict, Mapping) else {}
        for name, vector in self._vectors().items():
            saved = _vector(held.get(name), len(vector))
            if saved is None:
                raise StateError(
                    f"the saved state has no {name} of this model's outer steps; build it as it was saved"
                )
            vector[:] = saved
        size = self._reference.fragments.total
        self._reference.keep_unsent(_vector(held.get(UNSENT), size) if self._has_unsent else None)


def _vector(saved: object, size: int) -> F32 | None:
    """So many float32 of a state, in host memory; None: it is something else."""
    if not isinstance(saved, torch.Tensor) or saved.dtype != torch.float32 or saved.shape != (size,):
        return None
    found: F32 | None = None if saved.is_meta else saved.detach().cpu().numpy()
    return found
