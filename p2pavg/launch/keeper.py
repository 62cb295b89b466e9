"""Keeps one peer alive on its machine: `python -m p2pavg.launch.keeper FOLDER`.

The folder has `peer.json` (arguments of this Python, and an environment), `code/`, where the peer runs, and
in a closed run `credentials`. The keeper writes `state.json` and `peer.log` beside them, starts a peer that
crashed anew after a pause, and passes SIGTERM on; after that nothing is started any more.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

PAUSES_S = (1.0, 2.0, 5.0, 15.0, 60.0)  # before the next start, by crashes in a row
LIVED_S = 120.0  # a peer that ran for so long has not crashed in a row
MOST_CRASHES = 8  # in a row, after which the keeper gives up
LOG_BYTES = 16 << 20  # of the log; then that file becomes peer.log.1
PIECE_BYTES = 65536
LEFT_BY_ITSELF = 143  # of a peer that left, though not asked from here: a cloud takes this machine
TAKEN_S = 180.0  # until that peer starts anew, should the machine stay: longer than any cloud's notice
TOGETHER = "P2PAVG_PEERS"  # of the environment: how many peers begin at once
OVER = ("ended", "left", "failed")  # states after which nothing is started any more
DRAINS_S = 5.0  # for the last words of a peer that has ended


class Keeper:
    """One peer, its log and its state."""

    def __init__(self, folder: Path, restarts: int = 0) -> None:
        """restarts: how often the peer was started again before."""
        self._folder = folder
        self._leaving = threading.Event()
        self._peer: subprocess.Popen[bytes] | None = None
        self._restarts = restarts

    def run(self) -> int:
        """Keep the peer until it ends by itself, is asked to leave, or has crashed too often. Returns the
        peer's exit code.
        """
        job = json.loads((self._folder / "peer.json").read_text())
        crashes, code = 0, 0
        while not self._leaving.is_set():
            began = time.monotonic()
            code = self._once(job)
            if code == 0 or self._leaving.is_set():
                break
            crashes = 1 if time.monotonic() - began >= LIVED_S else crashes + 1
            if crashes >= MOST_CRASHES:
                self._tell("failed", code)
                return code
            taken = code == LEFT_BY_ITSELF
            self._tell("away" if taken else "crashed", code)
            self._leaving.wait(TAKEN_S if taken else PAUSES_S[min(crashes, len(PAUSES_S)) - 1])
            self._restarts += 1
        self._tell("left" if self._leaving.is_set() else "ended", code)
        return code

    def _once(self, job: Mapping[str, Any]) -> int:
        """Start the peer, keep its output, and wait for its end."""
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **job["environment"]}
        if (credentials := self._folder / "credentials").exists():
            environment["P2PAVG_CREDENTIALS"] = str(credentials)
        if self._restarts:
            environment.pop(TOGETHER, None)  # the others have begun
        try:
            peer = self._peer = subprocess.Popen(
                [sys.executable, *job["arguments"]],
                cwd=self._folder / "code",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._log(f"the peer cannot be started: {error}\n".encode())
            return 127
        self._tell("running", None)
        if self._leaving.is_set():
            self.leave()
        reader = threading.Thread(target=self._read, args=(peer,), daemon=True)
        reader.start()
        code = peer.wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(peer.pid, signal.SIGKILL)  # its children hold the log, and perhaps the port
        reader.join(DRAINS_S)
        return code

    def _read(self, peer: subprocess.Popen[bytes]) -> None:
        assert peer.stdout is not None
        with peer.stdout as output:
            while piece := os.read(output.fileno(), PIECE_BYTES):
                self._log(piece)

    def leave(self) -> None:
        """Ask the peer to leave, which hands over what it has."""
        self._leaving.set()
        if self._peer is not None and self._peer.poll() is None:
            self._peer.send_signal(signal.SIGTERM)

    def _log(self, piece: bytes) -> None:
        path = self._folder / "peer.log"
        try:
            with path.open("ab") as log:
                log.write(piece)
                full = log.tell() >= LOG_BYTES
            if full:
                path.replace(self._folder / "peer.log.1")
        except OSError:
            pass  # the disk is full: the peer goes on

    def _tell(self, state: str, code: int | None) -> None:
        """Write where things stand."""
        fields = {
            "state": state,
            "keeper": os.getpid(),
            "peer": None if self._peer is None else self._peer.pid,
            "exit_code": code,
            "restarts": self._restarts,
            "since": time.time(),
        }
        made = self._folder / "state.json.new"
        try:
            made.write_text(json.dumps(fields))
            made.replace(self._folder / "state.json")
        except OSError:
            pass  # the disk is full: the peer goes on


def claimed(folder: Path) -> IO[str] | None:
    """The lock that one keeper holds while it lives; None: another one holds it."""
    import fcntl

    lock = (folder / "keeper.lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def last(folder: Path) -> Mapping[str, Any]:
    """What a keeper before this one wrote; nothing for a peer that was just launched."""
    try:
        told = json.loads((folder / "state.json").read_text())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def main() -> int:
    """The folder is the only argument."""
    folder = Path(sys.argv[1]).resolve()
    lock = claimed(folder)
    if lock is None:
        return 75
    with lock:
        before = last(folder)
        if before.get("state") in OVER:  # a machine that starts anew does not begin a run again that is over
            return 0
        keeper = Keeper(folder, int(before.get("restarts") or 0) + 1 if before else 0)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: keeper.leave())
        return keeper.run()


if __name__ == "__main__":
    sys.exit(main())
