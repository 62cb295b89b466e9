"""Master parameters: the inner optimizer steps on them while the model computes with its own copy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from p2pavg.optim.gradients.layout import VectorLayout, pack
from p2pavg.optim.gradients.store import Vector, dense_stride
from p2pavg.optim.gradients.vectors import flat, used

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers whose fused kernel runs on the CPU."""

ON_CPU = ("fused", "foreach", "capturable")
"""Options of a group that offload changes."""


def replace_parameters(
    optimizer: torch.optim.Optimizer, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]
) -> None:
    """Put new[i] where old[i] stands in groups and state; state follows in device and dtype."""
    instead = {id(before): after for before, after in zip(old, new, strict=True)}
    for group in optimizer.param_groups:
        group["params"] = [instead[id(param)] for param in group["params"]]
    for before, after in zip(old, new, strict=True):
        if before in optimizer.state:
            entries = optimizer.state.pop(before)
            optimizer.state[after] = {key: _like(value, before, after) for key, value in entries.items()}


class Masters:
    """Copies of an optimizer's parameters that stand in their place in its groups and its state.

    The optimizer then steps on the masters, on any thread, and `publish` copies them into the model.
    `restore` undoes the replacement.

    offload: masters, and with them the optimizer's state, are float32 on the CPU, and the optimizer's fused
    kernel is used where it has one; else they have the dtype and device of the parameters. For a model on an
    accelerator, what is published lies in page-locked memory, in the parameters' dtype.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, offload: bool) -> None:
        self._optimizer = optimizer
        self.offloaded = offload
        self._live = [param for group in optimizer.param_groups for param in group["params"]]
        self._saved_options: list[dict[str, Any]] = []
        places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, param in enumerate(self._live):
            place = (torch.device("cpu"), torch.float32) if offload else (param.device, param.dtype)
            places.setdefault(place, []).append(index)
        sizes = [param.numel() for param in self._live]
        self.params: list[torch.Tensor] = list(self._live)
        for (device, dtype), members in places.items():
            starts, end = pack(sizes, members)
            pinned = offload and any(self._live[index].is_cuda for index in members)
            buffer = torch.empty(end, dtype=dtype, device=device, pin_memory=pinned)
            for index, start in zip(members, starts, strict=True):
                live = self._live[index]
                master = buffer.as_strided(tuple(live.shape), dense_stride(live), start)
                master.copy_(live.detach())
                self.params[index] = master
        self._away = offload and any(live.is_cuda for live in self._live)
        self._published: torch.cuda.Event | None = None
        self._versions: list[int] = []
        self._staged: list[torch.Tensor | None] = [None] * len(self._live)
        self._rounded = [self._rounding(index) for index in range(len(self._live))]
        self.round()
        if offload:
            self._adapt()
        replace_parameters(optimizer, self._live, self.params)
        self._note()

    @property
    def live(self) -> Sequence[torch.Tensor]:
        """The model's parameters."""
        return self._live

    @property
    def threads(self) -> int:
        """For steps: one, as the training thread needs the others, unless it works on an accelerator."""
        return max(1, (os.cpu_count() or 1) // 4) if self._away else 1

    def _rounding(self, index: int) -> torch.Tensor:
        """Where master `index` stands in its parameter's dtype, ready to be copied."""
        master, live = self.params[index], self._live[index]
        if not live.is_cuda or master.dtype == live.dtype:
            return master
        room = torch.empty(live.numel(), dtype=live.dtype, device="cpu", pin_memory=True)
        return room.as_strided(tuple(live.shape), dense_stride(live))

    def round(self) -> None:
        """Bring what `publish` copies up to date with the masters."""
        pairs = [
            (out, master) for out, master in zip(self._rounded, self.params, strict=True) if out is not master
        ]
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([out for out, _ in pairs], [master for _, master in pairs])

    def _adapt(self) -> None:
        """Options that belong to the CPU, for the time being."""
        fused = isinstance(self._optimizer, FUSED)
        for group in self._optimizer.param_groups:
            kept: dict[str, Any] = {key: group[key] for key in ON_CPU if key in group}
            self._saved_options.append(kept)
            if "capturable" in group:
                group["capturable"] = False  # of step counters on a device
            if fused and not group.get("differentiable") and not isinstance(group["lr"], torch.Tensor):
                group["fused"], group["foreach"] = True, False

    def step(self, vector: Vector, layout: VectorLayout) -> None:
        """Step the optimizer on an averaged gradient; parameters that no peer used rest."""
        self.wait_published()
        whole, reached = flat(vector), used(vector, layout)
        for index, master in enumerate(self.params):
            if reached[index]:
                grad = whole.as_strided(tuple(master.shape), dense_stride(master), layout.offsets[index])
                master.grad = grad.to(device=master.device, dtype=master.dtype)
        self._optimizer.step()
        for master in self.params:
            master.grad = None
        self.round()

    def step_locally(self) -> None:
        """Step the optimizer on the gradients that the model's parameters have, and publish. Runs on the
        training thread.
        """
        self.take_edits()
        brought = [
            None if live.grad is None else self._brought(index, live.grad)
            for index, live in enumerate(self._live)
        ]
        for device in {live.device for live in self._live if live.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        for master, grad in zip(self.params, brought, strict=True):
            master.grad = None if grad is None else grad.to(master.dtype)
        self._optimizer.step()
        for master in self.params:
            master.grad = None
        self.show()

    def _brought(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """A gradient beside its master; of a device, once the current stream has come so far."""
        if not grad.is_cuda:
            return grad
        room = self._staged[index]
        if room is None or room.dtype != grad.dtype:
            room = torch.empty(grad.numel(), dtype=grad.dtype, device="cpu", pin_memory=True)
            room = self._staged[index] = room.as_strided(tuple(grad.shape), dense_stride(self.params[index]))
        return room.copy_(grad, non_blocking=True)

    def show(self) -> None:
        """Bring the model's parameters up to date with the masters."""
        self.round()
        self.publish()

    def take_edits(self) -> None:
        """Take over what somebody wrote into the model's parameters since they were published."""
        self.wait_published()
        for live, version, master, shown in zip(
            self._live, self._versions, self.params, self._rounded, strict=True
        ):
            if live._version != version:
                value = live.detach().to("cpu")
                if not torch.equal(value, shown.to(value.dtype)):
                    with torch.no_grad():
                        master.copy_(value)

    def _note(self) -> None:
        self._versions = [live._version for live in self._live]

    def publish(self) -> None:
        """Copy the masters into the model's parameters. Runs on the training thread, at a step boundary; from
        page-locked memory the copies are only given to the current stream.
        """
        with torch.no_grad():
            torch._foreach_copy_(self._live, self._rounded, non_blocking=self._away)
        if self._away:
            self._published = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._published.record()
        self._note()

    def wait_published(self) -> None:
        """Wait until the last `publish` has read the masters."""
        if self._published is not None:
            self._published.synchronize()
            self._published = None

    def follow(self, live: Sequence[torch.Tensor]) -> None:
        """Go on with other parameters of the model, which have the right values."""
        self._live = list(live)
        self._away = self.offloaded and any(param.is_cuda for param in live)
        self._rounded = [self._rounding(index) for index in range(len(live))]
        self.collect(None)

    def collect(self, copies: Sequence[torch.Tensor] | None) -> None:
        """Set the masters from `copies()` of a checkpoint, or else from the model's parameters."""
        with torch.no_grad():
            self.wait_published()
            torch._foreach_copy_(self.params, self._live if copies is None else list(copies))
            self.round()
        self._note()

    def copies(self) -> list[torch.Tensor] | None:
        """Copies of the masters that are finer than the parameters, for a checkpoint."""
        if all(master.dtype == live.dtype for master, live in zip(self.params, self._live, strict=True)):
            return None
        return [master.clone() for master in self.params]

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, with the model's parameters in them."""
        live = iter(self._live)
        return [
            GroupView(group, [next(live) for _ in group["params"]]) for group in self._optimizer.param_groups
        ]

    def restore(self) -> None:
        """Put the model's parameters back into the optimizer, with the state on their devices. Idempotent."""
        if self._optimizer.param_groups[0]["params"][0] is self._live[0]:
            return
        replace_parameters(self._optimizer, self.params, self._live)
        for group, options in zip(self._optimizer.param_groups, self._saved_options, strict=False):
            group.update(options)


class GroupView(dict[str, Any]):
    """A parameter group with params of its own, whose options are read from and written to another group."""

    def __init__(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        super().__init__({**group, "params": params})
        self._group = group

    def __getitem__(self, key: str) -> Any:
        if key != "params":
            dict.__setitem__(self, key, self._group[key])
        return dict.__getitem__(self, key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key != "params":
            self._group[key] = value
        dict.__setitem__(self, key, value)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self._group else default

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self._group:
            self[key] = default
        return self[key]

    def __contains__(self, key: object) -> bool:
        return key in self._group

    def items(self) -> Any:
        return {key: self[key] for key in self._group}.items()

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


def _like(value: Any, before: torch.Tensor, after: torch.Tensor) -> Any:
    """Move state that is shaped like its parameter along with it; step counters and the like stay."""
    if isinstance(value, torch.Tensor) and value.device == before.device and value.dim() > 0:
        dtype = after.dtype if value.dtype == before.dtype else value.dtype
        return value.to(device=after.device, dtype=dtype)
    return value
