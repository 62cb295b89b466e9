"""Finding the modules that an optimizer's parameters belong to, for their buffers (BatchNorm statistics)."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import nn


def owning_modules(params: Iterable[torch.Tensor]) -> list[nn.Module]:
    """The largest live modules that have trainable parameters, all of them among `params`.

    In the order of their first parameter, so that peers that built the same model list the same modules.
    """
    order = {id(param): position for position, param in enumerate(params)}
    whole: dict[int, tuple[int, nn.Module]] = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), nn.Module) or "_parameters" not in thing.__dict__:
            continue
        mine = [order[id(param)] for param in thing.parameters() if id(param) in order]
        if mine and all(id(param) in order for param in thing.parameters() if param.requires_grad):
            whole[id(thing)] = (min(mine), thing)
    inner = {id(child) for _, module in whole.values() for child in module.modules() if child is not module}
    roots = [entry for key, entry in whole.items() if key not in inner]
    return [module for _, module in sorted(roots, key=lambda entry: entry[0])]


def persistent_buffers(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Every buffer that a state_dict would hold, once, in a fixed order."""
    found: dict[int, torch.Tensor] = {}
    for root in modules:
        for module in root.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    found.setdefault(id(buffer), buffer)
    return list(found.values())


Places = list[tuple[nn.Module, str] | None]


def places_of(params: Iterable[torch.Tensor], modules: Iterable[nn.Module]) -> Places:
    """For each parameter, the module that holds it and its name there, or None."""
    found: dict[int, tuple[nn.Module, str]] = {}
    for root in modules:
        for module in root.modules():
            for name, param in module._parameters.items():
                if param is not None:
                    found.setdefault(id(param), (module, name))
    return [found.get(id(param)) for param in params]


def parameters_at(places: Places, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters at these places now: other tensors of the same shapes after
    load_state_dict(assign=True).
    """
    now = []
    for place, param in zip(places, params, strict=True):
        there = None if place is None else place[0]._parameters.get(place[1])
        now.append(param if there is None or there.shape != param.shape else there)
    return now
