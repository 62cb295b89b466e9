"""One process of the swarm of `bench chaos`, as the parent sees it."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path


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

    def stops_within(self, seconds: float) -> bool:
        """Wait until the kernel has stopped the process. A signal that came before would be followed by the
        stop, which nobody would end. False: it ended, or never stopped.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.process.poll() is None:
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "T":
                return True
            time.sleep(0.001)
        return False
