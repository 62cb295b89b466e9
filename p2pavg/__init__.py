"""p2pavg averages gradients between PyTorch processes that share nothing but the internet."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2pavg.codecs import Codec, StochasticInt8
    from p2pavg.data.sampler import SwarmSampler, SwarmShards
    from p2pavg.errors import P2PAvgError
    from p2pavg.optim.optimizer import CollaborativeOptimizer
    from p2pavg.optim.outer.settings import Outer
    from p2pavg.peer.peer import Peer
    from p2pavg.report import RoundReport

__version__ = "0.1.0"

__all__ = [
    "Codec",
    "CollaborativeOptimizer",
    "Outer",
    "P2PAvgError",
    "Peer",
    "RoundReport",
    "StochasticInt8",
    "SwarmSampler",
    "SwarmShards",
    "__version__",
]

_HOME = {
    "Codec": "p2pavg.codecs",
    "CollaborativeOptimizer": "p2pavg.optim.optimizer",
    "Outer": "p2pavg.optim.outer.settings",
    "P2PAvgError": "p2pavg.errors",
    "Peer": "p2pavg.peer.peer",
    "RoundReport": "p2pavg.report",
    "StochasticInt8": "p2pavg.codecs",
    "SwarmSampler": "p2pavg.data.sampler",
    "SwarmShards": "p2pavg.data.sampler",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line starts without torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
