"""A node as one peer: ranks that train together with DDP, FSDP2 or a DeviceMesh, one of them in the swarm.

`CollaborativeOptimizer(inner, …, node_group=group)` on every rank is a NodeOptimizer. Whatever wraps the
model averages gradients within the node. At a boundary the first rank of the group takes them, meets the
swarm, steps, and gives the parameters back. It keeps the whole parameters and the optimizer's state in host
memory; of a sharded model every rank sends and gets its own shards, and no device ever holds the whole.

Start at `NodeOptimizer`. May import every floor below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from p2pavg.errors import ConfigurationError, P2PAvgError
from p2pavg.optim import frozen
from p2pavg.optim.modules import owning_modules, persistent_buffers
from p2pavg.optim.optimizer import CollaborativeOptimizer
from p2pavg.optim.training_state import parameters_of
from p2pavg.peer.peer import Peer

Cut = tuple[tuple[int, int, int], ...]
"""A shard as cuts of the whole tensor, one after the other: (dimension, start, length)."""

GOES_ON, BOUNDARY, FAILED = range(3)  # what the first rank tells the others


class NodeOptimizer(torch.optim.Optimizer):
    """What each rank steps. All ranks call step() as often, with batches of one size.

    inner: an optimizer of this rank's parameters, built after DDP or fully_shard wrapped the model.
    options: those of CollaborativeOptimizer; the first rank alone reads them. batch_size_per_step: samples of
    one step() of one rank, whatever its backward() passes; the mean loss over them is what counts.

    Raises ConfigurationError for parameters that cannot be put together, and P2PAvgError on the other ranks
    for what the peer raises on the first.
    """

    def __init__(self, inner: torch.optim.Optimizer, node_group: dist.ProcessGroup, **options: Any) -> None:
        self._params = parameters_of(inner)
        super().__init__([{"params": self._params}], {})
        self.inner = inner
        self._samples: int | None = options.pop("batch_size_per_step", None)
        self._shards = ParameterShards(self._params, node_group)
        self._sums: list[torch.Tensor | None] = [None] * len(self._params)
        modules = [options["model"]] if options.get("model") is not None else owning_modules(self._params)
        self._buffers = persistent_buffers(modules)
        self._frozen = frozen.digest(modules, self._params)  # of sharded ones by all ranks together
        self._whole: list[nn.Parameter] = []
        self.epoch = -1
        self.stepped = False
        self.collaborative: CollaborativeOptimizer | None = None  # on the first rank
        whole = self._shards.gather([_local(param.detach()) for param in self._params])
        self._conduct(lambda: self._join(whole, options))

    def _join(self, whole: list[torch.Tensor] | None, options: dict[str, Any]) -> None:
        """Enter the swarm, with parameters on the host in the place of this rank's own."""
        _check(self.inner, options)
        assert whole is not None
        self._whole = [
            nn.Parameter(value.to(param.dtype), param.requires_grad)
            for value, param in zip(whole, self._params, strict=True)
        ]
        mine = {id(param): host for param, host in zip(self._params, self._whole, strict=True)}
        for group in self.inner.param_groups:
            group["params"] = [mine[id(param)] for param in group["params"]]
        told = {"model": _Holder(self._whole, self._buffers, self._frozen), "loss_reduction": "sum"}
        self.collaborative = CollaborativeOptimizer(self.inner, **{**options, **told})

    # ------------------------------------------------------------------------------------ the training loop

    def step(self, closure: Callable[[], Any] | None = None, batch_size: int | None = None) -> Any:
        """End a step of this rank, of `batch_size` samples: average with the swarm when it is time.

        Returns the closure's loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        samples = batch_size or self._samples
        if samples is None:
            raise ConfigurationError(
                "step() does not know its samples: pass batch_size_per_step or batch_size="
            )
        self._collect(samples * self._shards.size)
        due = False

        def note() -> None:
            nonlocal due
            assert self.collaborative is not None
            due = self.collaborative.note(samples * self._shards.size)

        before = self.epoch
        if self._conduct(note, lambda: due) == BOUNDARY:
            sums = self._shards.gather(self._taken())
            self._conduct(lambda: self._meet(sums))
        self.stepped = self.epoch != before
        return loss

    def _meet(self, sums: list[torch.Tensor] | None) -> None:
        assert self.collaborative is not None
        assert sums is not None
        self.collaborative.meet([total if total.any() else None for total in sums])

    def _collect(self, samples: int) -> None:
        """sums += gradient * samples, of this rank's shards; the gradients are gone then."""
        with torch.no_grad():
            for index, param in enumerate(self._params):
                grad, param.grad = param.grad, None
                if grad is None:
                    continue
                total = self._sums[index]
                if total is None:
                    self._sums[index] = _local(grad).to(torch.float32, copy=True).mul_(samples)
                else:
                    total.add_(_local(grad), alpha=samples)

    def _taken(self) -> list[torch.Tensor]:
        """The sums, which begin anew."""
        found = [
            torch.zeros_like(_local(param.detach()), dtype=torch.float32) if total is None else total
            for param, total in zip(self._params, self._sums, strict=True)
        ]
        self._sums = [None] * len(self._params)
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Harmless: step() has taken the gradients."""

    def _conduct(self, work: Callable[[], None], boundary: Callable[[], bool] = lambda: False) -> int:
        """The first rank works, and tells the others what came of it: where it brought the parameters to
        another epoch, all get them. Raises on all ranks when the work raised. Returns the word.
        """
        word, failure = GOES_ON, None
        if self._shards.rank == 0:
            try:
                work()
                word = BOUNDARY if boundary() else GOES_ON
            except BaseException as error:
                word, failure = FAILED, error
        epoch = self.collaborative.epoch if self.collaborative is not None else -1
        word, epoch = self._shards.tell(word, epoch)
        if failure is not None:
            raise failure
        if word == FAILED:
            raise P2PAvgError("the peer of this node failed on its first rank, whose error says why")
        if epoch != self.epoch:
            self._shards.spread(self._whole, self._buffers)
            self.epoch = epoch
        return word

    # ------------------------------------------------------------------------------ what an optimizer has

    @property
    def peer(self) -> Peer | None:
        """The node's place in the swarm, on the first rank."""
        return None if self.collaborative is None else self.collaborative.peer

    def state_dict(self) -> dict[str, Any]:
        """The run's state on the first rank; on the others nothing: {}."""
        return {} if self.collaborative is None else self.collaborative.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the run's state, which the first rank has; all ranks call it, after they loaded the model."""
        whole = self._shards.gather([_local(param.detach()) for param in self._params])

        def load() -> None:
            assert self.collaborative is not None
            assert whole is not None
            if not self.collaborative.stands_at(state_dict):  # else the ranks may be an epoch behind
                with torch.no_grad():
                    for host, value in zip(self._whole, whole, strict=True):
                        host.copy_(value)
            self.collaborative.load_state_dict(state_dict)

        self.epoch = -1
        self._conduct(load)

    def close(self) -> None:
        """Leave the swarm. All ranks call it, and go on when the first one has left."""
        self._leave()
        with suppress(RuntimeError):  # a rank is gone
            self._shards.tell(GOES_ON, self.epoch)

    def _leave(self) -> None:
        if self.collaborative is not None:
            self.collaborative.close()

    def __enter__(self) -> NodeOptimizer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._leave()  # the others may be anywhere


