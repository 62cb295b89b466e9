"""The options of parameter groups (learning rates, betas, ...) as plain columns that travel with a round."""

from __future__ import annotations

import functools
import inspect
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from p2pavg.errors import StateError
from p2pavg.optim.training_state import LOCAL_OPTIONS

DECOUPLED = "decoupled_weight_decay"
Columns = dict[str, list[Any]]
"""By option its value in each group, or one value when all groups have the same."""


def columns(groups: Sequence[Mapping[str, Any]]) -> Columns:
    """All options that are numbers, texts, None, or tuples of them, except those of a peer's own machine."""
    found: Columns = {}
    names = {name: None for group in groups for name in group if name not in LOCAL_OPTIONS}
    for name in names:
        values = [_plain(group.get(name)) for group in groups]
        if any(value is _STRANGE for value in values) or any(name not in group for group in groups):
            continue
        same = all(value == values[0] and type(value) is type(values[0]) for value in values)
        found[name] = values[:1] if same else values
    return found


def well_formed(value: object, groups: int) -> bool:
    """Whether the columns have the form of options for so many groups."""
    return isinstance(value, dict) and all(
        isinstance(name, str)
        and isinstance(column, list)
        and len(column) in (1, groups)
        and all(_plain(item) is not _STRANGE for item in column)
        for name, column in value.items()
    )


def apply(groups: Sequence[dict[str, Any]], wanted: Columns) -> None:
    """Give every group the wanted values of the options that it has."""
    for name, column in wanted.items():
        for index, group in enumerate(groups):
            value = column[index % len(column)]
            if name in group and name not in LOCAL_OPTIONS and _plain(group[name]) != value:
                _put(group, name, value)


def keep(groups: Sequence[dict[str, Any]], stepped: Sequence[dict[str, Any]], known: Columns) -> None:
    """groups <- what a step was made with, and what it made of that, except what is no longer as in `known`:
    that was set meanwhile.
    """
    for index, (group, done) in enumerate(zip(groups, stepped, strict=True)):
        for name, value in done.items():
            column = known.get(name)
            if name in LOCAL_OPTIONS or (column and _plain(group[name]) != column[index % len(column)]):
                continue
            group[name] = value


