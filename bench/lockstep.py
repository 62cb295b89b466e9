"""Lockstep beside DistributedDataParallel over gloo: steps per second of two peers on loopback, by turns.

    python -m bench.lockstep [--params 5000000] [--steps 60] [--turns 4] [--compute 0.0] [--json out.json]

Both train the same model with the same batches. A turn is so many steps of each, one after the other, so that
what else runs on the machine falls on both.

With --faults, what the others of a run wait instead: one of three peers is killed, then another one is
stopped and let go on, then a newcomer joins. Told are the median step before, and the longest one until the
run has gone on for so many steps.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import statistics
import threading
import time
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from p2pavg import CollaborativeOptimizer

BATCH = 16
WARM = 5  # steps before the clock starts
LONGEST_S = 120.0  # of a step


def model_of(params: int) -> nn.Sequential:
    torch.manual_seed(0)
    width = round((params / 4) ** 0.5)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers)


def steps_per_second(model: nn.Module, optimizer: Any, steps: int, width: int) -> float:
    """Of forward, backward and step()."""
    rows = torch.randn(BATCH, width)
    for at in range(steps + WARM):
        if at == WARM:
            begun = time.perf_counter()
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return steps / (time.perf_counter() - begun)


def peer(rank: int, pipe: Connection, args: argparse.Namespace, port: int, compression: str) -> None:
    """One of two processes, for all turns."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    theirs = model_of(args.params)
    wrapped = nn.parallel.DistributedDataParallel(theirs)
    plain = torch.optim.SGD(theirs.parameters(), lr=1e-3)
    ours = model_of(args.params)
    width = ours[0].in_features
    found: dict[str, list[float]] = {"ddp": [], "lockstep": []}
    with CollaborativeOptimizer(
        torch.optim.SGD(ours.parameters(), lr=1e-3),
        "bench-lockstep",
        "step",
        BATCH,
        initial_peers=[] if rank == 0 else [pipe.recv()],
        compression=compression,
        listen="127.0.0.1:0",
    ) as opt:
        if rank == 0:
            pipe.send(opt.peer.address)
        opt.peer.wait_for_peers(1)
        for _ in range(args.turns):
            dist.barrier()
            found["ddp"].append(steps_per_second(wrapped, plain, args.steps, width))
            dist.barrier()
            found["lockstep"].append(steps_per_second(ours, opt, args.steps, width))
        dist.barrier()
    pipe.send(found)
    dist.destroy_process_group()


def measure(args: argparse.Namespace, compression: str) -> dict[str, Any]:
    """Both processes, with one compression of ours."""
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    context = get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    started = [
        context.Process(target=peer, args=(r, pipes[r][1], args, store.port, compression)) for r in range(2)
    ]
    for process in started:
        process.start()
    pipes[1][0].send(pipes[0][0].recv())
    found = pipes[0][0].recv()
    for process in started:
        process.join()
    ratios = [ours / ddp for ours, ddp in zip(found["lockstep"], found["ddp"], strict=True)]
    return {**found, "ratio_median": statistics.median(ratios), "compression": compression}


def trains(params: int, initial_peers: list[str], pipe: Connection, compression: str) -> None:
    """A peer of a run with faults, until something comes. It tells its address; the first one also tells of
    each step how long it took, and the members of its average.
    """
    torch.set_num_threads(1)
    model = model_of(params)
    rows = torch.randn(BATCH, model[0].in_features)
    with CollaborativeOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3),
        "bench-lockstep",
        "step",
        BATCH,
        initial_peers=initial_peers,
        compression=compression,
        listen="127.0.0.1:0",
    ) as opt:
        pipe.send(opt.peer.address)
        while not pipe.poll():
            begun = time.perf_counter()
            model(rows).square().mean().backward()
            opt.step()
            opt.zero_grad()
            seconds, report = time.perf_counter() - begun, opt.last_report
            if not initial_peers:
                pipe.send((seconds, 0 if report is None else len(report.members)))


class Watched:
    """The steps of the peer that stays, which never waits for whoever reads of them."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._told: queue.Queue[tuple[float, int]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._told.put(self._pipe.recv())

    def steps(self, count: int, members: int) -> list[float]:
        """Seconds of the next steps: `count` with so many members, and all before these."""
        found, left = [], count
        while left:
            seconds, present = self._told.get(timeout=LONGEST_S)
            found.append(seconds)
            left -= present == members
        return found

    def skip(self) -> None:
        """Forget the steps so far."""
        while not self._told.empty():
            self._told.get()


def faults(args: argparse.Namespace, compression: str) -> dict[str, Any]:
    """Of the peer that stays: seconds of a step, and the longest when others are killed, stopped, or join."""
    context = get_context("spawn")
    started: list[tuple[Any, Connection]] = []

    def start(initial_peers: list[str]) -> str:
        ours, theirs = context.Pipe()
        process = context.Process(
            target=trains, args=(args.params, initial_peers, theirs, compression), daemon=True
        )
        process.start()
        started.append((process, ours))
        address: str = ours.recv()
        return address

    address = start([])
    watched = Watched(started[0][1])
    for _ in range(2):
        start([address])
    watched.steps(2 * WARM, members=3)
    result: dict[str, Any] = {
        "compression": compression,
        "step": statistics.median(watched.steps(args.steps, members=3)),
    }
    watched.skip()
    started[2][0].kill()
    result["killed"] = max(watched.steps(args.steps, members=2))
    result["step_of_two"] = statistics.median(watched.steps(args.steps, members=2))
    watched.skip()
    os.kill(started[1][0].pid, signal.SIGSTOP)
    result["stopped"] = max(watched.steps(args.steps, members=1))
    os.kill(started[1][0].pid, signal.SIGCONT)
    watched.steps(args.steps, members=2)
    watched.skip()
    start([address])
    result["joined"] = max(watched.steps(args.steps, members=3))
    for process, pipe in (started[0], started[1], started[3]):
        pipe.send("over")
        process.join()
    return result


def main() -> None:
    """Measure, and print or write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=int, default=5_000_000)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--compression", nargs="*", default=["none", "fp16"])
    parser.add_argument("--faults", action="store_true", help="measure what faults cost the others")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.faults:
        told = [faults(args, compression) for compression in args.compression]
        for one in told:
            print(
                {name: round(value, 4) if isinstance(value, float) else value for name, value in one.items()}
            )
        if args.json is not None:
            args.json.write_text(json.dumps({"params": args.params, "faults": told}))
        return
    results = [measure(args, compression) for compression in args.compression]
    for result in results:
        print(
            f"{result['compression']}: {statistics.median(result['lockstep']):.1f} steps/s, DDP "
            f"{statistics.median(result['ddp']):.1f}, ratio {result['ratio_median']:.3f}"
        )
    if args.json is not None:
        args.json.write_text(json.dumps({"params": args.params, "turns": results}))


if __name__ == "__main__":
    main()
