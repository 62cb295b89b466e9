"""The training state as peers exchange it: parameters, buffers, optimizer, scheduler; and fingerprints."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgpack
import torch
from torch.optim.lr_scheduler import LRScheduler

from p2pavg.errors import StateError
from p2pavg.optim.gradients.store import dense_stride
from p2pavg.optim.resume import Stateful, load_extras
from p2pavg.optim.sample import Sample, of_copy
from p2pavg.optim.tree import U8, TreeWriter, unpack
from p2pavg.printable import raised
from p2pavg.rounds.training import Section, Snapshot, SwappedError

LOCAL_OPTIONS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Keys of a parameter group that belong to a peer's machine, not to the run."""


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters, in the order of the groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def shared_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The hyperparameters of each group that all peers share."""
    return [
        {key: value for key, value in group.items() if key not in LOCAL_OPTIONS}
        for group in optimizer.param_groups
    ]


def outline(optimizer: torch.optim.Optimizer, buffers: Sequence[torch.Tensor]) -> list[str]:
    """A line for each thing that all peers must share: optimizer class, groups, and of all tensors in their
    order dtype, shape and memory format.
    """
    lines = [f"optimizer {type(optimizer).__name__}"]
    for group in optimizer.param_groups:
        lines.append(f"group of {len(group['params'])}")
        lines += [f"parameter {_described(param)}" for param in group["params"]]
    return lines + [f"buffer {_described(buffer)}" for buffer in buffers]


def _described(tensor: torch.Tensor) -> str:
    said = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    strides = dense_stride(tensor)
    plain = torch.empty(tensor.shape, device="meta").stride()
    return said if strides == plain else f"{said} with strides {list(strides)}"


def schema(lines: Sequence[str]) -> bytes:
    """sha256 over an outline."""
    return hashlib.sha256(msgpack.packb(list(lines))).digest()


SWAPPED = "the parameters are not those of the last step; they are copied when they are back"


class TrainingState:
    """A StateSource over live objects.

    buffers: returns the model's buffers, each time in the same order. extras: by name, what else belongs to
    the run; their state_dict() is called on a background thread, between two updates. values: what is
    exchanged as the parameters, one tensor for each; None: the optimizer's own.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        buffers: Callable[[], Sequence[torch.Tensor]],
        extras: Mapping[str, Stateful] | None = None,
        values: Callable[[], Sequence[torch.Tensor]] | None = None,
    ) -> None:
        self._extras = extras or {}
        self._values = values or (lambda: parameters_of(optimizer))
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._buffers = buffers
        self._left: Sample | None = None  # what the last step left in the parameters
        self._swaps = 0  # odd inside `swapped`

    def settle(self, epoch: int) -> None:
        """Note that the parameters are those of `epoch`, as a step or a state left them. Copies are made of
        these.
        """
        self._left = Sample(self._values(), epoch)

    def look(self) -> tuple[bytes, bool]:
        """Sample the parameters at a boundary; also returns whether they changed since `settle`. Later copies
        are made of the parameters as they are now.
        """
        before = self._left
        assert before is not None, "settle() comes first"
        self._left = Sample(self._values(), before.epoch)
        return self._left.data, self._left.data != before.data

    @property
    def are_swapped(self) -> bool:
        """Whether a block of `swapped` is open."""
        return self._swaps % 2 == 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside the block, the parameters are not the run's, and no copy is made of them."""
        self._swaps += 1
        try:
            yield
        finally:
            self._swaps += 1

    def initial_digest(self) -> bytes:
        """SHA-256 of all values that steps depend on, which is equal on peers that start alike."""
        writer = TreeWriter()
        optimizer = self._optimizer
        parts = (
            parameters_of(optimizer),
            list(self._buffers()),
            shared_options(optimizer),
            self._optimizer_state(),
        )
        meta = [writer.pack(part) for part in parts]
        digest = hashlib.sha256(msgpack.packb(meta))
        digest.update(writer.bytes().data)
        return digest.digest()

    def snapshot(self, extras: Mapping[str, Stateful] | None = None) -> Snapshot:
        """(meta, sections), to be copied before the next step. Raises StateError for what cannot travel.
        extras: other than those that peers exchange.

        Copying the parameters ends with SwappedError when they are not what the last step left: somebody put
        others in their place, for an evaluation.
        """
        if self.are_swapped:
            raise SwappedError(SWAPPED)
        optimizer = self._optimizer
        parts = {
            "parameters": list(self._values()),
            "buffers": list(self._buffers()),
            "options": shared_options(optimizer),
            "optimizer": self._optimizer_state(),
            "scheduler": None if self._scheduler is None else _state_of("the scheduler", self._scheduler),
            "extras": {
                name: _state_of(f"extras[{name!r}]", extra)
                for name, extra in (extras or self._extras).items()
            },
        }
        meta, sections = {}, {}
        for name, part in parts.items():
            writer = TreeWriter()
            meta[name] = writer.pack(part)
            copy_to = self._checked(writer) if name == "parameters" else writer.copy_to
            sections[name] = Section(writer.nbytes, copy_to)
        return meta, sections

    def _checked(self, writer: TreeWriter) -> Callable[[U8], Iterator[None]]:
        left, swaps = self._left, self._swaps

        def copy_to(out: U8) -> Iterator[None]:
            yield from writer.copy_to(out)
            if left is not None and (
                swaps != self._swaps or of_copy(out, writer.places, left.epoch) != left.data
            ):
                raise SwappedError(SWAPPED)

        return copy_to

    def _optimizer_state(self) -> list[dict[str, Any]]:
        state = self._optimizer.state
        return [dict(state[param]) if param in state else {} for param in parameters_of(self._optimizer)]

    def load(
        self,
        meta: Mapping[str, Any],
        buffers: Mapping[str, U8],
        extras: Mapping[str, Stateful] | None = None,
    ) -> None:
        """Replace the state, with extras as `snapshot` has them. Raises StateError, before anything changed,
        when it is of another model or optimizer, and afterwards when only the scheduler or an extra does not
        take its part.
        """
        params, model_buffers = self._values(), list(self._buffers())
        try:
            parts = {
                name: unpack(meta[name], buffers[name])
                for name in ("parameters", "buffers", "options", "optimizer", "scheduler", "extras")
            }
        except KeyError as error:
            raise StateError(f"a state has no {error}; another version of p2pavg wrote it") from error
        _check_tensors("parameters", parts["parameters"], params)
        _check_tensors("buffers", parts["buffers"], model_buffers)
        groups = self._optimizer.param_groups
        _check_form(parts)
        if len(parts["options"]) != len(groups) or len(parts["optimizer"]) != len(params):
            raise StateError(
                "the state is of an optimizer with other parameter groups; build it as the other peers do"
            )
        with torch.no_grad():
            for target, source in zip(
                [*params, *model_buffers], [*parts["parameters"], *parts["buffers"]], strict=True
            ):
                target.copy_(source)
        for group, options in zip(groups, parts["options"], strict=True):
            group.update(options)
        self._optimizer.state.clear()
        entries = iter(parts["optimizer"])
        for group in groups:
            step_on_device = bool(group.get("capturable") or group.get("fused"))
            for param in group["params"]:
                if state := next(entries):
                    self._optimizer.state[param] = _placed(state, param.device, step_on_device)
        try:
            if self._scheduler is not None and parts["scheduler"] is not None:
                self._scheduler.load_state_dict(parts["scheduler"])
            load_extras(extras or self._extras, parts["extras"])
        except Exception as error:  # whatever PyTorch, or the user's object, makes of what does not fit it
            raise StateError(
                f"the state does not fit the scheduler or an extra ({type(error).__name__}: {error}); "
                "build them as the other peers do"
            ) from error


