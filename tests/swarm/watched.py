"""A toy swarm that trains on, and a `p2pavg monitor` process beside it."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from p2pavg.bench.workers import START_DEADLINE_S, Worker, Workers

ROOT = Path(__file__).parents[2]
RUN = "bench-rounds"
DEADLINE_S = 60.0


class Monitor:
    """The lines that a monitor writes, as they come."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self._buffer = b""

    def until(self, seen: Callable[[dict[str, Any]], Any], deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """The first line from now on for which `seen` holds."""
        assert self.process.stdout is not None
        end = time.monotonic() + deadline_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while True:
                while b"\n" in self._buffer:
                    line, self._buffer = self._buffer.split(b"\n", 1)
                    self.lines.append(json.loads(line))
                    if seen(self.lines[-1]):
                        return self.lines[-1]
                assert selector.select(max(0.0, end - time.monotonic())), (
                    f"not seen within {deadline_s} s; last: {self.lines[-1:]}"
                )
                data = os.read(self.process.stdout.fileno(), 1 << 16)
                assert data, f"the monitor ended with code {self.process.wait()}"
                self._buffer += data


@contextmanager
def training(
    peers: int, *, step_seconds: float, target: int, client_only: int = 0, **environment: str
) -> Iterator[tuple[Workers, str]]:
    """A swarm of toy trainers, and the address of its first. They train until the end.

    client_only: so many more, to whom nobody can connect.
    """
    config = {"target": target, "step_seconds": step_seconds, "epochs": 10**6}
    with Workers(peers + client_only, "p2pavg.bench.rounds.worker", environment=environment) as workers:
        address = None
        for worker in workers.workers:
            named = [] if address is None else [address]
            hidden = worker.index >= peers
            worker.send(do="start", index=worker.index, initial_peers=named, client_only=hidden, **config)
            answer = worker.receive(START_DEADLINE_S)
            address = address or answer["address"]
        assert address is not None
        for worker in workers.workers:
            worker.send(do="train")
        try:
            yield workers, address
        finally:
            for worker in workers.workers:
                worker.process.kill()


@contextmanager
def monitor(address: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Monitor]:
    """`p2pavg monitor`, writing JSONL to its output."""
    command = [sys.executable, "-m", "p2pavg", "monitor", RUN, "--initial-peers", address, "--jsonl", "-"]
    process = subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, **(environment or {})}
    )
    try:
        yield Monitor(process)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def alive(line: Mapping[str, Any]) -> set[str]:
    """Peers that a line shows at work."""
    return {p["peer"] for p in line["peers"] if p["state"] not in ("gone", "silent", "no link")}


def kill(worker: Worker) -> float:
    """SIGKILL; when, by time.time()."""
    at = time.time()
    worker.process.kill()
    return at
