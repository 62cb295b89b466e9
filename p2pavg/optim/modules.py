"""Finding the modules that an optimizer's parameters belong to, for their buffers (BatchNorm statistics)."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import nn


def owning_modules(params: Iterable[torch.Tensor]) -> list[nn.Module]:
    """The largest live modules all of whose trainable parameters are among `params`, and at least one is.

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
