"""A node as one peer: ranks that train together with DDP, FSDP2 or a DeviceMesh, one of them in the swarm.

`CollaborativeOptimizer(inner, …, node_group=group)` on every rank is a NodeOptimizer. Whatever wraps the
model averages gradients within the node. At a boundary the first rank of the group takes them, meets the
swarm, steps, and gives the parameters back.

Of a replicated model the first rank has all of this on its own device: it sums, encodes and steps there as
a single peer does, and broadcasts the parameters. Of a sharded model it keeps the whole parameters and the
optimizer's state in host memory; every rank sends and gets its own shards, and no device ever holds the
whole.

With outer steps every rank steps its own part of the model at once, and only how far the node moved goes
through the first rank (`outer`). Start at `optimizer_of`. May import every floor below.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from p2pavg.errors import ConfigurationError
from p2pavg.kinds import check, seen
from p2pavg.node.optimizer import NodeOptimizer
from p2pavg.node.outer import OuterNode
from p2pavg.optim.arguments import check_optimizer


def optimizer_of(inner: torch.optim.Optimizer, group: dist.ProcessGroup, **options: Any) -> NodeOptimizer:
    """The optimizer of one rank of a node. options: those of CollaborativeOptimizer.

    Raises ConfigurationError for what cannot work.
    """
    check_optimizer(inner)
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigurationError(
            "node_group must be a torch.distributed group whose ranks are one peer, such as "
            f"torch.distributed.group.WORLD, not {seen(group)}"
        )
    if options.get("model") is not None:
        check("model", options["model"], torch.nn.Module)
    kind = NodeOptimizer if options.get("outer") is None else OuterNode
    return kind(inner, group, **options)
