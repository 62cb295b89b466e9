"""What a monitor costs a swarm: throughput with one and without, in turn, over the same training.

python -m bench.watching.cost --peers 4 --turns 8 --seconds 10 [--pages 3] [--json PATH]

With --pages the monitor serves its page, and so many clients listen to it as browsers do.

Peers sleep as long as an accelerator would compute. A turn is two windows over the same training, one while a
monitor process looks on and one while none does; each turn has them in the other order. A window's figure is
the median of its epochs' samples per second, which what else the machine does for a moment leaves alone; the
result is the mean over the turns of how much slower the watched window was, with its 95% interval. On a
machine that does other things that interval is wide. The processor time that a member takes more while it is
watched, in percent of a core, is told in the same way, and better: a member that computes on one core loses
no more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from p2pavg.bench.machine import environment
from p2pavg.bench.outer.verb import interval
from p2pavg.bench.workers import Workers

RUN = "bench-rounds"
SETTLE_S = 3.0  # until a monitor has linked to all


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def watching(address: str, pages: int) -> Iterator[int | None]:
    """A monitor beside the swarm, and so many listeners of its page; its process id."""
    command = [sys.executable, "-m", "p2pavg", "monitor", RUN, "--initial-peers", address, "--jsonl", "-"]
    serve = ["--web", "127.0.0.1:0"] if pages else []
    process = subprocess.Popen(
        [*command, *serve], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE if pages else None, text=True
    )
    port = 0
    try:
        if process.stderr is not None:
            port = int(process.stderr.readline().rpartition(":")[2].rstrip("/\n"))  # of the page's address
        time.sleep(SETTLE_S)
        with contextlib.ExitStack() as listeners:
            for _ in range(pages):
                listeners.enter_context(listening(port))
            yield process.pid
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def listening(port: int) -> Iterator[None]:
    """A client of the page's events, that reads them as they come."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        if not connection.recv(1 << 16).startswith(b"HTTP/1.1 200"):
            raise RuntimeError("the monitor's page does not answer")
        reader = threading.Thread(target=drain, args=(connection,), daemon=True)
        reader.start()
        yield
        connection.shutdown(socket.SHUT_RDWR)
        reader.join()


def drain(connection: socket.socket) -> None:
    """Read until the connection ends."""
    with contextlib.suppress(OSError):
        while connection.recv(1 << 16):
            pass


def pace(path: Path, begin: float, end: float) -> float:
    """Samples per second between two times: the median of whole epochs, mean over the peers that report."""
    rates: dict[str, list[float]] = {}
    for line in path.read_text().splitlines():
        report = json.loads(line)
        if begin <= report["finished_at"] - report["seconds_total"] and report["finished_at"] <= end:
            rates.setdefault(report["peer"], []).append(report["samples"] / report["seconds_total"])
    return statistics.mean(map(statistics.median, rates.values()))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reports.jsonl"
        with Workers(
            args.peers, "p2pavg.bench.rounds.worker", environment={"P2PAVG_REPORTS": str(path)}
        ) as workers:
            steps = args.epoch_seconds / args.step_seconds
            answers = workers.join(
                target=round(args.peers * steps), step_seconds=args.step_seconds, epochs=10**9
            )
            for worker in workers.workers:
                worker.send(do="train")
            time.sleep(SETTLE_S)
            with_one, without = [], []
            cpu: dict[str, list[float]] = {"watched": [], "alone": [], "monitor": []}
            pids = [worker.process.pid for worker in workers.workers]
            for turn in range(args.turns):
                for watched in (True, False) if turn % 2 else (False, True):
                    with (
                        watching(answers[0]["address"], args.pages)
                        if watched
                        else contextlib.nullcontext() as pid
                    ):
                        before = sum(map(cpu_seconds, pids)), 0.0 if pid is None else cpu_seconds(pid)
                        begin = time.time()
                        time.sleep(args.seconds)
                        end = time.time()
                        members = sum(map(cpu_seconds, pids)) - before[0]
                        if pid is not None:
                            cpu["monitor"].append((cpu_seconds(pid) - before[1]) / (end - begin))
                        cpu["watched" if watched else "alone"].append(members / len(pids) / (end - begin))
                        (with_one if watched else without).append(pace(path, begin, end))
            for worker in workers.workers:
                worker.process.kill()
    more = [100 * (one - other) for one, other in zip(cpu["watched"], cpu["alone"], strict=True)]
    losses = [100 * (1 - one / other) for one, other in zip(with_one, without, strict=True)]
    return {
        "peers": args.peers,
        "turns": args.turns,
        **({"pages": args.pages} if args.pages else {}),
        "samples_per_second_watched": with_one,
        "samples_per_second_alone": without,
        "loss_percent_median": statistics.median(losses),
        "loss_percent_mean": statistics.mean(losses),
        "loss_percent_interval": interval(losses),
        "control_spread_percent": 100 * statistics.pstdev(without) / statistics.mean(without),
        "member_cpu_percent_more": statistics.mean(more),
        "member_cpu_percent_more_interval": interval(more),
        "member_cpu_share_watched": statistics.median(cpu["watched"]),
        "member_cpu_share_alone": statistics.median(cpu["alone"]),
        "monitor_cpu_share": statistics.median(cpu["monitor"]),
        "environment": environment(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--pages", type=int, default=0, help="clients of the monitor's page")
    parser.add_argument("--epoch-seconds", type=float, default=0.5)
    parser.add_argument("--step-seconds", type=float, default=0.02)
    parser.add_argument("--json", metavar="PATH")
    args = parser.parse_args()
    result = measure(args)
    least, most = result["member_cpu_percent_more_interval"] or (-math.inf, math.inf)
    low, high = result["loss_percent_interval"] or (-math.inf, math.inf)
    print(
        f"{args.peers} peers, {args.turns} turns of {args.seconds:.0f} s each: with a monitor "
        f"{result['loss_percent_mean']:+.2f}% slower (95%: {low:+.2f} to {high:+.2f}%; median "
        f"{result['loss_percent_median']:+.2f}%); windows without one spread by "
        f"{result['control_spread_percent']:.2f}%\n"
        f"of a core: a member {result['member_cpu_percent_more']:+.2f}% (95%: {least:+.2f} to {most:+.2f}%) "
        f"on top of {100 * result['member_cpu_share_alone']:.2f}%, the monitor "
        f"{100 * result['monitor_cpu_share']:.2f}%"
    )
    if args.json is not None:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
