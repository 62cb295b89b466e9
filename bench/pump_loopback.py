"""The engines alone against gloo: N processes average M float32 over loopback, in turn, in one run.

    python -m bench.pump_loopback --peers 2 --numel 25000000 --codecs fp16,none

No membership, no matchmaking, no commit: an engine's round is from `begin` to the decoded result. Every
process runs one round of each contender after the other; a round's time is that of its slowest process, its
CPU seconds are those of all threads of a process, averaged over the processes. `--beside python` runs a
thread in every process that never leaves Python's bytecode; then `engine_cpu_s` (the pump's own threads) says
what averaging cost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from p2pavg import codecs
from p2pavg.allreduce.encoded import EncodedResult, Layout
from p2pavg.allreduce.partition import chunk_elements
from p2pavg.bench.options import positive_int
from p2pavg.bench.result import add_output_options, emit
from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.transport.engine import SELF, Engine, ReduceJob, Start
from p2pavg.transport.pump_engine import PumpEngine
from p2pavg.transport.python.engine import PythonEngine


class Done:
    """EngineEvents: waits for one job at a time."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def stream_closed(self, link: int, stream: int, reason: str) -> None:
        print(f"stream {stream} of link {link} closed: {reason}", file=sys.stderr)

    def job_done(self, transfer: int, digests: tuple[bytes, ...]) -> None:
        self.event.set()

    def job_refused(self, transfer: int, rank: int, why: str) -> None:
        raise SystemExit(f"rank {rank} was refused: {why}")

    def blob_chunk(self, transfer: int, chunk: int) -> None: ...

    def blob_sent(self, link: int, transfer: int, chunk: int) -> None: ...


