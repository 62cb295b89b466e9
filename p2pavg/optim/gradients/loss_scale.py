"""Working with torch.amp.GradScaler: sums carry the loss scale they were computed under."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from p2pavg import native
from p2pavg.codecs import cuda as device
from p2pavg.errors import ConfigurationError


class ScaleProbe:
    """Stands where a GradScaler looks for the optimizer's own scale, and catches the scaler's live tensor.

    The scaler computes `its_scale * optimizer.grad_scale` before step(). That tensor is updated in place when
    the scale changes, so whoever holds it knows the scale of the coming backward pass.
    """

    def __init__(self) -> None:
        self.live: torch.Tensor | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scale, probe = (args[0], args[1]) if isinstance(args[1], cls) else (args[1], args[0])
        probe.live = scale
        return scale.clone()


class Flags:
    """What a GradScaler found, on its way from an accelerator: read when it is there, not waited for.

    The device writes each flag into page-locked memory, where a value that no flag has stands until then.
    """

    SLOTS = 64  # float32
    UNTOLD = -1.0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._room = torch.full(
            (self.SLOTS,),
            self.UNTOLD,
            dtype=torch.float32,
            device="cpu",
            pin_memory=torch.cuda.is_available(),
        )
        self.slots = list(self._room.unbind())
        self._seen: Any = memoryview(self._room.numpy())  # faster than an array, one by one
        self._pending: deque[tuple[int, int]] = deque()  # slot, samples counted by then
        self._next = 0
        self._bad: int | None = None  # `counted` of the last bad microbatch that nobody has taken yet

    def ask(self, counted: int) -> int:
        """Of `slots`, one float32 each, the one into which the device is to write a flag. counted: samples to
        the end of its microbatch.
        """
        if len(self._pending) == self.SLOTS:
            self._settle_first()  # its slot is the next one
        slot, self._next = self._next, (self._next + 1) % self.SLOTS
        self._seen[slot] = self.UNTOLD
        self._pending.append((slot, counted))
        return slot

    def take(self, wait: bool) -> int | None:
        """`counted` of the last bad microbatch among those that are known by now; None: all were good."""
        while self._pending and (wait or self._seen[self._pending[0][0]] != self.UNTOLD):
            self._settle_first()
        bad, self._bad = self._bad, None
        return bad

    def _settle_first(self) -> None:
        slot, counted = self._pending.popleft()
        if self._seen[slot] == self.UNTOLD:
            torch.cuda.synchronize(self._device)
        if self._seen[slot] != 0:
            self._bad = counted


class LossScale:
    """The factor that the accumulated sums are too large by. 1 until a GradScaler is seen.

    Where scaler and sums are on one accelerator, sums are rescaled, and cleared after inf, in the order of
    its stream; the host waits for nothing before a round, and hears of inf some microbatches later.
    """

    def __init__(self) -> None:
        self._current = 1.0
        self._held: torch.Tensor | None = None  # the same, on the accelerator
        self._version = -1  # of the scaler's tensor when `_held` was brought to it
        self._clearing: Clearing | None = None  # where the scaler's tensor and the sums are on an accelerator
        self._flags: Flags | None = None
        self._counted = 0
        self._probe = ScaleProbe()
        self._given: Any = None

    @property
    def current(self) -> float:
        """The loss scale of the sums. Waits for an accelerator."""
        return self._current if self._held is None else float(self._held)

    @property
    def offered(self) -> ScaleProbe:
        """The value that the scaler finds as `optimizer.grad_scale`."""
        return self._probe

    def give(self, value: Any) -> None:
        """Take `optimizer.grad_scale`, which the scaler sets before step(), and to None after it."""
        self._given = value

    def check(self, found_inf: torch.Tensor, samples: int, sums: Sequence[torch.Tensor]) -> int | None:
        """At a step() called by a GradScaler. None, or how many samples came after a bad microbatch.

        On an accelerator the sums are cleared there, behind the bad microbatch.
        Raises ConfigurationError after scaler.unscale_(), which would divide earlier microbatches once more.
        """
        if isinstance(self._given, ScaleProbe):
            raise ConfigurationError(
                "scaler.unscale_(opt) would unscale again what earlier microbatches accumulated; drop it, "
                "and use max_grad_norm= to clip the averaged gradient"
            )
        live = self._probe.live
        clearing = self._clearing
        if clearing is None or clearing.live is not live or clearing.sums is not sums:
            clearing = self._clearing = self._look(live, sums)
        if live is None or clearing is None:
            bad = bool(found_inf.item())
            if live is not None:
                self._current, self._held = float(live), None
            return 0 if bad else None
        if self._held is None:
            self._held, self._version = live.detach().clone(), live._version
        self._counted += samples
        clearing.clear(found_inf, clearing.flags.ask(self._counted))
        return self.settle(wait=False)

    def _look(self, live: torch.Tensor | None, sums: Sequence[torch.Tensor]) -> Clearing | None:
        if live is None or not accelerated(live, sums):
            return None
        if self._flags is None:
            self._flags = Flags(live.device)
        return Clearing(live, sums, self._flags)

    def settle(self, wait: bool = True) -> int | None:
        """As `check`, for all microbatches so far. wait: False: only for those whose flag has come."""
        bad = None if self._flags is None else self._flags.take(wait)
        return None if bad is None else self._counted - bad

    def follow(self, sums: Sequence[torch.Tensor]) -> None:
        """Bring the sums to the scale of the loss, before its backward pass adds to them."""
        live = self._probe.live
        if live is None:
            return
        if self._held is None:
            before, self._current = self._current, float(live)
            if before != self._current:
                for buffer in sums:
                    buffer.mul_(self._current / before)
        elif live._version != self._version:
            self._version = live._version
            rescale(sums, live, self._held)


class Clearing:
    """Clears sums on an accelerator after inf. What is true of them at every step is looked at once."""

    def __init__(self, live: torch.Tensor, sums: Sequence[torch.Tensor], flags: Flags) -> None:
        self.live = live
        self.sums = sums
        self.flags = flags
        alone = sums[0] if len(sums) == 1 and _has_kernels(sums[0]) else None
        self._kernel = None if alone is None else device.ClearUnless(alone, flags.slots)

    def clear(self, flag: torch.Tensor, slot: int) -> None:
        """All sums <- 0 unless flag, one float32 on their device, is 0; the slot <- flag. Does not wait."""
        if self._kernel is not None:
            self._kernel.clear(flag, slot)
            return
        for buffer in self.sums:
            buffer.masked_fill_(flag != 0, 0.0)
        self.flags.slots[slot].copy_(flag, non_blocking=True)


def accelerated(live: torch.Tensor, sums: Sequence[torch.Tensor]) -> bool:
    """Whether the scaler's tensor and all sums are on one CUDA device."""
    return live.is_cuda and all(buffer.device == live.device for buffer in sums)


def _has_kernels(buffer: torch.Tensor) -> bool:
    return buffer.dtype == torch.float32 and buffer.is_cuda and native.cuda() is not None


def rescale(sums: Sequence[torch.Tensor], wanted: torch.Tensor, current: torch.Tensor) -> None:
    """All sums *= wanted / current, then current <- wanted, one float32 each there. Does not wait."""
    if len(sums) == 1 and _has_kernels(sums[0]):
        device.rescale(sums[0], wanted, current)
        return
    factor = wanted / current
    for buffer in sums:
        buffer.mul_(factor)
    current.copy_(wanted)
