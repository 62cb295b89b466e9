"""What the workers of `bench.versus` share; plain Python, since they run in other systems' environments."""

from __future__ import annotations

import fcntl
import json
import os
import random
import socket
import struct
import sys
import time
from pathlib import Path


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


def interface_of(address):
    """The name of the network interface that has this address; the loopback's where none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                raw = fcntl.ioctl(sock, 0x8915, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(raw[20:24]) == address:
                return name
    return "lo"


def free_port():
    """A TCP port that nobody uses now, and that the system gives to nobody who asks for any port."""
    last = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10000, last)
        with socket.socket() as sock:
            try:
                sock.bind((own_host(), port))
            except OSError:
                continue
            return port


def timed(work):
    """(seconds, CPU seconds of the whole process) of work()."""
    cpu, start = time.process_time(), time.monotonic()
    work()
    return time.monotonic() - start, time.process_time() - cpu


def children_cpu_seconds():
    """CPU seconds so far of all living processes that descend from this one."""
    parents, used = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        pid = int(path.parent.name)
        parents[pid], used[pid] = int(fields[1]), int(fields[11]) + int(fields[12])

    def descends(pid):
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    ticks = sum(used[pid] for pid in parents if pid != os.getpid() and descends(pid))
    return ticks / os.sysconf("SC_CLK_TCK")
