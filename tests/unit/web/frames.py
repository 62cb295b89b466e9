"""Frames for tests, as `Shown.to_dict` makes them."""

from __future__ import annotations

from typing import Any


def frame(at: float, peers: int = 1, **changes: Any) -> dict[str, Any]:
    """The state of a run at a time, with so many peers at work."""
    return {
        "at": at,
        "run_id": "run",
        "samples_per_second": 100.0,
        "loss": 2.0,
        "dollars_per_hour": None,
        "egress_bytes_per_hour": 5e9,
        "egress_by_distance": {"world": 5e9},
        "epoch": 7,
        "memory_bytes": 10**9,
        "peers": [
            {
                "peer": f"{number:040x}",
                "state": "computing",
                "samples_per_second": 50.0,
                "upload_bps": 1e8,
                "memory_bytes": 10**9,
            }
            for number in range(peers)
        ],
        "links": [],
        "rounds": [],
        "events": [],
        **changes,
    }


def round_of(epoch: int, at: float, peers: int = 2) -> dict[str, Any]:
    """A round with rows of its members."""
    rows = {f"{number:040x}": [10, 2.0, 1000, 1.0, 0.1, 0.1, 0.5, 0.1, 0.2, 0.0] for number in range(peers)}
    return {"epoch": epoch, "at": at, "seconds": 2.0, "phases": [1.0] * 7, "peers": rows}
