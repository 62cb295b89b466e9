"""A snapshot as one byte string."""

from __future__ import annotations

import numpy as np

from p2pavg.rounds.state.manifest import U8, Packing
from p2pavg.rounds.training import Snapshot


def packed(snapshot: Snapshot) -> tuple[int, U8]:
    """(bytes of metadata, all bytes)."""
    packing = Packing(snapshot)
    blob = np.empty(packing.total_bytes, np.uint8)
    assert list(packing.copy_to(blob))
    return packing.meta_bytes, blob
