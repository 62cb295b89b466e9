"""OuterNode: a node with outer steps. Each rank steps at once, and the swarm gets how far the node moved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from p2pavg.node.optimizer import BOUNDARY, GOES_ON, NodeOptimizer
from p2pavg.node.shards import local
from p2pavg.optim.outer.local import InnerSteps
from p2pavg.optim.outer.settings import outer_of
from p2pavg.optim.training_state import LOCAL_OPTIONS
from p2pavg.optim.updates.masters import GroupView

NONE = -1  # of what the first rank never tells


class OuterNode(NodeOptimizer):
    """A NodeOptimizer whose ranks step their own parameters, or shards, on the gradients that DDP or FSDP
    averaged, so that all move alike.

    On the first rank the inner optimizer that the user built belongs to the swarm's peer: its parameters are
    the whole ones, and its state is what newcomers get. What steps there is an optimizer beside it, of the
    same groups, with the rank's own parameters and state.
    """

    def _prepare(self, options: dict[str, Any]) -> None:
        settings = outer_of(options["outer"])
        assert settings is not None
        self._settings = settings
        self._scheduler = options.get("scheduler")
        self._changes = self._loads = NONE  # of the first rank, as this one followed them
        if self._samples is not None:
            options["batch_size_per_step"] = self._samples * self._size
        self._stepping = self.inner
        if self._shards.rank == 0:
            self._stepping = _beside(self.inner)
            self.inner._opt_called = True  # type: ignore[attr-defined]  # for schedulers: what is beside it steps
        norm = options.get("max_grad_norm")
        self._steps = InnerSteps(self._stepping, self._params, settings, self._scheduler, norm)

    def _count(self, samples: int) -> None:
        due = False
        self._noted += samples
        self._steps.tick()

        def note() -> None:
            nonlocal due
            assert self.collaborative is not None
            due = self.collaborative.note(samples)

        if self._conduct(note, lambda: BOUNDARY if due else GOES_ON) == BOUNDARY:
            self._noted = 0
            self._bring()
            self._conduct(lambda: self._meet(None))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless they are those of microbatches that wait for the step."""
        self._steps.zero_grad(set_to_none)

    # -------------------------------------------------------------------------- to the first rank

    def _bring(self) -> None:
        """The first rank's whole parameters, and the state that newcomers get, <- those of all ranks."""
        state = self._stepping.state
        if self._shards.sharded:
            whole = self._shards.gather(self._shards.own())
            with torch.no_grad():
                for mine, value in zip(self._whole, whole or (), strict=self._shards.rank == 0):
                    mine.copy_(value)
        kept = [dict(state[param]) if param in state else {} for param in self._params]
        if self._shards.sharded:
            for key in _shaped(kept, self._params):
                own = [
                    local(values[key] if key in values else torch.zeros_like(param))
                    for values, param in zip(kept, self._params, strict=True)
                ]
                found = self._shards.gather(own)
                for values, value in zip(kept, found or (), strict=found is not None):
                    if key in values:
                        values[key] = value.to(values[key].dtype)
        if self._shards.rank == 0:
            for mine, values in zip(self._whole, kept, strict=True):
                if values:
                    self.inner.state[mine] = values

    # ---------------------------------------------------------------------------- from the first rank

    def _standing(self) -> tuple[int, ...]:
        if self.collaborative is None:
            return NONE, NONE, NONE
        return self.collaborative.epoch, *self.collaborative.moved

    def _follow(self, epoch: int, changes: int = NONE, loads: int = NONE) -> None:
        if loads != self._loads:
            self._take_state()
        elif self._settings.schedule == "outer" and self._scheduler is not None and self._shards.rank > 0:
            for _ in range(self.epoch, epoch):
                self._scheduler.step()
        if (changes, loads) != (self._changes, self._loads):
            self._shards.spread(self._whole, self._buffers)
        self.epoch, self._changes, self._loads = epoch, changes, loads

    def _take_state(self) -> None:
        """This rank's optimizer and scheduler <- what the first rank's peer has loaded."""
        state, whole, told = self.inner.state, self._whole, None
        if self._shards.rank == 0:
            kept = [dict(state[mine]) if mine in state else {} for mine in whole]
            shaped = _shaped(kept, whole)
            plain = [{key: it for key, it in one.items() if key not in shaped} for one in kept]
            dtypes = [{key: it.dtype for key, it in one.items() if key in shaped} for one in kept]
            options = [
                {name: value for name, value in group.items() if name not in LOCAL_OPTIONS}
                for group in self.inner.param_groups
            ]
            schedule = None if self._scheduler is None else self._scheduler.state_dict()
            told = shaped, plain, dtypes, options, schedule
        shaped, plain, dtypes, options, schedule = self._shards.tell_object(told)
        for param, values in zip(self._params, plain, strict=True):
            self._stepping.state.pop(param, None)
            if values:
                self._stepping.state[param].update(values)
        for key in shaped:
            rooms = [
                torch.zeros_like(param, dtype=found.get(key), requires_grad=False)
                for param, found in zip(self._params, dtypes, strict=True)
            ]
            given = [state[mine][key] if key in state[mine] else torch.zeros_like(mine) for mine in whole]
            self._shards.scatter(given, [local(room) for room in rooms])
            for param, room, found in zip(self._params, rooms, dtypes, strict=True):
                if key in found:
                    self._stepping.state[param][key] = room
        if self._shards.rank == 0:
            self._stepping.param_groups = _views(self.inner, self._stepping)
            return
        for group, wanted in zip(self.inner.param_groups, options, strict=True):
            group.update(wanted)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(schedule)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the run's state, which the first rank has; all ranks call it, after they loaded the model."""
        self._bring()  # of a state that this node stands at, nothing is to change
        self._changes = self._loads = NONE
        super().load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """The run's state on the first rank; on the others nothing: {}. All ranks call it."""
        found: dict[str, Any] = {}

        def save() -> None:
            nonlocal found
            assert self.collaborative is not None
            found = self.collaborative.state_dict()

        self._bring()
        self._conduct(save)
        return found

    def close(self) -> None:
        """Leave the swarm, with its parameters on all ranks. All ranks call it, and go on when the first one
        has left.
        """
        with suppress(RuntimeError):  # a rank is gone
            self._bring()
        self._leave()
        with suppress(RuntimeError):
            self._shards.tell(GOES_ON, self._noted)
            self._shards.spread(self._whole, self._buffers)


def _shaped(states: Sequence[dict[str, Any]], params: Sequence[torch.Tensor]) -> list[str]:
    """The names of what has the shape of its parameter, in an order that all ranks share."""
    return sorted(
        {
            name
            for values, param in zip(states, params, strict=True)
            for name, value in values.items()
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == param.shape
        }
    )


def _beside(inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same class, with the options of `inner`, its parameters as they are now, and a
    state of its own.
    """
    made = object.__new__(type(inner))
    made.__dict__.update(inner.__dict__)
    made.__dict__.pop("step", None)  # a scheduler's counter of the steps of `inner`
    made.state = defaultdict(dict)
    made.param_groups = _views(inner, inner)
    return made


def _views(inner: torch.optim.Optimizer, params_of: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Groups with the options of one optimizer and the parameters of another."""
    return [
        GroupView(group, list(other["params"]))
        for group, other in zip(inner.param_groups, params_of.param_groups, strict=True)
    ]
