from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

pytestmark = [pytest.mark.swarm, pytest.mark.cold]
DEADLINE_S = 60.0
PR_SET_CHILD_SUBREAPER = 36


class Program:
    """A trainer with workers; killed at the end, with whatever it left."""

    def __init__(self, *initial_peers: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.swarm.loading", *initial_peers]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        facts = self.line()
        self.address: str = facts["address"]
        self.workers: list[int] = facts["workers"]

    def line(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def until(self, found: Callable[[Any], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not found(self.line()):
            assert time.monotonic() < deadline

    def end(self) -> None:
        for pid in (self.process.pid, *self.workers):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self.process.wait()


def sockets(pid: int) -> set[str]:
    """The TCP and UDP sockets that a process holds open, by inode."""
    network = set()
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        with open(f"/proc/net/{kind}", encoding="ascii") as table:
            network |= {f"socket:[{row.split()[9]}]" for row in table.readlines()[1:]}
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found & network


def gone(pid: int) -> bool:
    """Whether an orphan that fell to this process has ended; reaps it."""
    with suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    return not os.path.exists(f"/proc/{pid}")


@pytest.fixture
def programs() -> Any:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    started: list[Program] = []

    def start(*initial_peers: str) -> Program:
        started.append(Program(*initial_peers))
        return started[-1]

    yield start
    for program in started:
        program.end()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_workers_hold_no_socket_and_end_with_a_killed_trainer(programs: Any) -> None:
    """DataLoader workers share no socket with their trainer; after its SIGKILL its port is free at once, the
    other peer sees it gone, and the workers end.
    """
    first = programs()
    second = programs(first.address)
    second.until(lambda line: line["peers"] == 1)
    ours = sockets(second.process.pid)
    assert len(ours) >= 3  # it listens, has a table node and a link
    for worker in second.workers:
        assert not ours & sockets(worker)

    second.process.kill()
    second.process.wait()
    host, port = second.address.rsplit(":", 1)
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET, kind) as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind((host, int(port)))
    killed_at = time.monotonic()
    first.until(lambda line: line["peers"] == 0)
    assert time.monotonic() - killed_at < 10.0
    left = set(second.workers)
    while left and time.monotonic() < killed_at + DEADLINE_S:
        left = {pid for pid in left if not gone(pid)}
    assert not left


def test_workers_end_with_a_trainer_that_leaves(programs: Any) -> None:
    """A trainer with live workers closes: it exits with code 0, and its workers with it."""
    trainer = programs()
    trainer.process.stdin.close()
    assert trainer.process.wait(DEADLINE_S) == 0
    assert not any(os.path.exists(f"/proc/{pid}") for pid in trainer.workers)
