"""One peer of `bench allreduce`: averages on command and measures itself."""

from __future__ import annotations

import asyncio
import hashlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from p2pavg.bench.options import codec_of
from p2pavg.bench.workers import serve, start_peer
from p2pavg.report import RoundReport

RUN_ID = "bench-allreduce"


class Beside:
    """A thread that computes all the time, as a training loop would, and counts its units of work."""

    def __init__(self, kind: str) -> None:
        """kind: "none", "python" or "torch"; returns when the first unit of work is done."""
        self.units = 0
        self._at_work, self._stopping = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        makers: dict[str, Callable[[], Callable[[], None]]] = {"python": _python, "torch": _torch}
        if kind in makers:
            self._thread = threading.Thread(target=self._run, args=(makers[kind],), daemon=True)
            self._thread.start()
            self._at_work.wait()

    def cpu_seconds(self) -> float:
        """CPU time of the thread so far; 0.0 without one, and where the system does not tell."""
        ident = None if self._thread is None else self._thread.ident
        if ident is None or not hasattr(time, "pthread_getcpuclockid"):
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(ident))

    def stop(self) -> None:
        """Stop before the interpreter ends, as a thread inside torch would crash the process then."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, make: Callable[[], Callable[[], None]]) -> None:
        work = make()
        while not self._stopping.is_set():
            work()
            self.units += 1
            self._at_work.set()


def _python() -> Callable[[], None]:
    def work() -> None:
        sum(i * i for i in range(1000))

    return work


def _torch() -> Callable[[], None]:
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    batch = torch.randn(64, 256)

    def work() -> None:
        model(batch).square().mean().backward()

    return work


class Averaging:
    """The worker's commands."""

    def __init__(self) -> None:
        self.beside = Beside("none")

    def start(self, config: dict[str, Any]) -> dict[str, Any]:
        """Join the swarm and make the vector."""
        self.config = config
        self.peers = config["peers"]
        self.peer = start_peer(
            RUN_ID,
            config,
            compression=codec_of(config["compression"]),
            streams=config["streams"],
            credentials=config.get("credentials"),
            max_upload_mbps=config.get("max_upload_mbps"),
            plan=config.get("plan", "auto"),
            prices=config.get("prices"),
            region=config["regions"][config["index"]] if "regions" in config else None,
        )
        self.base = np.random.default_rng(7).standard_normal(config["numel"], np.float32)
        self.vector = np.empty_like(self.base)
        self.beside = Beside(config["beside"])
        return {"address": self.peer.address, "peer": self.peer.peer_id.hex()}

    def fill(self, command: dict[str, Any]) -> dict[str, Any]:
        """Peer i holds (i + 1)·base, so that the mean is (N + 1)/2·base."""
        np.multiply(self.base, np.float32(self.config["index"] + 1), out=self.vector)
        return {}

    def rest(self, command: dict[str, Any]) -> dict[str, Any]:
        """Average nothing for some seconds, so that the other thread's work has the machine for itself."""
        cpu, units, start = self.beside.cpu_seconds(), self.beside.units, time.monotonic()
        time.sleep(command["seconds"])
        done, seconds = self.beside.units - units, time.monotonic() - start
        return {
            "beside_rate": done / seconds,
            "beside_units": done,
            "beside_cpu_seconds": self.beside.cpu_seconds() - cpu,
        }

    def round(self, command: dict[str, Any]) -> dict[str, Any]:
        """Average once."""
        memory = peak_reset()
        cpu, own, units = time.process_time(), self.peer.cpu_seconds(), self.beside.units
        beside, start = self.beside.cpu_seconds(), time.monotonic()
        report = asyncio.run(self.peer.all_reduce(self.vector, group_size=self.peers, timeout=300.0))
        seconds = time.monotonic() - start
        done, beside = self.beside.units - units, self.beside.cpu_seconds() - beside
        cpu, own = time.process_time() - cpu, self.peer.cpu_seconds() - own
        extra = max(0, peak() - memory)
        expected = np.float32((self.peers + 1) / 2)
        error = 0.0
        for at in range(0, self.vector.size, 1 << 20):
            piece = self.vector[at : at + (1 << 20)] - expected * self.base[at : at + (1 << 20)]
            error = max(error, float(np.abs(piece).max()))
        return {
            "seconds": seconds,
            "cpu_seconds": cpu,
            "averaging_cpu_seconds": own,
            "extra_memory_bytes": extra,
            "max_abs_error": error,
            "digest": hashlib.blake2b(self.vector.tobytes(), digest_size=16).hexdigest(),
            "beside_rate": done / seconds,
            "beside_units": done,
            "beside_cpu_seconds": beside,
            "engine": self.peer.engine_name,
            **_from_report(report),
        }


def _from_report(report: RoundReport) -> dict[str, Any]:
    return {
        "bytes_sent": report.bytes_sent,
        "links": [(link.peer, link.bytes_sent, link.rtt_s) for link in report.links],
        "wire_bytes_sent": report.wire_bytes_sent,
        "streams": max((link.streams for link in report.links), default=0),
        "attempts": report.attempts,
        "first_byte_at": report.first_byte_at,
        "last_byte_at": report.last_byte_at,
        "waiting": report.seconds_waiting,
        "matchmaking": report.seconds_matchmaking,
        "transfer": report.seconds_transfer,
        "commit": report.seconds_commit,
        "update": report.seconds_update,
    }


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


def peak_reset() -> int:
    """Reset the peak of memory; returns the resident bytes now."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return _status("VmHWM")
    return resident()


def resident() -> int:
    return _status("VmRSS")


def peak() -> int:
    return _status("VmHWM")


if __name__ == "__main__":
    worker = Averaging()
    ended = serve(worker.start, worker.fill, worker.rest, worker.round)
    worker.beside.stop()
    sys.exit(ended)