def connect(engine: Engine, rank: int, peers: int, streams: int, store: dist.Store, name: str) -> None:
    """k streams to each other rank; the link id is the rank."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        store.set(f"{name}/{rank}", str(listener.getsockname()[1]))
        for other in range(rank):
            port = int(store.get(f"{name}/{other}"))
            for number in range(streams):
                sock = socket.create_connection(("127.0.0.1", port))
                sock.sendall(bytes([rank, number]))
                sock.setblocking(False)
                engine.attach(other, number, sock)
        for _ in range((peers - 1 - rank) * streams):
            sock, _ = listener.accept()
            other, number = sock.recv(2)
            sock.setblocking(False)
            engine.attach(other, number, sock)


class EngineRound:
    def __init__(self, args: argparse.Namespace, kind: str, codec: str, rank: int, store: dist.Store) -> None:
        self.events = Done()
        self.engine = PumpEngine(self.events, args.threads) if kind == "pump" else PythonEngine(self.events)
        connect(self.engine, rank, args.peers, args.streams, store, f"{kind}-{codec}")
        self.rank, self.peers = rank, args.peers
        self.codec = codecs.get(codec)
        share = args.numel // args.peers
        parts = tuple(
            Part(owner, owner * share, share if owner < args.peers - 1 else args.numel - owner * share)
            for owner in range(args.peers)
        )
        self.layout = Layout(parts, chunk_elements([part.count for part in parts]), self.codec)
        self.result = np.zeros(self.layout.nbytes, np.uint8)
        self.transfer = 0

    def open(self) -> None:
        self.transfer += 1
        self.events.event.clear()
        links = tuple(SELF if rank == self.rank else rank for rank in range(self.peers))
        voters = (True,) * self.peers
        wire_id = self.codec.wire_id
        self.engine.open_reduce(
            ReduceJob(
                self.transfer, self.rank, links, voters, Plan(self.layout.parts), self.layout.chunk_elements,
                wire_id, wire_id, self.result,
            )
        )  # fmt: skip

    async def run(self, vector: np.ndarray, out: np.ndarray) -> None:
        self.engine.begin(self.transfer, Start((1.0,) * self.peers, 1.0, source=vector))
        await self.events.event.wait()
        EncodedResult(self.layout, self.result).decode_into(out)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def spin(stop: threading.Event) -> None:
    number = 1
    while not stop.is_set():
        for _ in range(1000):
            number = (number * 1103515245 + 12345) & 0x7FFFFFFF


async def worker(args: argparse.Namespace, rank: int, store: dist.Store) -> dict[str, list[list[float]]]:
    rng = np.random.default_rng(rank)
    vector = rng.standard_normal(args.numel, dtype=np.float32)
    tensor, out = torch.from_numpy(vector.copy()), np.empty_like(vector)
    contenders = {} if args.no_gloo else {"gloo float32": None}
    for name in args.engines.split(","):
        for codec in args.codecs.split(","):
            contenders[f"{name} {codec}"] = EngineRound(args, name, codec, rank, store)
    stop = threading.Event()
    if args.beside == "python":
        threading.Thread(target=spin, args=(stop,), daemon=True).start()
    measured: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for number in range(args.rounds + 1):
        for name, contender in contenders.items():
            if contender is not None:
                contender.open()
            dist.barrier()
            cpu, start = cpu_seconds(), time.perf_counter()
            own = contender.engine.cpu_seconds() if contender else 0.0
            if contender is None:
                dist.all_reduce(tensor)
                tensor.div_(args.peers)
            else:
                await contender.run(vector, out)
            seconds = time.perf_counter() - start
            used = cpu_seconds() - cpu
            own = contender.engine.cpu_seconds() - own if contender else 0.0
            dist.barrier()
            if contender is not None:
                contender.engine.finish(contender.transfer)
                await asyncio.sleep(0)
            if number:  # the first warms up
                measured[name].append([seconds, used, own])
    stop.set()
    dist.barrier()
    for contender in contenders.values():
        if contender is not None:
            contender.engine.close()
    return measured


def run_worker(args: argparse.Namespace) -> None:
    rank = args.rank
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", args.port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.peers)
    with asyncio.Runner() as runner:
        measured = runner.run(worker(args, rank, store))
    print(json.dumps(measured), flush=True)
    dist.destroy_process_group()


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--peers", type=positive_int, default=2)
    parser.add_argument("--numel", type=positive_int, default=25_000_000)
    parser.add_argument("--streams", type=positive_int, default=1, help="of each link")
    parser.add_argument("--threads", type=positive_int, default=None, help="of each pump")
    parser.add_argument("--rounds", type=positive_int, default=7)
    parser.add_argument("--codecs", default="fp16,none")
    parser.add_argument("--engines", default="pump", help="pump,python")
    parser.add_argument("--beside", choices=("none", "python"), default="none")
    parser.add_argument("--no-gloo", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    add_output_options(parser, plot=False)
    args = parser.parse_args()
    if args.rank is not None:
        run_worker(args)
        return

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [
        sys.executable,
        "-m",
        "bench.pump_loopback",
        *sys.argv[1:],
        "--port",
        str(store.port),
        "--rank",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, env=environment, text=True)
        for rank in range(args.peers)
    ]
    outputs = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise SystemExit("a worker failed")
    by_rank = [json.loads(output.splitlines()[-1]) for output in outputs]
    rows = []
    for name in by_rank[0]:
        rounds = np.array([measured[name] for measured in by_rank])  # rank, round, (seconds, cpu, own)
        seconds = rounds[:, :, 0].max(axis=0)
        rows.append(
            {
                "name": name,
                "seconds_median": statistics.median(seconds),
                "seconds": seconds.tolist(),
                "cpu_s": float(np.median(rounds[:, :, 1].mean(axis=0))),
                "engine_cpu_s": float(np.median(rounds[:, :, 2].mean(axis=0))),
            }
        )
    lines = [
        f"{row['name']:14} {row['seconds_median'] * 1e3:8.1f} ms  (best {min(row['seconds']) * 1e3:.1f})   "
        f"{row['cpu_s'] * 1e3:8.1f} CPU ms a process, {row['engine_cpu_s'] * 1e3:.1f} in the engine's threads"
        for row in rows
    ]
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "rank", "port")}
    emit(args, {**settings, "contenders": rows}, lines)


if __name__ == "__main__":
    main()
