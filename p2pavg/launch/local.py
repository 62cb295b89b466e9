"""Peers as processes of this machine, behind a bootstrap node, and what all of them say as one stream."""

from __future__ import annotations

import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TextIO

from p2pavg.bench.machine import usable_cores
from p2pavg.errors import P2PAvgError
from p2pavg.membership.peerinfo import MAX_NAME
from p2pavg.printable import counted, ending

STARTED_S = 30.0  # for the bootstrap node to say its address
LEFT = (-signal.SIGTERM, 128 + signal.SIGTERM)  # how a process ends that was asked to
POLL_S = 0.1
LAST_WORDS_S = 2.0  # for the output of a peer that ended to be shown before that is said
KILLED_AFTER_S = 60.0  # a peer that was asked to leave and has not: more than the default notice


class Local:
    """Runs a script as several peers until all of them have ended."""

    def __init__(self, script: Path, arguments: Sequence[str], peers: int) -> None:
        self._command = [sys.executable, str(script), *arguments]
        self._count = peers
        self._peers: list[subprocess.Popen[str]] = []
        self._shown: list[threading.Thread] = []  # what each says
        self._printing = threading.Lock()
        self._stopped_by = 0  # the signal that asked all to leave

    def tell(self) -> int:
        """Print what `run` would start. Returns 0."""
        self._say(f"{counted(self._count, 'time')}: {shlex.join(self._command)}")
        self._say("a bootstrap node on a free port of 127.0.0.1; nothing was started")
        return 0

    def run(self) -> int:
        """The exit code: of the first peer that ended badly; else 0, or what a shell says of the signal that
        asked all to leave.
        """
        before = {number: signal.signal(number, self._leave) for number in (signal.SIGINT, signal.SIGTERM)}
        bootstrap, address = _bootstrap()
        try:
            for number in range(self._count):
                if self._stopped_by:
                    break
                self._peers.append(self._start(address, number + 1))
                shown = threading.Thread(
                    target=self._show, args=(number + 1, self._peers[number]), daemon=True
                )
                shown.start()
                self._shown.append(shown)
            self._say(
                f"{counted(self._count, 'peer')}; others on this machine join at {address}; a page of them: "
                f"'p2pavg monitor RUN --initial-peers {address} --web 127.0.0.1:8033'"
            )
            codes = self._codes()
        finally:
            for process in (*self._peers, bootstrap):
                if process.poll() is None:
                    process.terminate()
                    process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
        code = next((code for code in codes if code), -self._stopped_by)
        return code if code >= 0 else 128 - code

    def _start(self, address: str, number: int) -> subprocess.Popen[str]:
        threads = str(max(1, usable_cores() // self._count))
        host = socket.gethostname().partition(".")[0][: MAX_NAME - len(f"-{number}")]
        environment = {"OMP_NUM_THREADS": threads, **os.environ}  # what the user says counts
        return subprocess.Popen(
            self._command,
            env={
                **environment,
                "P2PAVG_INITIAL_PEERS": address,
                "P2PAVG_PEERS": str(self._count),
                "P2PAVG_NAME": f"{host}-{number}",  # what is shown here as [number]
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
        again = self._stopped_by > 0
        self._stopped_by = number
        for peer in self._peers:
            if peer.poll() is None:
                peer.send_signal(signal.SIGKILL if again else signal.SIGTERM)

    def _codes(self) -> list[int]:
        """How each peer ended, which is said as soon as it did; one that was asked to leave may take its
        notice for that.
        """
        codes: dict[int, int] = {}
        killed_at = math.inf
        while len(codes) < len(self._peers):
            time.sleep(POLL_S)
            if self._stopped_by:
                killed_at = min(killed_at, time.monotonic() + KILLED_AFTER_S)
            for number, peer in enumerate(self._peers):
                if number in codes:
                    continue
                if peer.poll() is None and time.monotonic() > killed_at:
                    peer.kill()
                code = peer.poll()
                if code is not None:
                    codes[number] = 0 if self._stopped_by and code in LEFT else code
                    if codes[number]:
                        self._shown[number].join(LAST_WORDS_S)
                        self._say(ending(code), f"[{number + 1}] ")
        return [codes[number] for number in range(len(self._peers))]


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
