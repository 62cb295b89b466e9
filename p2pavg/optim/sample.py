"""A few elements of the parameters: they tell whether something changed them, and whether peers are equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from p2pavg.optim.tree import U8

TENSORS = 64
ELEMENTS = 32
_ODD = 0x9E3779B1

Window = tuple[int, int, int]
"""Which tensor, its first element in row-major order, and how many."""


def windows(sizes: Sequence[int], epoch: int) -> list[Window]:
    """Runs of at most ELEMENTS elements of at most TENSORS tensors. Each epoch has others, so that all have a
    turn.
    """
    filled = [index for index, size in enumerate(sizes) if size]
    every = -(-len(filled) // TENSORS) or 1
    found = []
    for index in filled[epoch % every :: every]:
        places = max(1, sizes[index] - ELEMENTS + 1)
        start = (epoch * _ODD + index * ELEMENTS * 7) % places
        found.append((index, start, min(ELEMENTS, sizes[index])))
    return found


def _run(tensor: torch.Tensor, start: int, count: int) -> torch.Tensor:
    if tensor.is_contiguous():
        return tensor.view(-1)[start : start + count]
    places = torch.arange(start, start + count, device=tensor.device)
    return tensor[torch.unravel_index(places, tensor.shape)]


class Sample:
    """The elements in the windows of `epoch`, as they are now. Taking it does not wait for a device."""

    def __init__(self, tensors: Sequence[torch.Tensor], epoch: int) -> None:
        self.epoch = epoch
        self._order: list[tuple[int, int]] = []  # which group, bytes
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        with torch.no_grad():
            for index, start, count in windows([tensor.numel() for tensor in tensors], epoch):
                tensor = tensors[index].detach()
                kind = tensor.device, tensor.dtype
                members = groups.setdefault(kind, [])
                members.append(_run(tensor, start, count))
                self._order.append((list(groups).index(kind), count * tensor.element_size()))
            self._groups = [torch.cat(members).view(torch.uint8) for members in groups.values()]
        self._told: bytes | None = None

    @property
    def data(self) -> bytes:
        """The elements' bytes. Waits for their devices the first time."""
        if self._told is None:
            whole = [group.cpu().numpy().tobytes() for group in self._groups]
            at, parts = [0] * len(whole), []
            for group, size in self._order:
                parts.append(whole[group][at[group] : at[group] + size])
                at[group] += size
            self._told, self._groups = b"".join(parts), []
        return self._told


def of_copy(out: U8, places: Sequence[tuple[int, torch.Tensor]], epoch: int) -> bytes:
    """`Sample.data` of tensors whose bytes were copied to `out`, at these places."""
    parts = []
    for index, start, count in windows([tensor.numel() for _, tensor in places], epoch):
        at, tensor = places[index]
        first = at + start * tensor.element_size()
        parts.append(out[first : first + count * tensor.element_size()].tobytes())
    return b"".join(parts)
