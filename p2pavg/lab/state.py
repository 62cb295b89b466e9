"""The state of running labs on disk, by which they are found by name, and taken down after a crash."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from p2pavg.errors import ConfigurationError, P2PAvgError

ENVIRONMENT_NAME = "P2PAVG_LAB"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")
_END_S = 10.0


@dataclass(frozen=True)
class HostState:
    """A host: its addresses, and its network namespace as the router holds it."""

    address: str  # IPv4; "": none
    address6: str
    fd: int
    inode: int


@dataclass(frozen=True)
class LabState:
    """A router's process and the hosts that it holds."""

    pid: int
    start: (
        int  # start time in clock ticks since boot, which distinguishes the process from later ones of its id
    )
    priority: str
    hosts: Mapping[str, HostState]

    def alive(self) -> bool:
        return start_time(self.pid) == self.start


def start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None for an unused id and for a zombie."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else int(words[19])


def real_uid() -> int:
    """The user's id outside of the innermost user namespace, so that both sides find the same labs."""
    inside, outside, _ = (int(word) for word in Path("/proc/self/uid_map").read_text().split()[:3])
    return os.getuid() - inside + outside


def root_directory() -> Path:
    """The directory that has one sub-directory for each lab of this user, made when missing.

    Raises P2PAvgError when another user owns it.
    """
    path = Path(f"/tmp/p2pavg-lab-{real_uid()}")
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not path.is_dir() or path.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise P2PAvgError(f"{path} is not a private directory of yours; remove it first.")
    return path


def directory(name: str) -> Path:
    """The directory of the lab `name`. Raises ConfigurationError for an impossible name."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"Bad lab name {name!r}: use up to 60 letters, digits, '.', '_' and '-'.")
    return root_directory() / name


def names() -> list[str]:
    """Names of this user's labs, running or crashed."""
    return sorted(entry.name for entry in root_directory().iterdir() if entry.is_dir())


def read(name: str) -> LabState | None:
    """The state of a lab, running or crashed; None when it was never up, or went down in order."""
    try:
        document = json.loads((directory(name) / "state.json").read_text())
    except FileNotFoundError:
        return None
    hosts = {
        host["name"]: HostState(host["address"], host["address6"], host["fd"], host["inode"])
        for host in document["hosts"]
    }
    return LabState(document["pid"], document["start"], document["priority"], hosts)


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Hold the lock under which labs come up and crashed ones are removed."""
    fd = os.open(root_directory(), os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def wait_ended(pid: int, start: int, timeout: float = _END_S) -> bool:
    """Wait until a process, which need not be a child, has ended; False on timeout."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return start_time(pid) != start or bool(select.select([fd], [], [], timeout)[0])
    finally:
        os.close(fd)


def reclaim(name: str) -> bool:
    """Take down the remains of a lab: its router, the processes in its hosts, its directory; nothing else.

    Returns whether anything remained. Call this under `exclusive()` unless the lab is the caller's own.
    """
    path = directory(name)
    state = read(name)
    if state is not None:
        if state.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(state.pid, signal.SIGTERM)
            if not wait_ended(state.pid, state.start) and state.alive():
                os.kill(state.pid, signal.SIGKILL)
                wait_ended(state.pid, state.start)
        _kill_left(name, {host.inode for host in state.hosts.values()})
    there = path.exists()
    shutil.rmtree(path, ignore_errors=True)
    return there or state is not None


def _kill_left(name: str, inodes: set[int]) -> None:
    """Kill processes of the lab that outlived its router.

    The number of a namespace may have been used again, so the lab's name in the environment must agree as
    well.
    """
    mark = f"{ENVIRONMENT_NAME}={name}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            pidfd = os.pidfd_open(int(entry.name))
        except OSError:
            continue
        try:
            inside = os.stat(entry / "ns" / "net").st_ino in inodes
            if inside and mark in (entry / "environ").read_bytes().split(b"\0"):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except OSError:
            continue
        finally:
            os.close(pidfd)
