"""Resynchronisation: parameters and optimizer state that drifted apart are averaged themselves."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from p2pavg.errors import ConfigurationError, StateError
from p2pavg.optim.gradients.store import F32, Vector
from p2pavg.optim.gradients.vectors import flat

EXACT = (torch.float32, torch.float16, torch.bfloat16)


class Resync:
    """Every `every` epochs the round's vector holds, behind the gradient, all that the next step starts from.

    Such a vector goes uncompressed. Its average replaces parameters and state on all peers before they step,
    so that they are equal to the bit again; how far this peer had drifted is told. `every` None: never.

    Raises ConfigurationError for parameters that float32 cannot carry.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, every: int | None) -> None:
        self._optimizer = optimizer
        self.every = every
        if every is not None and any(param.dtype not in EXACT for param in self._params()):
            raise ConfigurationError(
                "resync_epochs averages in float32, which rounds float64 parameters; leave it at None"
            )

    def due(self, epoch: int) -> bool:
        """Whether the average of this epoch holds parameters and state."""
        return self.every is not None and epoch % self.every == self.every - 1

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]

    def _tensors(self) -> list[torch.Tensor]:
        """Parameters, then what the optimizer keeps in floats for each, in an order that all peers share."""
        params = self._params()
        found = list(params)
        for param in params:
            entries = self._optimizer.state.get(param, {})
            for _, value in sorted(entries.items()):
                if isinstance(value, torch.Tensor) and value.dtype in EXACT and value.dim() > 0:
                    found.append(value)
        return found

    @property
    def size(self) -> int:
        """Elements behind the gradient."""
        return sum(tensor.numel() for tensor in self._tensors())

    def extended(self, vector: Vector, scale: float) -> F32:
        """float32[numel + size]: vector * scale, then parameters and state as they are."""
        tensors = self._tensors()
        out = np.empty(len(vector) + sum(tensor.numel() for tensor in tensors), np.float32)
        whole, at = torch.from_numpy(out), len(vector)
        torch.mul(flat(vector).cpu(), scale, out=whole[:at])
        for tensor in tensors:
            whole[at : at + tensor.numel()].view(tensor.shape).copy_(tensor.detach())
            at += tensor.numel()
        return out

    def replace(self, averaged: F32) -> Mapping[str, float]:
        """Parameters and state <- averaged, float32[size]. How far this peer's parameters were from them.

        "drift": the norm of the difference over the norm of the average; "drift_elements": how many differed.
        Raises StateError when the optimizer keeps other state than its peers'.
        """
        tensors, source, at = self._tensors(), torch.from_numpy(averaged), 0
        if sum(tensor.numel() for tensor in tensors) != len(averaged):
            raise StateError("the swarm's optimizers keep other state than this one; build it as they do")
        difference = norm = 0.0
        differing = 0
        with torch.no_grad():
            for index, tensor in enumerate(tensors):
                mean = source[at : at + tensor.numel()].view(tensor.shape).to(tensor.device)
                at += tensor.numel()
                if index < len(self._params()):
                    here = mean.to(tensor.dtype)
                    apart = (tensor.double() - mean.double()).square_()
                    difference += float(apart.sum())
                    norm += float(mean.double().square_().sum())
                    differing += int((tensor != here).sum())
                tensor.copy_(mean)
        return {
            "drift": float(np.sqrt(difference / norm)) if norm else 0.0,
            "drift_elements": float(differing),
        }
