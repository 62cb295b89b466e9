"""TrainingOptions: what a user may say of a CollaborativeOptimizer, checked before anything is built."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from p2pavg import codecs, kinds
from p2pavg.data.sampler import SwarmSampler, SwarmShards
from p2pavg.errors import ConfigurationError
from p2pavg.optim import arguments, preflight
from p2pavg.optim.outer.settings import Outer, outer_of
from p2pavg.optim.resume import Stateful, check_fresh
from p2pavg.peer.settings import PeerOptions, Settings, check_rate


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingOptions(PeerOptions):
    """The options of `CollaborativeOptimizer`: its own, and those that it hands to its `Peer`.

    Raises ConfigurationError for options that cannot work, alone or together, those of the peer among them,
    and CredentialError for credentials that cannot.
    """

    optimizer: torch.optim.Optimizer = field(kw_only=False)
    run_id: str = field(kw_only=False)
    target_batch_size: int | str | None = field(default=None, kw_only=False)
    batch_size_per_step: int | None = field(default=None, kw_only=False)
    scheduler: LRScheduler | None = None
    delay_updates: bool = False
    offload_optimizer: bool = False
    delay_warmup_epochs: int = 1
    loss_reduction: str = "mean"
    max_grad_norm: float | None = None
    grad_dtype: torch.dtype | None = None
    resync_epochs: int | None = None
    buffers: str = "average"
    max_state_upload_mbps: float | None = None
    max_egress_usd_per_hour: float | None = None
    checkpoint_dir: str | os.PathLike[str] | None = None
    checkpoint_epochs: int | None = None
    leave_notice_s: float = 30
    spot_notices: bool | None = None
    model: nn.Module | None = None
    extras: Mapping[str, Stateful] | None = None
    sampler: SwarmSampler | SwarmShards | None = None
    outer: Outer | str | None = None
    node_group: object = None

    def __post_init__(self) -> None:
        arguments.check_optimizer(self.optimizer)
        arguments.check_run_id(self.run_id)
        outer = outer_of(self.outer)
        if outer is None or outer.sync_every is None:
            arguments.check_sizes(self.target_batch_size, self.batch_size_per_step)
        else:
            arguments.check_sync(self.target_batch_size, self.batch_size_per_step, outer.sync_every)
        arguments.check_scheduler(self.scheduler, self.optimizer)
        arguments.check_reduction(self.loss_reduction)
        arguments.check_clipping(self.max_grad_norm)
        arguments.check_warmup(self.delay_warmup_epochs)
        arguments.check_grad_dtype(self.grad_dtype)
        arguments.check_resync(self.resync_epochs)
        arguments.check_buffers(self.buffers)
        arguments.check_notice(self.leave_notice_s)
        codecs.get(self.compression)
        kinds.check_fields(self, TrainingOptions)
        arguments.check_extras(self.extras or {})
        if self.spot_notices:
            raise ConfigurationError("spot_notices must be None or False, not True")
        if self.checkpoint_dir is None:
            object.__setattr__(self, "checkpoint_dir", os.environ.get("P2PAVG_CHECKPOINTS") or None)
        arguments.check_checkpoints(self.checkpoint_dir, self.checkpoint_epochs)
        check_fresh(self.optimizer, self.run_id)
        check_rate("max_state_upload_mbps", self.max_state_upload_mbps)
        arguments.check_spending(self.max_egress_usd_per_hour, self.prices)
        if self.lockstep:
            behind = {"delay_updates": self.delay_updates, "offload_optimizer": self.offload_optimizer}
            limit = self.max_egress_usd_per_hour
            arguments.check_lockstep(outer=self.outer, max_egress_usd_per_hour=limit, **behind)
        if outer is not None and outer.density is not None:
            arguments.check_sparse(
                compression=None if self.compression == PeerOptions.compression else self.compression,
                plan=None if self.plan == PeerOptions.plan else self.plan,
            )
            object.__setattr__(self, "compression", codecs.sparse_of(outer.density))
        if outer is not None:
            arguments.check_overlap(outer.overlap, self.target_with(1), self.batch_size_per_step)
            arguments.check_outer(
                delay_updates=self.delay_updates,
                resync_epochs=self.resync_epochs,
                grad_dtype=self.grad_dtype,
            )
        Settings(self.run_id, **self.shared())
        if self.offload_optimizer:
            preflight.check(
                self.optimizer, self.compression, self.grad_dtype, delayed=self.delay_updates, outer=outer
            )

    @property
    def lockstep(self) -> bool:
        """Whether one step() of each peer present is an epoch."""
        return self.target_batch_size == arguments.LOCKSTEP

    @property
    def target(self) -> int | None:
        """Samples of an epoch, which with fragments is the step of one; None: in lockstep."""
        if self.lockstep:
            return None
        return self.target_with(1)

    def target_with(self, peers: int) -> int:
        """Samples of an epoch of so many peers, of which only Outer(sync_every=) takes account."""
        outer, samples = outer_of(self.outer), self.target_batch_size
        if outer is not None and outer.sync_every is not None:
            samples = outer.sync_every * (self.batch_size_per_step or 1) * peers
        assert isinstance(samples, int)
        return samples if outer is None else -(-samples // outer.fragments)

    def followed_terms(self) -> dict[str, int | str]:
        """What peers must share where the samples of an epoch follow the peers."""
        outer = outer_of(self.outer)
        if outer is None or outer.sync_every is None:
            return {}
        return {"target_batch_size": f"{outer.sync_every} steps of {self.batch_size_per_step} a peer"}

    @property
    def follows_peers(self) -> bool:
        """Whether the samples of an epoch grow with the peers present."""
        outer = outer_of(self.outer)
        return outer is not None and outer.sync_every is not None

    @property
    def state_upload_bps(self) -> float | None:
        """Most bit/s that newcomers get of this peer's upload; None: no such limit."""
        return None if self.max_state_upload_mbps is None else 1e6 * self.max_state_upload_mbps
