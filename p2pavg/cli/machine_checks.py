"""What `p2pavg doctor` looks at on this machine: each check says what there is, and what to do about it."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from p2pavg import native
from p2pavg.membership.reach.gateway import default_gateway
from p2pavg.membership.table.address import interface_addresses, is_loopback
from p2pavg.peer.settings import DEFAULT_PORT

LEAST_BUFFER = 4 << 20  # bytes of a socket: 16 streams of these fill 1 Gb/s over a round trip of 0.5 s
LEAST_FILES = 4096  # a peer of 32 members holds up to 128 streams for each
LEAST_DISK = 2 << 30  # for results that wait for a newcomer
_ADJTIMEX_UNSYNCHRONISED = 5


class CheckResult(StrEnum):
    """How a check came out."""

    GOOD = "good"
    SLOW = "could be better"
    BAD = "wrong"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing of this machine. advice: what to do, where something can be done."""

    name: str
    state: CheckResult
    found: str
    advice: str = ""


def checks(port: int = DEFAULT_PORT) -> Iterator[Check]:
    """All of them, in the order in which they matter."""
    yield modules()
    yield torch_and_gpu()
    yield from ports(port)
    yield addresses()
    yield clock()
    yield buffers()
    yield idle_streams()
    yield open_files()
    yield disk()


def modules() -> Check:
    """The compiled kernels and the pump."""
    if native.available():
        return Check("native module", CheckResult.GOOD, f"loaded, {native.compiled.isa()}")
    if native.stale():
        return Check(
            "native module",
            CheckResult.SLOW,
            "built of other sources than csrc/ now holds: the Python twin averages, several times slower",
            "run 'make native'",
        )
    return Check(
        "native module",
        CheckResult.SLOW,
        "not there: the Python twin averages, several times slower",
        "install a wheel for this platform, or install from source where there is a C++ compiler",
    )


def torch_and_gpu() -> Check:
    """PyTorch, and whether it and p2pavg use the GPU that is here."""
    import torch

    name = f"torch {torch.__version__}"
    if torch.cuda.is_available():
        device = f"{name}, {torch.cuda.get_device_name()}"
        if native.cuda() is not None:
            return Check("torch and GPU", CheckResult.GOOD, device)
        return Check(
            "torch and GPU",
            CheckResult.SLOW,
            f"{device}, but p2pavg was built without CUDA: gradients are encoded on the CPU",
            "install from source where nvcc is on the PATH",
        )
    if native.NVIDIA.exists():
        return Check(
            "torch and GPU",
            CheckResult.BAD,
            f"{name} does not use the GPU that is here",
            "install a build of torch for CUDA",
        )
    return Check("torch and GPU", CheckResult.GOOD, f"{name}, no GPU")


def ports(port: int) -> Iterator[Check]:
    """Whether a peer can have its port."""
    for kind, word in ((socket.SOCK_STREAM, "TCP"), (socket.SOCK_DGRAM, "UDP")):
        with socket.socket(socket.AF_INET, kind) as trial:
            if kind == socket.SOCK_STREAM:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(("0.0.0.0", port))
            except OSError as error:
                yield Check(
                    f"{word} port {port}",
                    CheckResult.SLOW,
                    f"cannot be had: {error.strerror}",
                    "a peer takes the next free port: open that one, or end what has this one",
                )
                continue
        yield Check(f"{word} port {port}", CheckResult.GOOD, "free")


def addresses() -> Check:
    """Whether others may find this machine. Only a member can tell for certain."""
    told = [address for address in interface_addresses() if not is_loopback(address)]
    gateway = default_gateway()
    ask = "'p2pavg doctor HOST:PORT' with any member's address tells how others reach this machine"
    if not told:
        return Check("addresses", CheckResult.BAD, "none but loopback", "connect this machine to a network")
    found = ", ".join(told) + (f"; gateway {gateway}" if gateway else "")
    return Check("addresses", CheckResult.UNKNOWN, found, ask)


def clock() -> Check:
    """Whether the kernel's clock is kept by somebody: certificates begin and end by it."""
    state = _clock_state()
    if state is None:
        return Check("clock", CheckResult.UNKNOWN, "this system does not tell whether it is synchronised")
    if state == _ADJTIMEX_UNSYNCHRONISED:
        return Check(
            "clock",
            CheckResult.SLOW,
            "nothing synchronises it",
            "run chrony or systemd-timesyncd: in closed runs a clock that is wrong by a day keeps peers out",
        )
    return Check("clock", CheckResult.GOOD, "synchronised")


def _clock_state(library: str | None = None) -> int | None:
    """What adjtimex(2) returns, where there is one."""
    try:
        call: Callable[[object], int] = ctypes.CDLL(library).adjtimex
    except (OSError, AttributeError):
        return None
    state = call(ctypes.create_string_buffer(512))  # struct timex, zeroed: reads and sets nothing
    return state if state >= 0 else None


def buffers(settings: Path = Path("/proc/sys/net/ipv4")) -> Check:
    """Whether windows may grow as large as long links need."""
    try:
        most = {name: int((settings / name).read_text().split()[-1]) for name in ("tcp_rmem", "tcp_wmem")}
    except (OSError, ValueError, IndexError):
        return Check("TCP buffers", CheckResult.UNKNOWN, "this system does not tell")
    found = ", ".join(f"{name} up to {size / 2**20:.1f} MiB" for name, size in most.items())
    small = [name for name, size in most.items() if size < LEAST_BUFFER]
    if small:
        wanted = " ".join(f"net.ipv4.{name}='4096 131072 16777216'" for name in small)
        return Check("TCP buffers", CheckResult.SLOW, found, f"for links above 50 ms: sysctl -w {wanted}")
    return Check("TCP buffers", CheckResult.GOOD, found)


def idle_streams(settings: Path = Path("/proc/sys/net/ipv4")) -> Check:
    """Whether a stream keeps its window while nothing is sent, as between two rounds."""
    try:
        shrinks = (settings / "tcp_slow_start_after_idle").read_text().strip() != "0"
    except OSError:
        return Check(
            "idle streams", CheckResult.UNKNOWN, "this system does not tell what becomes of their windows"
        )
    if shrinks:
        return Check(
            "idle streams",
            CheckResult.SLOW,
            "their windows shrink between rounds",
            "for links above 50 ms: sysctl -w net.ipv4.tcp_slow_start_after_idle=0",
        )
    return Check("idle streams", CheckResult.GOOD, "they keep their windows")


def open_files() -> Check:
    """How many sockets a process may hold."""
    try:
        import resource
    except ImportError:
        return Check("open files", CheckResult.UNKNOWN, "this system does not tell")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        return Check(
            "open files",
            CheckResult.SLOW,
            f"at most {soft}",
            f"ulimit -n {LEAST_FILES} before a peer of a large swarm",
        )
    return Check("open files", CheckResult.GOOD, "enough")


def disk() -> Check:
    """Room for results that wait while a newcomer downloads."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    found = f"{free / 1e9:.1f} GB free in {folder}"
    if free < LEAST_DISK:
        return Check("disk", CheckResult.SLOW, found, "make room, or set TMPDIR to a larger disk")
    if not os.access(folder, os.W_OK):
        return Check(
            "disk", CheckResult.BAD, f"{folder} cannot be written", "set TMPDIR to a folder that can"
        )
    return Check("disk", CheckResult.GOOD, found)
