"""The work of an outer step that can be done beside local steps: all but the change of the parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from p2pavg.optim.gradients.store import F32
from p2pavg.optim.outer.fragments import Fragment
from p2pavg.optim.outer.reference import Reference, Stepped
from p2pavg.rounds.training import Average

_LOW_BYTES = 6  # of a digest: what a float64 carries exactly
_MOST = 1e37  # of a parameter: differences of two stay finite


class Device:
    """Copies between a model's accelerator and host memory, beside the training thread's own work there."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def kept(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Copies of parameters as they are now, where they are; None: they are not finite. Waits for them."""
        copies = [param.detach().clone() for param in params]
        ends: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
        for copy in copies:
            if copy.numel():
                ends[copy.device] += [end.float() for end in torch.aminmax(copy)]
        largest = [float(torch.stack(some).abs().max()) for some in ends.values()]
        return copies if all(one <= _MOST for one in largest) else None

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same values in host memory. The tensors are ready, and nobody writes to them."""
        found = []
        for tensor in tensors:
            with torch.cuda.stream(self._stream(tensor.device)):  # of None: nothing happens
                found.append(tensor.to("cpu"))
        return found

    def to_device(self, vector: F32, device: torch.device) -> torch.Tensor:
        """float32[n] on that device, ready for any stream there."""
        stream = self._stream(device)
        if stream is None:
            return torch.from_numpy(vector)
        with torch.cuda.stream(stream):
            found = torch.from_numpy(vector).to(device)
        stream.synchronize()
        return found

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


@dataclass(frozen=True, slots=True)
class Ahead:
    """What an average will do to θ_ref and to this peer's parameters."""

    after: Stepped
    shift: torch.Tensor  # of the fragment: parameters become keep · θ_local + shift
    keep: float
    tail: F32  # what of the mean is about buffers
    figures: Mapping[str, float]  # for the report


def prepared(
    average: Average,
    reference: Reference,
    moved: F32 | None,
    taken: F32 | None,
    keep_local: float,
    device: Device,
) -> Ahead:
    """moved: this peer's Δ; taken: what of it is in the average. None: nothing is."""
    fragments = reference.fragments
    due = fragments.due(average.epoch)
    end = due.stop - due.start
    mean = np.empty(fragments.numel, np.float32)
    average.result.decode_into(mean)
    after = reference.stepped(mean, due, gathered=bool(average.result.layout.shares))
    figures = {} if moved is None else _compared(moved[:end], mean[:end])
    figures["theta_sha256_low"] = float(int.from_bytes(reference.digest(after=after)[:_LOW_BYTES], "big"))
    tail = mean[fragments.extra :][: fragments.extra_size].copy()
    keep = 1.0 if moved is None else keep_local
    reference.shift(mean[:end], after, taken, keep)
    return Ahead(after, device.to_device(mean[:end], _where(reference, due)), keep, tail, figures)


def _where(reference: Reference, of: Fragment) -> torch.device:
    """The device of all parameters of a fragment, else the host's."""
    devices = {reference.params[index].device for index in of.params}
    return devices.pop() if len(devices) == 1 else torch.device("cpu")


def _compared(own: F32, mean: F32) -> dict[str, float]:
    """This peer's move beside the swarm's."""
    lengths = [float(np.sqrt(np.dot(vector, vector))) for vector in (own, mean)]
    cosine = float(np.dot(own, mean)) / (lengths[0] * lengths[1]) if all(lengths) else 0.0
    return {"delta_norm": lengths[0], "mean_norm": lengths[1], "cosine": cosine}