class FiledState:
    """A StateSource of what a file holds: the training state, with extras of its own."""

    def __init__(self, state: TrainingState, extras: Mapping[str, Stateful]) -> None:
        self._state = state
        self._extras = extras

    def snapshot(self) -> Snapshot:
        """As that of the training state."""
        return self._state.snapshot(self._extras)

    def load(self, meta: Mapping[str, Any], buffers: Mapping[str, U8]) -> None:
        """As that of the training state."""
        self._state.load(meta, buffers, self._extras)


def _state_of(what: str, held: Stateful | LRScheduler) -> Any:
    """The state of an object of the user's. Raises StateError, which names it, when its own code fails."""
    try:
        return held.state_dict()
    except MemoryError:
        raise
    except Exception as error:  # StopIteration, too, which no thread could hand on
        raise StateError(f"mend the state_dict() of {what}, which raised {raised(error)}") from error


def _check_form(parts: Mapping[str, Any]) -> None:
    """Raises StateError unless the state has the form of `snapshot`, without anything of one peer alone."""
    options, states = parts["options"], parts["optimizer"]
    if not (
        isinstance(options, list)
        and all(isinstance(group, dict) and LOCAL_OPTIONS.isdisjoint(group) for group in options)
        and isinstance(states, list)
        and all(isinstance(state, dict) for state in states)
        and isinstance(parts["scheduler"], dict | None)
        and isinstance(parts["extras"], dict)
    ):
        raise StateError("a state is malformed (its parts); the donor's copy, or the checkpoint, is broken")


def _check_tensors(what: str, loaded: Any, live: Sequence[torch.Tensor]) -> None:
    def kind(tensor: Any) -> Any:
        return (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, torch.Tensor) else None

    if not isinstance(loaded, list) or [kind(tensor) for tensor in loaded] != [
        kind(tensor) for tensor in live
    ]:
        raise StateError(
            f"the state is of a model with other {what}; build the same model as the other peers"
        )


def _placed(entries: dict[str, Any], device: torch.device, step_on_device: bool) -> dict[str, Any]:
    """State tensors go beside their parameter; step counters stay on the CPU unless the kernel needs them."""
    return {
        key: value if key == "step" and not step_on_device else _moved(value, device)
        for key, value in entries.items()
    }


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    return value
