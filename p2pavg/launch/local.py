"""Peers as processes of this machine, behind a bootstrap node, and what all of them say as one stream."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TextIO

from p2pavg.bench.machine import usable_cores
from p2pavg.errors import P2PAvgError
from p2pavg.printable import counted

STARTED_S = 30.0  # for the bootstrap node to say its address
LEFT = (-signal.SIGTERM, 128 + signal.SIGTERM)  # how a process ends that was asked to
KILLED_AFTER_S = 60.0  # a peer that was asked to leave and has not: more than the default notice


class Local:
    """Runs a script as several peers until all of them have ended."""

    def __init__(self, script: Path, arguments: Sequence[str], peers: int) -> None:
        self._command = [sys.executable, str(script), *arguments]
        self._count = peers
        self._peers: list[subprocess.Popen[str]] = []
        self._printing = threading.Lock()
        self._leaving = threading.Event()

    def run(self) -> int:
        """The exit code: 0 when every peer ended with 0, else that of the first that did not."""
        before = {number: signal.signal(number, self._leave) for number in (signal.SIGINT, signal.SIGTERM)}
        bootstrap, address = _bootstrap()
        try:
            for number in range(self._count):
                self._peers.append(self._start(address))
                threading.Thread(
                    target=self._show, args=(number + 1, self._peers[number]), daemon=True
                ).start()
            self._say(f"{counted(self._count, 'peer')}; others on this machine join at {address}")
            codes = [self._code(peer) for peer in self._peers]
            for number, code in enumerate(codes, 1):
                if code:
                    self._say(f"ended with exit code {code}", f"[{number}] ")
        finally:
            for process in (*self._peers, bootstrap):
                if process.poll() is None:
                    process.terminate()
                    process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
        return next((code for code in codes if code), 0)

    def _start(self, address: str) -> subprocess.Popen[str]:
        threads = str(max(1, usable_cores() // self._count))
        environment = {"OMP_NUM_THREADS": threads, **os.environ}  # what the user says counts
        return subprocess.Popen(
            self._command,
            env={
                **environment,
                "P2PAVG_INITIAL_PEERS": address,
                "P2PAVG_PEERS": str(self._count),
                "PYTHONUNBUFFERED": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C comes here, and asks each of them to leave once
        )

    def _show(self, number: int, peer: subprocess.Popen[str]) -> None:
        assert peer.stdout is not None
        for line in peer.stdout:
            self._say(line.rstrip("\n"), f"[{number}] ")

    def _say(self, text: str, before: str = "", to: TextIO = sys.stdout) -> None:
        with self._printing:
            print(f"{before}{text}", file=to, flush=True)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        """Ask all peers to leave; asked again, end them."""
        again = self._leaving.is_set()
        self._leaving.set()
        for peer in self._peers:
            if peer.poll() is None:
                peer.send_signal(signal.SIGKILL if again else signal.SIGTERM)

    def _code(self, peer: subprocess.Popen[str]) -> int:
        """How a peer ended; one that was asked to leave may take its notice for that."""
        while peer.poll() is None and not self._leaving.wait(0.1):
            pass
        try:
            code = peer.wait(KILLED_AFTER_S if self._leaving.is_set() else None)
        except subprocess.TimeoutExpired:
            peer.kill()
            code = peer.wait()
        return 0 if self._leaving.is_set() and code in LEFT else code


def _bootstrap() -> tuple[subprocess.Popen[str], str]:
    """A node of the table on a free port of loopback, and its address."""
    node = subprocess.Popen(
        [sys.executable, "-m", "p2pavg", "bootstrap", "--listen", "127.0.0.1:0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert node.stdout is not None
    watchdog = threading.Timer(STARTED_S, node.kill)
    watchdog.start()
    line = node.stdout.readline().split()
    watchdog.cancel()
    if not line:
        node.wait()
        raise P2PAvgError("the bootstrap node did not start; run 'p2pavg bootstrap' to see why")
    threading.Thread(target=node.stdout.read, daemon=True).start()
    return node, line[-1]
