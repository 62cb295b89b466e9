"""What a lost peer costs, side by side: p2pavg, gloo with a new group of the survivors, and torchft.

`python -m bench.kills --peers 4 --json bench/results/kills.json`

The processes average a small vector every half second. One is killed (SIGKILL) or stopped (SIGSTOP). Measured
is the longest time between two averages of a survivor, less the usual, until it has one of all survivors.
gloo cannot go on with fewer: here the survivors leave the broken group as soon as they learn of the loss and
form another through a fresh store, which a training script around gloo would have to do. `--timeout` is the
group's: so long gloo and torchft wait for a stopped process. torchft drops the step that was under way, and
is measured when `--torchft` names a Python that has it (`pip install torchft numpy`).
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from p2pavg.bench.machine import environment
from p2pavg.bench.workers import start, tell

WORKERS = Path(__file__).resolve().parent / "workers"  # run as files, in the environments of their systems
STEP_S = 0.5
BEFORE = 8  # averages before the fault
LIMIT_S = 90.0


class Processes:
    """Peers of one system that say one JSON line for each average."""

    def __init__(self, python: str, script: str, peers: int, config: dict[str, Any]) -> None:
        self.lines: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.children = [start([python, str(WORKERS / script)], env) for _ in range(peers)]
        for index, child in enumerate(self.children):
            tell(child, {**config, "index": index, "peers": peers})
            threading.Thread(target=self._read, args=(index, child), daemon=True).start()

    def _read(self, index: int, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            self.lines.put((index, json.loads(line)))
        self.lines.put((index, None))

    def until(self, ready: Any, seconds: float) -> bool:
        """Hand every line to `ready` until it says so."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                index, line = self.lines.get(timeout=left)
            except queue.Empty:
                return False
            if line is not None and ready(index, line):
                return True
        return False

    def close(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.send_signal(signal.SIGCONT)
                child.kill()
            child.wait()


def break_one(python: str, script: str, peers: int, fault: str, config: dict[str, Any]) -> dict[str, Any]:
    """Seconds that the loss of one peer costs the survivors."""
    swarm = Processes(python, script, peers, config)
    try:
        seconds: dict[int, list[float]] = {index: [] for index in range(peers)}

        def warm(index: int, line: dict[str, Any]) -> bool:
            if line["members"] == peers:
                seconds[index].append(line["seconds"])
            return all(len(values) >= BEFORE for values in seconds.values())

        if not swarm.until(warm, LIMIT_S):
            return {"failed": "the swarm did not start"}
        usual = statistics.median(value for values in seconds.values() for value in values[2:])
        victim = swarm.children[1]
        victim.send_signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        struck = time.monotonic()
        stalls: dict[int, float] = {}

        def recovered(index: int, line: dict[str, Any]) -> bool:
            if index != 1 and line["members"] == peers - 1 and index not in stalls:
                stalls[index] = line["seconds"] - usual
            return len(stalls) == peers - 1

        if not swarm.until(recovered, LIMIT_S):
            return {"failed": f"the survivors did not average again within {LIMIT_S:.0f} s"}
        return {"usual_step_s": usual, "stall_s": max(stalls.values()), "whole_s": time.monotonic() - struck}
    finally:
        swarm.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=10.0, help="of gloo and torchft, seconds")
    parser.add_argument("--torchft", metavar="PYTHON", help="an interpreter that has torchft")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the result here")
    given = parser.parse_args()
    systems = {"p2pavg": sys.executable, "gloo": sys.executable}
    if given.torchft is not None:
        systems["torchft"] = given.torchft
    rows: list[dict[str, Any]] = []
    for repeat in range(given.repeats):
        for system, python in systems.items():
            for fault in ("kill", "stop"):
                run = f"{os.getpid()}-{system}-{fault}-{repeat}"
                config = {"timeout": given.timeout, "step_seconds": STEP_S, "run": run}
                row = break_one(python, f"{system}_worker.py", given.peers, fault, config)
                rows.append({"system": system, "fault": fault, **row})
                print(_words(rows[-1]), flush=True)
    if given.json is not None:
        summary = {
            f"{system}_{fault}_stall_s": _median(rows, system, fault)
            for system in systems
            for fault in ("kill", "stop")
        }
        result = {"peers": given.peers, "timeout_s": given.timeout, **summary, "rows": rows}
        given.json.write_text(json.dumps({**result, "environment": environment()}, indent=1) + "\n")
    return int(any("failed" in row for row in rows if row["system"] == "p2pavg"))


def _median(rows: list[dict[str, Any]], system: str, fault: str) -> float | None:
    """None: it did not recover each time."""
    found = [row.get("stall_s") for row in rows if (row["system"], row["fault"]) == (system, fault)]
    return None if None in found else statistics.median(found)


def _words(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['system']:8} {row['fault']:5} {row['failed']}"
    return (
        f"{row['system']:8} {row['fault']:5} longest stall {row['stall_s']:.2f} s "
        f"(a step takes {row['usual_step_s']:.2f} s)"
    )


if __name__ == "__main__":
    sys.exit(main())
