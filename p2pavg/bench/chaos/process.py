"""One process of the swarm of `bench chaos`, as the parent sees it."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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


def send_garbage(victim: SwarmProcess, noise: bytes, lab: Any) -> None:
    """Random bytes to the victim's TCP and UDP ports, from its own machine. lab: None: no lab is up."""
    host, _, port = victim.address.rpartition(":")
    if lab is not None:
        code = (
            "import socket,sys,os;h,p=sys.argv[1],int(sys.argv[2]);"
            "s=socket.create_connection((h,p),2);s.sendall(os.urandom(65536));s.close()"
        )
        spare = lab.spawn(victim.host, [sys.executable, "-c", code, host, port], stderr=subprocess.DEVNULL)
        threading.Thread(target=spare.wait, daemon=True).start()
        return
    try:
        with socket.create_connection((host, int(port)), 2.0) as stream:
            stream.sendall(noise)
    except OSError:
        pass  # the victim closed the connection, as it should
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.sendto(noise[:1200], (host, int(port)))