class ParameterShards:
    """Where the parts of each parameter are, and their way to the first rank and back.

    params: this rank's; DTensors are shards, others are whole on every rank.
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
        own = [_cut(param) if isinstance(param, DTensor) else None for param in params]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, own, group=self._host)
        self._cuts: list[list[Cut | None]] = everyone

    def tell(self, *words: int) -> tuple[int, ...]:
        """The first rank's words, on all ranks."""
        told = torch.tensor(words, dtype=torch.int64)
        dist.broadcast(told, self._first, self._host)
        return tuple(int(word) for word in told)

    def gather(self, own: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """own: this rank's part of each parameter. On the first rank the wholes, float32 in host memory."""
        if self.rank > 0:
            shards = [
                part.reshape(-1)
                for part, cut in zip(own, self._cuts[self.rank], strict=True)
                if cut is not None
            ]
            if shards:
                dist.send(torch.cat([part.float().cpu() for part in shards]), self._first, self._host)
            return None
        whole = [torch.zeros(param.shape) for param in self._params]
        for out, part, cut in zip(whole, own, self._cuts[0], strict=True):
            _part(out, cut or ()).copy_(part)
        for rank in range(1, self.size):
            parts = [
                _part(out, cut) for out, cut in zip(whole, self._cuts[rank], strict=True) if cut is not None
            ]
            sizes = [part.numel() for part in parts]
            if parts:
                room = torch.empty(sum(sizes))
                dist.recv(room, self._ranks[rank], self._host)
                for part, piece in zip(parts, torch.split(room, sizes), strict=True):
                    part.copy_(piece.view(part.shape))
        return whole

    def spread(self, whole: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        """Every rank's parameters <- their parts of the first rank's `whole`; buffers <- the first rank's."""
        with torch.no_grad():
            if self.rank == 0:
                for rank in range(1, self.size):
                    parts = [
                        _part(t.detach(), cut)
                        for t, cut in zip(whole, self._cuts[rank], strict=True)
                        if cut is not None
                    ]
                    if parts:
                        dist.send(
                            torch.cat([part.reshape(-1).float() for part in parts]),
                            self._ranks[rank],
                            self._host,
                        )
                for param, host, cut in zip(self._params, whole, self._cuts[0], strict=True):
                    _local(param.detach()).copy_(_part(host.detach(), cut or ()))
            else:
                mine = [_local(param.detach()) for param in self._params if isinstance(param, DTensor)]
                if mine:
                    sizes = [part.numel() for part in mine]
                    room = torch.empty(sum(sizes))
                    dist.recv(room, self._first, self._host)
                    for part, piece in zip(mine, torch.split(room, sizes), strict=True):
                        part.copy_(piece.view(part.shape))
            replicated = [param.detach() for param in self._params if not isinstance(param, DTensor)]
            for tensor in [*replicated, *buffers]:
                dist.broadcast(tensor, self._first, self._group)


class _Holder(frozen.FrozenDigest):
    """A model whose parameters are on the host, with the buffers of the first rank's."""

    def __init__(
        self, params: Sequence[nn.Parameter], buffers: Sequence[torch.Tensor], frozen_digest: str
    ) -> None:
        super().__init__()
        self.frozen = frozen_digest
        self.whole = nn.ParameterList(params)
        for index, buffer in enumerate(buffers):
            self.register_buffer(f"buffer_{index}", buffer)


def _check(inner: torch.optim.Optimizer, options: dict[str, Any]) -> None:
    if inner.state:
        raise ConfigurationError(
            "the optimizer has stepped before it was wrapped: build it anew, wrap it, then load_state_dict()"
        )
    if options.get("outer") is not None or options.get("offload_optimizer"):
        raise ConfigurationError(
            "node_group= keeps the optimizer in host memory by itself, and outer steps need it beside the "
            "model: leave outer= and offload_optimizer= out"
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of it."""
    if isinstance(tensor, DTensor):
        local: torch.Tensor = tensor.to_local()
        return local
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
