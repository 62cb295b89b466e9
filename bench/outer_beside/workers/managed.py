"""torchft's Manager of one replica that is a single process. Imported where torchft is installed."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo


def managed(
    model: torch.nn.Module,
    inner: torch.optim.Optimizer,
    host: str,
    lighthouse: str,
    rank: int,
    seconds: float,
) -> tuple[Manager, TCPStore]:
    """The manager, and its store, whose server ends with the object.

    host: an address of this machine that the others reach. seconds: every timeout.
    """
    timeout = timedelta(seconds=seconds)
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=lambda state: (
            model.load_state_dict(state["model"]),
            inner.load_state_dict(state["inner"]),
        ),
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timeout,
        quorum_timeout=timeout,
        connect_timeout=timeout,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica{rank}",
        hostname=host,
    )
    return manager, store
