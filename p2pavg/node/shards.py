"""Where the parts of a node's parameters are, and how they travel between its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from p2pavg.errors import ConfigurationError

SMALL_BYTES = 1 << 18

Cut = tuple[tuple[int, int, int], ...]
"""A shard as cuts of the whole tensor, one after the other: (dimension, start, length)."""


class ParameterShards:
    """Where the parts of each parameter are, and their way to the first rank and back.

    params: this rank's; DTensors may be shards, others are whole on every rank.
    """

    def __init__(self, params: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        self._params = params
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        ranks = dist.get_process_group_ranks(group)
        on_host = dist.get_backend(group) == "gloo"
        self._host = (
            group if on_host else dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        )
        self._first = ranks[0]
        self._ranks = ranks
        own = [_cut(param) if isinstance(param, DTensor) else () for param in params]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, own, group=self._host)
        self._cuts: list[list[Cut]] = everyone
        # Of each parameter, whether any rank has a part of it alone.
        self._sharded = [any(cuts) for cuts in zip(*everyone, strict=True)]

    @property
    def sharded(self) -> bool:
        """Whether some parameter is whole on no rank."""
        return any(self._sharded)

    def tell(self, *words: int) -> tuple[int, ...]:
        """The first rank's words, on all ranks."""
        told = torch.tensor(words, dtype=torch.int64)
        dist.broadcast(told, self._first, self._host)
        return tuple(int(word) for word in told)

    def own(self) -> list[torch.Tensor]:
        """This rank's part of each parameter, in the parameter's own memory."""
        return [local(param.detach()) for param in self._params]

    def gather(self, own: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """own: this rank's part of each parameter. On the first rank the wholes, float32 in host memory."""
        if self.rank > 0:
            shards = [part.reshape(-1) for part, cut in zip(own, self._sharded, strict=True) if cut]
            if shards:
                dist.send(torch.cat([part.float().cpu() for part in shards]), self._first, self._host)
            return None
        whole = [torch.zeros(param.shape) for param in self._params]
        for out, part, cut in zip(whole, own, self._cuts[0], strict=True):
            _part(out, cut).copy_(part)
        for rank in range(1, self.size):
            parts = self._parts(whole, rank)
            sizes = [part.numel() for part in parts]
            if parts:
                room = torch.empty(sum(sizes))
                dist.recv(room, self._ranks[rank], self._host)
                for part, piece in zip(parts, torch.split(room, sizes), strict=True):
                    part.copy_(piece.view(part.shape))
        return whole

    def spread(self, whole: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        """Every rank's parameters <- their parts of the first rank's `whole`; buffers <- the first rank's."""
        self.scatter(whole, self.own())
        with torch.no_grad():
            self._broadcast(buffers)

    def tell_object(self, told: Any) -> Any:
        """What the first rank has to tell, on all ranks."""
        box = [told]
        dist.broadcast_object_list(box, self._first, self._host)
        return box[0]

    def scatter(self, whole: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> None:
        """own, of each parameter's shape on this rank, <- its part of the first rank's `whole`."""
        with torch.no_grad():
            if self.rank == 0:
                for rank in range(1, self.size):
                    parts = self._parts([tensor.detach() for tensor in whole], rank)
                    if parts:
                        flat = torch.cat([part.reshape(-1).float() for part in parts])
                        dist.send(flat, self._ranks[rank], self._host)
                for mine, host, cut in zip(own, whole, self._cuts[0], strict=True):
                    if mine.data_ptr() != host.data_ptr():
                        mine.copy_(_part(host.detach(), cut))
            else:
                shards = [mine for mine, cut in zip(own, self._sharded, strict=True) if cut]
                if shards:
                    sizes = [part.numel() for part in shards]
                    room = torch.empty(sum(sizes))
                    dist.recv(room, self._first, self._host)
                    for part, piece in zip(shards, torch.split(room, sizes), strict=True):
                        part.copy_(piece.view(part.shape))
            self._broadcast([mine for mine, cut in zip(own, self._sharded, strict=True) if not cut])

    def _broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """All tensors <- the first rank's. Small ones travel together: most of a model's tensors are."""
        together: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for tensor in tensors:
            if tensor.numel() * tensor.element_size() < SMALL_BYTES:
                together.setdefault((tensor.device, tensor.dtype), []).append(tensor)
                continue
            room = tensor.contiguous()
            dist.broadcast(room, self._first, self._group)
            if room is not tensor:
                tensor.copy_(room)
        for few in together.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in few])
            dist.broadcast(flat, self._first, self._group)
            if self.rank > 0:
                pieces = torch.split(flat, [tensor.numel() for tensor in few])
                views = [piece.view(tensor.shape) for piece, tensor in zip(pieces, few, strict=True)]
                torch._foreach_copy_(few, views)

    def _parts(self, whole: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """A rank's parts of what is sharded."""
        known = zip(whole, self._cuts[rank], self._sharded, strict=True)
        return [_part(tensor, cut) for tensor, cut, sharded in known if sharded]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of it."""
    if isinstance(tensor, DTensor):
        found: torch.Tensor = tensor.to_local()
        return found
    return tensor


def _cut(param: DTensor) -> Cut:
    """Where this rank's shard stands in the whole. Raises ConfigurationError for other placements."""
    cuts: list[tuple[int, int, int]] = []
    shape = list(param.shape)
    for dim, placement in enumerate(param.placements):
        if type(placement) is Replicate:
            continue
        if type(placement) is not Shard:
            raise ConfigurationError(
                f"a parameter is placed as {placement}: a node's parameters are whole, replicated or "
                "cut evenly"
            )
        at, parts = param.device_mesh.get_local_rank(dim), param.device_mesh.size(dim)
        step = -(-shape[placement.dim] // parts)  # as torch.chunk cuts
        start = min(at * step, shape[placement.dim])
        length = min(step, shape[placement.dim] - start)
        cuts.append((placement.dim, start, length))
        shape[placement.dim] = length
    return tuple(cuts)


def _part(whole: torch.Tensor, cut: Cut) -> torch.Tensor:
    for dim, start, length in cut:
        whole = whole.narrow(dim, start, length)
    return whole