def take(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Take the options of the groups from a state_dict()."""
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        group.update({name: value for name, value in saved.items() if name not in LOCAL_OPTIONS})


def check_saved(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], *, plain: bool) -> None:
    """Raises StateError unless a state_dict() is that of such an optimizer, of parameters of these shapes.

    plain: of an optimizer outside a run, with no fingerprint of what it trained.
    """
    saved = state_dict["param_groups"]
    mine, theirs = ([len(group["params"]) for group in groups] for groups in (optimizer.param_groups, saved))
    if mine != theirs:
        _refuse(f"its groups have {_counts(theirs)} parameters, here {_counts(mine)}")
    for own, group in zip(optimizer.param_groups, _filled(optimizer, saved), strict=True):
        for name in optimizer.defaults:
            if name in own and name not in group and name not in LOCAL_OPTIONS:
                _refuse(f"it has no {name!r}, which {type(optimizer).__name__} needs")
    for own, group in zip(optimizer.param_groups, saved, strict=True):
        _check_kind(optimizer, own, group)
        for param, number in zip(own["params"], group["params"], strict=True):
            here = _tensors(optimizer.state.get(param))
            for name, value in _tensors(state_dict["state"].get(number)).items():
                if not _fits(optimizer, value, param, here.get(name)):
                    _refuse(f"its {name!r} is {tuple(value.shape)} where a parameter is {tuple(param.shape)}")
                if plain and _is_wider(value, param):
                    _refuse(f"its {name!r} is {value.dtype} where a parameter is {param.dtype}")


def _check_kind(optimizer: torch.optim.Optimizer, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raises StateError for options that tell that another class of torch's saved a group."""
    for name in sorted(saved.keys() & _names_of_torch()):
        if name not in own and name not in LOCAL_OPTIONS:
            _refuse(f"it has {name!r}, which {type(optimizer).__name__} has not")
    mine, theirs = own.get(DECOUPLED), saved.get(DECOUPLED)
    if isinstance(mine, bool) and isinstance(theirs, bool) and mine != theirs:
        _refuse(f"its {DECOUPLED} is {theirs}, as Adam and AdamW differ, and that of this one {mine}")


@functools.cache
def _names_of_torch() -> frozenset[str]:
    """The options of all optimizers of torch."""
    classes = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    found = {name for kind in classes for name in inspect.signature(kind).parameters}
    return frozenset(found - {"self", "params", "args", "kwargs", "optimizer"})


def _is_wider(saved: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether a state of a parameter's form would lose digits."""
    alike = saved.shape == param.shape and saved.dim() > 0
    floats = saved.is_floating_point() and param.is_floating_point()
    return alike and floats and saved.dtype.itemsize > param.dtype.itemsize


def _tensors(state: object) -> dict[str, torch.Tensor]:
    """What an optimizer keeps of one parameter, by name."""
    if not isinstance(state, Mapping):
        return {}
    return {str(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _fits(
    optimizer: torch.optim.Optimizer, saved: torch.Tensor, param: torch.Tensor, here: torch.Tensor | None
) -> bool:
    """Whether the optimizer may keep this of such a parameter. Those of torch keep what is as long as the
    parameter in each dimension, or 1 where it holds means over one; others may keep anything.
    """
    if here is not None:
        return here.shape == saved.shape
    if not type(optimizer).__module__.startswith("torch.optim") or saved.dim() != param.dim():
        return True
    return all(kept in (1, size) for kept, size in zip(saved.shape, param.shape, strict=True))


def _refuse(why: str) -> NoReturn:
    raise StateError(
        f"this state_dict is of another model or optimizer ({why}); build what was saved, in the same order"
    )


def _counts(sizes: Sequence[int]) -> str:
    shown = ", ".join(map(str, sizes[:8]))
    return f"{shown}, …" if len(sizes) > 8 else shown or "no"


def _filled(
    optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """The groups with what the class adds to those that an older version of it saved."""
    probe: Any = object.__new__(type(optimizer))
    probe.__dict__.update(optimizer.__dict__)
    try:
        probe.__setstate__({"state": defaultdict(dict), "param_groups": [dict(group) for group in saved]})
    except Exception:  # of a class that reads its state there: it will tell when it loads
        return optimizer.param_groups
    groups: Sequence[Mapping[str, Any]] = probe.param_groups
    return groups


def differences(mine: Columns, theirs: Columns, groups: int) -> dict[str, tuple[Any, Any]]:
    """By option the first pair of values that differ by more than rounding."""
    found = {}
    for name in mine.keys() & theirs.keys():
        for index in range(groups):
            pair = mine[name][index % len(mine[name])], theirs[name][index % len(theirs[name])]
            if not _equal(*pair):
                found[name] = pair
                break
    return found


_STRANGE = object()
_SIMPLE = (bool, int, float, str)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, _SIMPLE):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.item()
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return _STRANGE if any(not isinstance(item, _SIMPLE) for item in items) else items
    return _STRANGE


def _put(group: dict[str, Any], name: str, value: Any) -> None:
    old = group[name]
    if isinstance(old, tuple | list):
        if isinstance(value, list) and len(old) == len(value):
            items = [_like(part, item) for part, item in zip(old, value, strict=True)]
            group[name] = type(old)(items)
    else:
        group[name] = _like(old, value)


def _like(old: Any, value: Any) -> Any:
    """The value as this optimizer holds it; `old` where it cannot hold such a value."""
    number = isinstance(value, bool | int | float)
    if isinstance(old, torch.Tensor):
        return old.fill_(value) if number else old
    fits = old is None or value is None or isinstance(value, type(old))
    return value if fits or (number and isinstance(old, bool | int | float)) else old


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return all(_equal(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float | int) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-9)
    return bool(one == other)
