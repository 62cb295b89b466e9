"""Parameters that the optimizer does not hold, as under adapters: never sent, and the same everywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from p2pavg.optim.sample import TENSORS, Sample

NONE = "none"


class FrozenDigest(nn.Module):
    """Stands for a model whose frozen parameters are elsewhere, by their digest."""

    frozen: str


def digest(modules: Iterable[nn.Module], params: Iterable[torch.Tensor]) -> str:
    """Of the modules' parameters that are not among `params`: their shapes and dtypes, and a sample of the
    values of each. "none": there are none. A sharded one is put together, for which all its ranks call this.
    """
    held = {id(param) for param in params}
    modules = list(modules)
    for module in modules:
        if isinstance(module, FrozenDigest):
            return module.frozen
    aside = [param for module in modules for param in module.parameters() if id(param) not in held]
    if not aside:
        return NONE
    found = hashlib.sha256()
    for at in range(0, len(aside), TENSORS):
        tensors = [_whole(param.detach()) for param in aside[at : at + TENSORS]]
        found.update(repr([(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]).encode())
        found.update(Sample(_plain(tensors), 0).data)
    return found.hexdigest()[:16]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor put together. Importing its class here would take a sixth of the time of `import p2pavg`."""
    put_together = getattr(tensor, "full_tensor", None)
    whole: torch.Tensor = tensor if put_together is None else put_together()
    return whole


def _plain(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those that have values: a model may be loaded in part."""
    return [tensor for tensor in tensors if not tensor.is_meta]
