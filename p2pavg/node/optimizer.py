"""NodeOptimizer: what each rank of a node steps, and how the first one tells the others what came of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from p2pavg.errors import ConfigurationError, P2PAvgError
from p2pavg.kinds import MOST_SAMPLES, check_whole
from p2pavg.node.shards import ParameterShards, local
from p2pavg.optim import frozen
from p2pavg.optim.arguments import check_closure
from p2pavg.optim.gradients.accumulation import EMPTY
from p2pavg.optim.modules import owning_modules, persistent_buffers
from p2pavg.optim.optimizer import CollaborativeOptimizer
from p2pavg.optim.training_state import parameters_of
from p2pavg.peer.peer import Peer

log = logging.getLogger("p2pavg.node")

GOES_ON, BOUNDARY, DROPPED, FAILED = range(4)  # what the first rank tells the others
HALF = (torch.float16, torch.bfloat16)


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
        self._size = dist.get_world_size(node_group)
        self._shards = ParameterShards(self._params, node_group)
        self._sums: list[torch.Tensor | None] = [None] * len(self._params)
        modules = [options["model"]] if options.get("model") is not None else owning_modules(self._params)
        self._buffers = persistent_buffers(modules)
        self._frozen = frozen.digest(modules, self._params)  # of sharded ones by all ranks together
        self._whole: list[nn.Parameter] = []  # what the first rank steps on
        self._noted = 0  # samples whose gradients are in the sums
        self._told = False  # of a step without a gradient
        self.epoch = -1
        self.stepped = False
        self.collaborative: CollaborativeOptimizer | None = None  # on the first rank
        whole = self._wholes()
        self._prepare(options)
        self._conduct(lambda: self._join(whole, options))
        self._mirror()

    def _mirror(self) -> None:
        """Show the groups of what steps as this one's own: a loop may set rates in them on all ranks."""
        steps = self.inner if self.collaborative is None else self.collaborative
        self.param_groups, self.defaults = steps.param_groups, steps.defaults

    def _prepare(self, options: dict[str, Any]) -> None:
        """On every rank, before the first one enters the swarm."""

    def _wholes(self) -> list[torch.Tensor] | None:
        """The whole parameters, on the first rank: replicated ones in their own memory."""
        own = self._shards.own()
        if self._shards.sharded:
            return self._shards.gather(own)
        return own if self._shards.rank == 0 else None

    def _join(self, whole: list[torch.Tensor] | None, options: dict[str, Any]) -> None:
        """Enter the swarm, with parameters in the place of the model's whose `.grad` nobody else takes."""
        _check(self.inner, options, self._shards.sharded)
        assert whole is not None
        self._whole = [
            nn.Parameter(value.to(param.dtype), param.requires_grad)
            for value, param in zip(whole, self._params, strict=True)
        ]
        mine = {id(param): host for param, host in zip(self._params, self._whole, strict=True)}
        for group in self.inner.param_groups:
            group["params"] = [mine[id(param)] for param in group["params"]]
        told: dict[str, Any] = {
            "model": _Holder(self._whole, self._buffers, self._frozen),
            "loss_reduction": "sum",
        }
        half = options.get("grad_dtype") is None and options.get("outer") is None
        if half and any(param.dtype in HALF for param in self._whole):
            told["grad_dtype"] = torch.float32  # sums over many steps
        self.collaborative = CollaborativeOptimizer(self.inner, **{**options, **told})

    # ------------------------------------------------------------------------------------ the training loop

    def step(self, closure: Callable[[], Any] | None = None, batch_size: int | None = None) -> Any:
        """End a step of this rank, of `batch_size` samples: average with the swarm when it is time.

        Returns the closure's loss.
        """
        loss = None
        if closure is not None:
            check_closure(closure)
            with torch.enable_grad():
                loss = closure()
        samples = self._samples if batch_size is None else batch_size
        if samples is None:
            raise ConfigurationError(
                "step() does not know its samples: pass batch_size_per_step or batch_size="
            )
        check_whole("the samples of a step", samples, 1, MOST_SAMPLES)
        before = self.epoch
        self._count(samples * self._size)
        self.stepped = self.epoch != before
        return loss

    def _count(self, samples: int) -> None:
        due, gradients = False, self._gradients()
        if not self._told and all(grad is None for grad in gradients):
            self._told = True
            log.warning(EMPTY)
        self._noted += samples
        if self._shards.sharded:
            self._collect(gradients, samples)

        def note() -> None:
            nonlocal due
            assert self.collaborative is not None
            due = self.collaborative.note(samples, None if self._shards.sharded else gradients)

        def said() -> int:
            assert self.collaborative is not None
            if self.collaborative.noted < self._noted:
                return DROPPED  # another state was loaded: what was summed belongs to the one before
            return BOUNDARY if due else GOES_ON

        word = self._conduct(note, said)
        if word == GOES_ON:
            return
        self._noted = 0
        sums = self._taken() if self._shards.sharded else None
        if word == DROPPED:
            self._conduct(self._drop)
        else:
            whole = None if sums is None else self._shards.gather(sums)
            self._conduct(lambda: self._meet(whole))

    def _drop(self) -> None:
        assert self.collaborative is not None
        self.collaborative.discard()

    def _meet(self, sums: list[torch.Tensor] | None) -> None:
        assert self.collaborative is not None
        self.collaborative.meet(None if sums is None else [total if total.any() else None for total in sums])

    def _gradients(self) -> list[torch.Tensor | None]:
        """This rank's gradients, which leave the parameters."""
        found = [None if param.grad is None else local(param.grad) for param in self._params]
        for param in self._params:
            param.grad = None
        return found

    def _collect(self, gradients: Sequence[torch.Tensor | None], samples: int) -> None:
        """sums += gradient * samples, of this rank's shards."""
        with torch.no_grad():
            for index, grad in enumerate(gradients):
                if grad is None:
                    continue
                total = self._sums[index]
                if total is None:
                    self._sums[index] = grad.to(torch.float32, copy=True).mul_(samples)
                else:
                    total.add_(grad, alpha=samples)

    def _taken(self) -> list[torch.Tensor]:
        """The sums, which begin anew."""
        found = [
            torch.zeros_like(mine, dtype=torch.float32) if total is None else total
            for mine, total in zip(self._shards.own(), self._sums, strict=True)
        ]
        self._sums = [None] * len(self._params)
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Harmless: step() has taken the gradients."""

    def _conduct(self, work: Callable[[], None], said: Callable[[], int] = lambda: GOES_ON) -> int:
        """The first rank works, and tells the others what came of it: where it brought the parameters to
        another epoch, all get them. Raises on all ranks when the work raised. Returns the word.
        """
        word, failure = GOES_ON, None
        if self._shards.rank == 0:
            try:
                work()
                word = said()
            except BaseException as error:
                word, failure = FAILED, error
        word, noted, *standing = self._shards.tell(word, self._noted, *self._standing())
        if failure is not None:
            raise failure
        if word == FAILED:
            raise P2PAvgError("the peer of this node failed on its first rank, whose error says why")
        if noted != self._noted:
            raise ConfigurationError(
                f"the steps of this rank have {self._noted // self._size} samples and those of the first one "
                f"{noted // self._size}: all ranks take batches of one size, DataLoader(drop_last=True)"
            )
        self._follow(*standing)
        return word

    def _standing(self) -> tuple[int, ...]:
        """Where the first rank stands, as `_follow` takes it; on others anything, of the same length."""
        return (self.collaborative.epoch if self.collaborative is not None else -1,)

    def _follow(self, epoch: int) -> None:
        """Bring this rank to where the first one stands."""
        if epoch != self.epoch:
            self._shards.spread(self._whole, self._buffers)
            self.epoch = epoch

    # ------------------------------------------------------------------------------ what an optimizer has

    @property
    def peer(self) -> Peer | None:
        """The node's place in the swarm, on the first rank."""
        return None if self.collaborative is None else self.collaborative.peer

    def log(self, **figures: float) -> None:
        """As `CollaborativeOptimizer.log`, of the first rank; what other ranks log counts for nothing."""
        if self.collaborative is not None:
            self.collaborative.log(**figures)

    def state_dict(self) -> dict[str, Any]:
        """The run's state on the first rank; on the others nothing: {}."""
        return {} if self.collaborative is None else self.collaborative.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the run's state, which the first rank has; all ranks call it, after they loaded the model."""
        whole = self._wholes()

        def load() -> None:
            assert self.collaborative is not None
            assert whole is not None
            if not self.collaborative.stands_at(state_dict):  # else the ranks may be an epoch behind
                with torch.no_grad():
                    for mine, value in zip(self._whole, whole, strict=True):
                        if mine.data_ptr() != value.data_ptr():
                            mine.copy_(value)
            self.collaborative.load_state_dict(state_dict)

        self.epoch, self._noted = -1, 0
        self._conduct(load)
        self._mirror()

    def close(self) -> None:
        """Leave the swarm. All ranks call it, and go on when the first one has left."""
        self._leave()
        with suppress(RuntimeError):  # a rank is gone
            self._shards.tell(GOES_ON, self._noted, self.epoch)

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


class _Holder(frozen.FrozenDigest):
    """A model of the whole parameters, with the buffers of the first rank's."""

    def __init__(
        self, params: Sequence[nn.Parameter], buffers: Sequence[torch.Tensor], frozen_digest: str
    ) -> None:
        super().__init__()
        self.frozen = frozen_digest
        self.whole = nn.ParameterList(params)
        for index, buffer in enumerate(buffers):
            self.register_buffer(f"buffer_{index}", buffer)


def _check(inner: torch.optim.Optimizer, options: dict[str, Any], sharded: bool) -> None:
    if options.get("outer") is not None and options.get("offload_optimizer"):
        raise ConfigurationError(
            "node_group= with outer steps keeps each rank's optimizer beside the rank's parameters: leave "
            "offload_optimizer= out, and shard a model that does not fit (FSDP)"
        )
    if inner.state:
        raise ConfigurationError(
            "the optimizer has stepped before it was wrapped: build it anew, wrap it, then load_state_dict()"
        )
    if sharded and options.get("offload_optimizer"):
        raise ConfigurationError(
            "node_group= keeps the optimizer of a sharded model in host memory by itself: leave "
            "offload_optimizer= out"
        )
