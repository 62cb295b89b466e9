"""Fragments: whole tensors in bins of about equal size, each averaged in a round of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2pavg.errors import ConfigurationError
from p2pavg.optim.gradients.layout import GUARD, aligned, pack


@dataclass(frozen=True, slots=True)
class Fragment:
    """Parameters `params`, by index, which lie in elements `start` to `stop` of θ_ref."""

    params: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Fragments:
    """Where parameters lie in θ_ref, and in the vector that a round averages.

    offsets[i], sizes[i]: elements of parameter i in θ_ref, which has `total`, one fragment after the other.
    A round's vector holds one fragment from element 0 on, then zeros, and the deltas of buffers from `extra`
    on: `numel` elements in all.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    total: int
    each: tuple[Fragment, ...]
    extra: int
    extra_size: int
    numel: int

    def due(self, epoch: int) -> Fragment:
        """The fragment that the round of this epoch averages."""
        return self.each[epoch % len(self.each)]

    @property
    def whole(self) -> Fragment:
        """All parameters."""
        return Fragment(tuple(range(len(self.sizes))), 0, self.total)


def fragments_of(sizes: Sequence[int], count: int, extra_size: int = 0) -> Fragments:
    """The same on every peer with these parameters. Raises ConfigurationError for more than there are."""
    if count > len(sizes):
        raise ConfigurationError(
            f"Outer(fragments={count}) is more than the {len(sizes)} tensors of the model, which stay whole"
        )
    offsets, each, end = [0] * len(sizes), [], 0
    for chosen in bins(sizes, count):
        packed, length = pack(sizes, chosen)
        for index, offset in zip(chosen, packed, strict=True):
            offsets[index] = end + offset
        each.append(Fragment(tuple(chosen), end, end + length))
        end += length
    extra = aligned(max(fragment.stop - fragment.start for fragment in each) + GUARD * bool(extra_size))
    return Fragments(
        tuple(offsets), tuple(sizes), end, tuple(each), extra, extra_size, extra + aligned(extra_size)
    )


def bins(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Indices of the tensors in each of `count` bins: the largest first, each into the emptiest bin."""
    filled = [0] * count
    chosen: list[list[int]] = [[] for _ in range(count)]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        emptiest = min(range(count), key=lambda place: (filled[place], place))
        filled[emptiest] += aligned(sizes[index])
        chosen[emptiest].append(index)
    return [sorted(one, reverse=True) for one in chosen]
