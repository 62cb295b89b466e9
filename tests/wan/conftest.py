"""Labs for tests, traffic on them, and measurements that are taken again when the router was late."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from p2pavg.lab import Lab
from p2pavg.lab.lab import ROUTER

TRAFFIC = Path(__file__).parent / "traffic.py"
T = TypeVar("T")
ATTEMPTS = 3


def why_no_lab() -> str | None:
    if not ROUTER.exists():
        return "the lab's router is not built (make native)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun cannot be opened by this user"
    return None


@pytest.fixture(autouse=True)
def _needs_lab() -> None:
    if reason := why_no_lab():
        pytest.skip(reason)


class CpuWatch:
    """Notices that programs here wait for a CPU: by how much longer than asked its own short sleeps take."""

    SLEEP_S = 0.01
    TOLERATED_SHARE = 0.1

    def __enter__(self) -> CpuWatch:
        self._done = threading.Event()
        self._waited = 0.0
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._share = self._waited / (time.monotonic() - self._begun)

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._done.wait(self.SLEEP_S):
            now = time.monotonic()
            self._waited += max(0.0, now - before - 2 * self.SLEEP_S)
            before = now

    def void_reason(self) -> str | None:
        return (
            f"waited {self._share:.0%} of the time for a CPU" if self._share > self.TOLERATED_SHARE else None
        )


class Traffic:
    """Runs tests/wan/traffic.py on the hosts of one lab."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    @staticmethod
    def argv(*args: object) -> list[str]:
        """The command line of traffic.py."""
        return [sys.executable, str(TRAFFIC), *map(str, args)]

    @contextmanager
    def server(self, host: str, *args: object) -> Iterator[subprocess.Popen[str]]:
        """A server, ready when the block begins and killed at its end."""
        process = self.lab.spawn(host, self.argv(*args), stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()
            process.wait()

    def client(self, host: str, *args: object, timeout: float = 60) -> dict[str, Any]:
        """Run a client to its end and return what it measured."""
        output = self.lab.run(host, self.argv(*args), timeout=timeout)
        return json.loads(output)

    def result(self, server: subprocess.Popen[str], timeout: float = 60) -> dict[str, Any]:
        """Wait for a server that ends by itself and return what it measured."""
        return json.loads(server.communicate(timeout=timeout)[0])

    def rtt_ms(self, a: str, b: str, count: int = 20) -> float:
        """The shortest of some round trips of small datagrams: others include the programs' waking up."""
        with self.server(b, "echo", 7):
            answer = self.client(a, "ping", self.lab.address(b), 7, count, 2000)
        assert answer["lost"] == 0
        return min(answer["rtts"])

    def tcp_mbps(
        self, pairs: list[tuple[str, str]], streams: int, *, skip_s: float = 2, seconds: float = 3
    ) -> list[dict[str, Any]]:
        """TCP goodput of pairs at the same time, each with so many streams."""
        with self._sinks(pairs, streams, skip_s, seconds) as sinks:
            senders = [
                self.lab.spawn(
                    src,
                    self.argv("tcp-send", self.lab.address(dst), 5000 + i, streams, 0),
                    stdout=subprocess.DEVNULL,
                )
                for i, (src, dst) in enumerate(pairs)
            ]
            results = [self.result(sink) for sink in sinks]
            for sender in senders:
                sender.kill()
        return results

    @contextmanager
    def _sinks(
        self, pairs: list[tuple[str, str]], streams: int, skip_s: float, seconds: float
    ) -> Iterator[list[subprocess.Popen[str]]]:
        sinks: list[subprocess.Popen[str]] = []
        contexts = [
            self.server(dst, "tcp-sink", 5000 + i, streams, skip_s, seconds)
            for i, (_, dst) in enumerate(pairs)
        ]
        try:
            sinks.extend(context.__enter__() for context in contexts)
            yield sinks
        finally:
            for context in contexts[: len(sinks)]:
                context.__exit__(None, None, None)

    def on_time(self, measure: Callable[[], T]) -> T:
        """Measure, again while the run is void; skip the test when the machine never was quiet enough."""
        reason: str | None = None
        for _ in range(ATTEMPTS):
            before = self.lab.stats()
            with CpuWatch() as watch:
                value = measure()
            reason = self.lab.void_reason(before) or watch.void_reason()
            if reason is None:
                return value
        pytest.skip(f"void {ATTEMPTS} times: {reason}")


@pytest.fixture
def traffic() -> Callable[[Lab], Traffic]:
    return Traffic
