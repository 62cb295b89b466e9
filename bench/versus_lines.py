"""What the workers of `versus.py` share; plain Python, since they run in other systems' environments."""

from __future__ import annotations

import json
import os
import socket
import sys
import time


def serve(handlers):
    """One JSON command a line, {"do": name, ...}; one JSON answer a line, on what was stdout at the start."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other systems print
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = handlers[command.pop("do")](command) or {}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(answer) + "\n")
        out.flush()


def own_host():
    """Where others reach this process."""
    return os.environ.get("P2PAVG_LAB_ADDRESS", "127.0.0.1")


def free_port():
    """A TCP port that nobody uses now."""
    with socket.socket() as sock:
        sock.bind((own_host(), 0))
        return sock.getsockname()[1]


def timed(work):
    """(seconds, CPU seconds of the whole process) of work()."""
    cpu, start = time.process_time(), time.monotonic()
    work()
    return time.monotonic() - start, time.process_time() - cpu
