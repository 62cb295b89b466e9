"""Flat gradient storage: one buffer per (device, dtype), and a view into it for each parameter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from p2pavg.optim.gradients.layout import VectorLayout, pack

F32 = npt.NDArray[np.float32]
Vector = F32 | torch.Tensor
"""The exchanged vector, float32[layout.numel], in host memory or on an accelerator."""

COPY = 1 << 24


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides autograd expects of a gradient: the parameter's own when dense, else contiguous ones."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()


class Store:
    """Zeroed buffers for a list of parameters, and their views.

    When every gradient is float32 on the CPU, the one buffer is laid out as the exchanged vector itself and
    `vector` is it (float32[layout.numel]). With `path`, gradients are float32 on one accelerator that reaches
    the rounds by itself, and `vector` is the buffer there. Otherwise it is None, and `collect` and `spread`
    copy, COPY elements at a time where a device has to convert.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        dtypes: Sequence[torch.dtype],
        layout: VectorLayout,
        path: bool = False,
    ) -> None:
        self._layout = layout
        places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index in reversed(range(len(params))):
            places.setdefault((params[index].device, dtypes[index]), []).append(index)
        self.buffers: list[torch.Tensor] = []
        self._members: list[list[int]] = []
        self._starts: list[list[int]] = []
        self._place: list[tuple[int, int]] = [(0, 0)] * len(params)
        on_host = list(places) == [(torch.device("cpu"), torch.float32)]
        direct = on_host or path
        for number, ((device, dtype), members) in enumerate(places.items()):
            starts, end = pack(layout.sizes, members)
            self.buffers.append(torch.zeros(layout.numel if direct else end, dtype=dtype, device=device))
            self._members.append(members)
            self._starts.append(starts)
            for index, start in zip(members, starts, strict=True):
                self._place[index] = (number, start)
        self.vector: Vector | None = None
        if direct:
            self.vector = self.buffers[0].numpy() if on_host and not path else self.buffers[0]
        self.views = [self._view(index, param) for index, param in enumerate(params)]
        self.pointers = [view.data_ptr() for view in self.views]

    def _view(self, index: int, param: torch.Tensor) -> torch.Tensor:
        number, start = self._place[index]
        return self.buffers[number].as_strided(tuple(param.shape), dense_stride(param), start)

    def renew(self, index: int, param: torch.Tensor) -> torch.Tensor:
        """Make a new view for parameter `index`, after the data or strides of the old one were swapped."""
        view = self.views[index] = self._view(index, param)
        return view

    def slice(self, index: int) -> torch.Tensor:
        """Parameter `index`'s gradient as a flat run of its buffer."""
        number, start = self._place[index]
        return self.buffers[number][start : start + self._layout.sizes[index]]

    def places(self, number: int, most: int) -> torch.Tensor:
        """Indices of about `most` elements of a buffer, spread evenly over each parameter, one at least."""
        members = [index for index in self._members[number] if self._layout.sizes[index]]
        each = max(1, most // max(1, len(members)))
        found: list[int] = []
        for index in members:
            size, start = self._layout.sizes[index], self._place[index][1]
            count = min(each, size)
            found += [start + (2 * at + 1) * size // (2 * count) for at in range(count)]
        return torch.tensor(found, dtype=torch.int64, device=self.buffers[number].device)

    def place(self, index: int) -> int:
        """The number of the buffer that holds parameter `index`."""
        return self._place[index][0]

    def zero(self) -> None:
        for buffer in self.buffers:
            buffer.zero_()

    def collect(self, vector: F32) -> None:
        """vector <- all slices, as float32; marks and padding are left alone."""
        out = torch.from_numpy(vector)
        if len(self.buffers) == 1:  # then its layout is the vector's
            _copy(out[: len(self.buffers[0])], self.buffers[0])
            return
        for buffer, members, starts in zip(self.buffers, self._members, self._starts, strict=True):
            host = buffer.cpu()
            for index, start in zip(members, starts, strict=True):
                size, offset = self._layout.sizes[index], self._layout.offsets[index]
                out[offset : offset + size].copy_(host[start : start + size])

    def spread(self, vector: F32) -> None:
        """All slices <- vector, in each buffer's dtype."""
        source = torch.from_numpy(vector)
        if len(self.buffers) == 1:
            _copy(self.buffers[0], source[: len(self.buffers[0])])
            return
        for buffer, members, starts in zip(self.buffers, self._members, self._starts, strict=True):
            host = buffer if buffer.device.type == "cpu" else torch.empty_like(buffer, device="cpu")
            for index, start in zip(members, starts, strict=True):
                size, offset = self._layout.sizes[index], self._layout.offsets[index]
                host[start : start + size].copy_(source[offset : offset + size])
            if host is not buffer:
                buffer.copy_(host)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy in pieces, as a conversion between dtypes makes a temporary copy on a device."""
    for at in range(0, len(source), COPY):
        target[at : at + COPY].copy_(source[at : at + COPY])
