"""One process of the swarm of `bench chaos`, as the parent sees it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass


@dataclass(slots=True)
class SwarmProcess:
    """One process of the swarm."""

    who: str
    host: str | None
    process: subprocess.Popen[bytes]
    own: dict[str, str]  # options of a Peer that are its own: `identity` or `credentials`
    address: str = ""
    peer: str = ""
    joined: bool = False
    finished: bool = False
    epoch: int = -1
    heard_at: float = 0.0
    stopped_until: float = 0.0
    leader: str = ""
    region: str = ""
    halted_for: str = ""  # what befalls it once it stops itself in the midst of a transfer
