"""Hivemind's optimizer around the models of the GPU benchmark, where it is installed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

NEVER = 10**15


@contextmanager
def wrapped(params: Iterable[torch.nn.Parameter], samples: int, reuse: bool) -> Iterator[Any]:
    """hivemind.Optimizer, alone in its swarm, with a target that is never reached. Raises ImportError.

    samples: per microbatch. reuse: its `reuse_grad_buffers`, which accumulates in `.grad` itself; without it
    (the default there) gradients are added to buffers of its own in every step().
    """
    import hivemind

    dht = hivemind.DHT(host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    try:
        optimizer = hivemind.Optimizer(
            dht=dht,
            run_id=f"bench-gpu-{random.getrandbits(64):x}",
            batch_size_per_step=samples,
            target_batch_size=NEVER,
            params=list(params),
            optimizer=lambda groups: torch.optim.SGD(groups, lr=0.0),
            grad_compression=hivemind.compression.Float16Compression(),
            reuse_grad_buffers=reuse,
        )
        try:
            yield optimizer
        finally:
            optimizer.shutdown()
    finally:
        dht.shutdown()


def clear(optimizer: Any) -> None:
    """What ends an epoch there."""
    optimizer.grad_averager.reset_accumulated_grads_()
