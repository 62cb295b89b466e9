"""The options of outer steps: the outer optimizer, and how local steps and rounds interleave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from p2pavg import codecs, kinds
from p2pavg.errors import ConfigurationError

SCHEDULES = ("inner", "outer")
MOST_STEPS = 10**9
MOST_LR = 1000.0  # beyond it nothing would converge


@dataclass(frozen=True, slots=True)
class Outer:
    """Local steps between averages: peers move on their own, and step together on the mean of their moves.

    At every epoch (a round over `target_batch_size` samples) the swarm averages Δ = θ_ref - θ_local, weighed
    by samples, and takes one step of SGD with momentum on it: v ← momentum·v + Δ, θ_ref ← θ_ref - lr·(Δ +
    momentum·v), or lr·v without Nesterov. This is DiLoCo (Douillard et al., 2023, arXiv:2311.08105) without
    its server.

    Args:
        lr: the outer learning rate; None: 0.7, with density 1.5. 0.4 to 0.8, growing with peers and local
        steps, was best in
            arXiv:2503.09799.
        momentum: of the outer steps, 0 up to but not 1; 0 keeps no velocity (4 bytes a parameter less). None:
            0.9, with density 0.
        nesterov: Nesterov's momentum.
        overlap: local steps that may run while a round is under way; 0: the peer waits for it. The result is
            merged at the end of a `step()`, at most one outer step late.
        keep_local: with overlap, the share of what this peer moved during the round that stays on top of the
            result: 1 keeps every sample's step exactly once.
        accumulate: calls of `step()` for one step of the inner optimizer, on the mean of their gradients.
        schedule: the `scheduler` is stepped after every "inner" step or after every "outer" one.
        fragments: bins of whole tensors, of about equal size. Each has rounds of its own, in turn: an epoch
            is then the outer step of one fragment, and takes a `fragments`-th of `target_batch_size`.
        sync_every: local steps between two averages, instead of `target_batch_size`, which is then None: an
            outer step takes sync_every · `batch_size_per_step` samples for each peer present.
        density: the share of Δ that is sent, from 1/256 to 1/16: the largest of each 4096 values, in two bits
            each, to at most 12 peers; what is not sent stays in this peer's parameters, and so in its next Δ.
            This is close to SparseLoCo (Sarfi et al., 2025, arXiv:2508.15706), without its server. None: all
            of Δ, in `compression`.

    Raises:
        ConfigurationError: for values that cannot work.
    """

    lr: float = None  # type: ignore[assignment]
    momentum: float = None  # type: ignore[assignment]
    nesterov: bool = True
    overlap: int = 0
    keep_local: float = 1.0
    accumulate: int = 1
    schedule: str = "inner"
    fragments: int = 1
    sync_every: int | None = None
    density: float | None = None

    def __post_init__(self) -> None:
        dense = self.density is None
        if self.density is not None:
            kinds.check("Outer(density=...)", self.density, float | None)
            codecs.sparse_of(self.density)
        if cast("float | None", self.lr) is None:
            object.__setattr__(self, "lr", 0.7 if dense else 1.5)
        if cast("float | None", self.momentum) is None:
            object.__setattr__(self, "momentum", 0.9 if dense else 0.0)
        for name, least, below in (
            ("lr", 0.0, MOST_LR),
            ("momentum", 0.0, 1.0),
            ("keep_local", 0.0, 1.0 + 1e-9),
        ):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            taken = _single(value) if number else 0.0
            if not number or not least <= taken < below or (name == "lr" and taken == 0):
                raise ConfigurationError(f"Outer({name}=...) cannot be {kinds.seen(value)}; {_RANGES[name]}")
        if not dense and self.momentum:
            raise ConfigurationError(
                "Outer(density=...) takes no momentum: what is not sent now comes with the next Δ, and "
                "would count twice; leave momentum out"
            )
        if not dense and self.keep_local != 1.0:
            raise ConfigurationError(
                "Outer(density=...) keeps what it did not send in this peer's parameters, and "
                "keep_local would lose a share of that at every round; leave keep_local out"
            )
        kinds.check("Outer(nesterov=...)", self.nesterov, bool)
        for name, least in (("overlap", 0), ("accumulate", 1), ("fragments", 1), ("sync_every", 1)):
            value = getattr(self, name)
            if value is not None or name != "sync_every":
                kinds.check_whole(f"Outer({name}=...)", value, least, MOST_STEPS)
        if not isinstance(self.schedule, str) or self.schedule not in SCHEDULES:
            raise ConfigurationError(
                f'Outer(schedule=...) is "inner" or "outer", not {kinds.seen(self.schedule)}'
            )
        if self.nesterov and self.momentum == 0:
            object.__setattr__(self, "nesterov", False)  # the same step

    def terms(self) -> str:
        """What all peers must share, in words."""
        step = f"lr={float(self.lr)} momentum={float(self.momentum)} nesterov={self.nesterov}"
        if self.density is not None:
            step += f" density=1/{round(1 / self.density)}"
        return step if self.fragments == 1 else f"{step} fragments={self.fragments}"


def _single(value: float) -> float:
    """The number as outer steps have it, in float32."""
    with np.errstate(over="ignore"):
        return float(np.float32(max(-1e39, min(value, 1e39))))


_RANGES = {
    "lr": f"a number above 0 and below {MOST_LR:g}, such as 0.7",
    "momentum": "a number from 0 up to but not 1, such as 0.9",
    "keep_local": "a share from 0 to 1",
}

PRESETS = {"diloco": Outer(), "sparse": Outer(density=1 / 64)}


def outer_of(value: object) -> Outer | None:
    """`outer=` as settings: None, an Outer, or the name of a preset. Raises ConfigurationError."""
    if value is None or isinstance(value, Outer):
        return value
    if isinstance(value, str) and value in PRESETS:
        return PRESETS[value]
    presets = ", ".join(f'"{name}"' for name in PRESETS)
    raise ConfigurationError(f"outer is None, a p2pavg.Outer(...), or {presets}, not {kinds.seen(value)}")
