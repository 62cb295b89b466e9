"""Joining where no UDP gets through: `python -m bench.reach.without_udp [--turns 9] [--json PATH]`.

Two labs have the same network, one of them without UDP at any host. In each, members train, and a newcomer
joins them, in turns: from its start until it has the run's state and takes part. Prints the median seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from p2pavg.bench.machine import environment
from p2pavg.bench.toy import ToyTrainer
from p2pavg.bench.workers import Worker, serve, start, start_peer
from p2pavg.lab import Lab
from p2pavg.lab.topology import parse

RUN = "without-udp"
NUMEL = 100_000
CONFIG = {"target": 40, "step_seconds": 0.1}
START_S, JOIN_S = 120.0, 60.0


class Trainer:
    """The worker's commands."""

    def member(self, config: dict[str, Any]) -> dict[str, Any]:
        """Train until the process ends."""
        peer = start_peer(RUN, config)
        trainer = ToyTrainer.of(peer, config, numel=NUMEL, on_epoch=lambda epoch: None)

        def train() -> None:
            while True:
                trainer.step()

        threading.Thread(target=train, daemon=True).start()
        return {"address": peer.address}

    def join(self, config: dict[str, Any]) -> dict[str, Any]:
        """Join, take note of how long that took, train an epoch and leave."""
        began = time.monotonic()
        peer = start_peer(RUN, config)
        started = time.monotonic()
        epochs: list[int] = []
        trainer = ToyTrainer.of(peer, config, numel=NUMEL, on_epoch=lambda epoch: epochs.append(epoch.epoch))
        joined = time.monotonic()
        while not epochs:
            trainer.step()
        peer.close()
        return {"seconds": joined - began, "found_s": started - began, "epoch": epochs[0]}


class Swarm:
    """Members of one lab, and a host from which newcomers join them."""

    def __init__(self, stack: ExitStack, members: int, rtt_ms: float, *, udp: bool) -> None:
        hosts = [f"m{number}" for number in range(members)]
        text = f"hosts = {json.dumps([*hosts, 'newcomer'])}\n[[paths]]\nrtt_ms = {rtt_ms}\n"
        self.lab = stack.enter_context(Lab(parse(text, "udp" if udp else "tcp")))
        for host in self.lab.hosts:
            self.lab.set_node(host, drop_udp=not udp)
        argv, env = [sys.executable, "-m", "bench.reach.without_udp", "--worker"], {**os.environ}
        self._workers: dict[str, Worker] = {}
        for index, host in enumerate(self.lab.hosts):
            self._workers[host] = Worker(index, start(argv, env, lab=self.lab, host=host))
            stack.callback(self._workers[host].close)
        ways_in: list[str] = []
        for host in hosts:
            self._workers[host].send(do="member", initial_peers=ways_in, **CONFIG)
            ways_in = [self._workers[host].receive(START_S)["address"]]
        self._ways_in = ways_in

    def join(self) -> dict[str, Any]:
        """One newcomer comes, and leaves."""
        self._workers["newcomer"].send(do="join", initial_peers=self._ways_in, **CONFIG)
        return self._workers["newcomer"].receive(JOIN_S)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Newcomers of both swarms, in turns."""
    joins: dict[str, list[dict[str, Any]]] = {"udp": [], "tcp": []}
    with ExitStack() as stack:
        swarms = {name: Swarm(stack, args.members, args.rtt_ms, udp=name == "udp") for name in ("udp", "tcp")}
        for turn in range(args.turns + 1):
            for name in ("udp", "tcp") if turn % 2 else ("tcp", "udp"):
                joined = swarms[name].join()
                if turn:  # the first one of each loads what the others find loaded
                    joins[name].append(joined)
    seconds = {name: statistics.median(join["seconds"] for join in made) for name, made in joins.items()}
    found = {name: statistics.median(join["found_s"] for join in made) for name, made in joins.items()}
    return {
        "members": args.members,
        "rtt_ms": args.rtt_ms,
        "turns": args.turns,
        "join_seconds": seconds,
        "table_seconds": found,
        "ratio": seconds["tcp"] / seconds["udp"],
        "longest_s": {name: max(join["seconds"] for join in made) for name, made in joins.items()},
        "environment": environment(),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.reach.without_udp", description=__doc__)
    parser.add_argument("--turns", type=int, default=9, help="in each lab; default: %(default)s")
    parser.add_argument("--members", type=int, default=4, help="that train; default: %(default)s")
    parser.add_argument("--rtt-ms", type=float, default=40.0, help="between any two; default: %(default)s")
    parser.add_argument("--json", metavar="PATH", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker = Trainer()
        return serve(worker.member, worker.join)
    result = measure(args)
    print(json.dumps({key: value for key, value in result.items() if key != "environment"}, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
