"""How fast a run sees its peers come and go: `python -m bench.membership [--part NAME ...] [--json PATH]`.

view: processes of one member each leave, and are killed, while others watch them go; newcomers join 50
members over loopback, until each sees all and all see it. far: one joins 50 over an emulated round trip of
300 ms. merge: two swarms of 4 that train started apart; then one peer of one learns an address of the other.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from p2pavg.bench.machine import environment
from p2pavg.bench.toy import Epoch, ToyTrainer
from p2pavg.bench.workers import Worker, Workers, own_host, serve, start_peer
from p2pavg.errors import ClosedError
from p2pavg.identity import Identity
from p2pavg.membership import DHT, PeerInfo, View
from p2pavg.membership.table.address import parse_addresses
from p2pavg.peer.loop_thread import LoopThread

RUN = "membership"
DEADLINE_S = 60.0
POLL_S = 0.002
LIFETIME_S = 15.0
SWARM = 50
NEWCOMERS = 5
GOING = 6  # leave, and as many are killed
FAR = "two-300ms"
STATE_BYTES = 50_000_000
EPOCHS_AFTER = 12
PARTS = ("view", "far", "merge")


class Members:
    """A worker: members of one run, without training."""

    def __init__(self) -> None:
        self._thread = LoopThread(RUN)
        self._views: list[View] = []
        self._host = own_host()

    def start(self, command: dict[str, Any]) -> dict[str, Any]:
        """`count` members, one after the other; the seconds of each."""
        way_in, seconds, ids = command["initial_peers"], [], []
        for _ in range(command["count"]):
            began = time.monotonic()
            node, view = self._thread.run(self._member(way_in))
            seconds.append(time.monotonic() - began)
            self._views.append(view)
            ids.append(node.identity.peer_id.hex())
            way_in = [f"{self._host}:{node.port}"]
        return {"address": way_in[0], "seconds": seconds, "ids": ids, "began": time.monotonic() - seconds[-1]}

    async def _member(self, way_in: list[str]) -> tuple[DHT, View]:
        node = await DHT.start(
            Identity.generate(), host=self._host, port=0, initial_peers=parse_addresses(way_in)
        )
        view = View(node, RUN)
        await view.refresh_now()
        await view.announce(PeerInfo(node.identity.peer_id, tuple(node.external_addresses())))
        return node, view

    def see(self, command: dict[str, Any]) -> dict[str, Any]:
        """Wait until all members here see `count` peers; when that was."""
        return _when(lambda: all(len(view.peers) == command["count"] for view in self._views))

    def leave(self, command: dict[str, Any]) -> dict[str, Any]:
        """All members here say that they leave; when they began to."""
        began = time.monotonic()
        for view in self._views:
            self._thread.run(view.leave())
        return {"at": began}


class Trainer:
    """A worker: one peer that trains."""

    def start(self, config: dict[str, Any]) -> dict[str, Any]:
        """Join a swarm, and train from then on."""
        self._epochs: list[tuple[int, str, float]] = []
        self._peer = start_peer(RUN, config)
        self._trainer = ToyTrainer.of(
            self._peer, config, numel=100_000, on_epoch=self._applied, extra=np.zeros(STATE_BYTES, np.uint8)
        )
        threading.Thread(target=self._train, daemon=True).start()
        return {"address": self._peer.address}

    def _applied(self, epoch: Epoch) -> None:
        self._epochs.append((epoch.epoch, epoch.parameters, time.monotonic()))

    def _train(self) -> None:
        with contextlib.suppress(ClosedError):
            while True:
                self._trainer.step()

    def see(self, command: dict[str, Any]) -> dict[str, Any]:
        """Wait until this peer sees `count` others; when that was."""
        return _when(lambda: len(self._peer.peers) == command["count"])

    def introduce(self, command: dict[str, Any]) -> dict[str, Any]:
        """Learn of a node of another swarm; when that was told."""
        began = time.monotonic()
        peer = self._peer
        thread = peer._thread
        assert thread is not None
        thread.run(peer._running().dht.introduce(command["address"]))
        return {"at": began}

    def epochs(self, command: dict[str, Any]) -> dict[str, Any]:
        """Train `more` epochs; all that were applied so far, as (epoch, hash of the parameters after it,
        when), and when a state was loaded.
        """
        goal = len(self._epochs) + command["more"]
        _when(lambda: len(self._epochs) >= goal)
        return {"epochs": self._epochs, "loaded_at": self._trainer.loaded_at}


def _when(condition: Callable[[], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            return {"error": f"not within {DEADLINE_S:.0f} s"}
        time.sleep(POLL_S)
    return {"at": time.monotonic()}


def _workers(count: int, kind: str, topology: str | None = None) -> Workers:
    argv = [sys.executable, "-m", "bench.membership", "--worker", kind]
    return Workers(count, "", argv=argv, topology=topology)


def _asked(worker: Worker, **command: Any) -> Any:
    worker.send(**command)
    return worker.receive(2 * DEADLINE_S)


def view() -> dict[str, Any]:
    """Leaving, dying and joining on this machine."""
    left, gone, seen, joined = [], [], [], []
    with _workers(1 + 2 * GOING + NEWCOMERS, "members") as workers:
        rest, *others = workers.workers
        way_in = [_asked(rest, do="start", count=6, initial_peers=[])["address"]]
        for worker in others[: 2 * GOING]:
            _asked(worker, do="start", count=1, initial_peers=way_in)
        count = 6 + 2 * GOING - 1
        _asked(rest, do="see", count=count)
        for worker in others[:GOING]:
            began, count = _asked(worker, do="leave")["at"], count - 1
            left.append(_asked(rest, do="see", count=count)["at"] - began)
        for worker in others[GOING : 2 * GOING]:
            worker.process.kill()
        began, count = time.monotonic(), count - GOING
        gone.append(_asked(rest, do="see", count=count)["at"] - began)
        more = _asked(rest, do="start", count=SWARM - 6, initial_peers=way_in)
        seen, joined = _join(rest, others[2 * GOING :], [more["address"]])
    return {
        "clean_leave_seen_s_max": max(left),
        "dead_gone_s": max(gone),
        "lifetime_s": LIFETIME_S,
        "join_50_s_median": statistics.median(joined),
        "join_50_s_max": max(joined),
        "join_50_seen_by_all_s_max": max(seen),
    }


def _join(rest: Worker, newcomers: list[Worker], way_in: list[str]) -> tuple[list[float], list[float]]:
    """Seconds until all of `rest` saw each newcomer, and until it saw them and had told them."""
    seen, joined = [], []
    for number, worker in enumerate(newcomers):
        answer = _asked(worker, do="start", count=1, initial_peers=way_in)
        joined.append(answer["seconds"][0])
        rest.send(do="see", count=SWARM + number)
        whole = _asked(worker, do="see", count=SWARM + number)["at"]
        seen.append(max(rest.receive(2 * DEADLINE_S)["at"], whole) - answer["began"])
    return seen, joined


def far() -> dict[str, Any]:
    """Joining over a long link."""
    with _workers(2, "members", FAR) as workers:
        here, there = workers.workers
        way_in = [_asked(here, do="start", count=SWARM, initial_peers=[])["address"]]
        answer = _asked(there, do="start", count=1, initial_peers=way_in)
        here.send(do="see", count=SWARM)
        whole = _asked(there, do="see", count=SWARM)["at"]
        seen = max(here.receive(2 * DEADLINE_S)["at"], whole) - answer["began"]
        rtt = workers.lab.topology.smallest_rtt_ms() / 1e3
        late = workers.lab_verdict()["lab"]["void"]
    return {
        "join_50_rtt": answer["seconds"][0] / rtt,
        "seen_by_all_rtt": seen / rtt,
        "rtt_s": rtt,
        "void": late,
    }


def merge() -> dict[str, Any]:
    """Two swarms of four become one."""
    config = {"target": 4 * 10, "step_seconds": 0.05}
    with _workers(8, "trainer") as workers:
        swarms = workers.workers[:4], workers.workers[4:]
        addresses = []
        for first, *others in swarms:
            addresses.append(_asked(first, do="start", initial_peers=[], **config)["address"])
            for worker in others:
                worker.send(do="start", initial_peers=addresses[-1:], **config)
            for worker in others:
                worker.receive(DEADLINE_S)
        workers.all(deadline_s=2 * DEADLINE_S, do="see", count=3)
        workers.all(deadline_s=2 * DEADLINE_S, do="epochs", more=8)
        met = _asked(swarms[1][0], do="introduce", address=addresses[0])["at"]
        merged = max(a["at"] for a in workers.all(deadline_s=2 * DEADLINE_S, do="see", count=7))
        told = workers.all(deadline_s=2 * DEADLINE_S, do="epochs", more=EPOCHS_AFTER)
    return _merged(told, met, merged)


def _merged(told: list[dict[str, Any]], met: float, merged: float) -> dict[str, Any]:
    lineages: dict[int, set[str]] = {}
    for answer in told:
        for epoch, parameters, at in answer["epochs"]:
            if at > merged:
                lineages.setdefault(epoch, set()).add(parameters)
    split = max((epoch for epoch, found in lineages.items() if len(found) > 1), default=-1)
    apart = [at for answer in told for epoch, _, at in answer["epochs"] if at > merged and epoch <= split]
    last_apart = max(apart, default=merged)
    gaps = [
        later - at
        for answer in told
        for (_, _, at), (_, _, later) in itertools.pairwise(answer["epochs"])
        if later > met
    ]
    healed = [answer["loaded_at"] - merged for answer in told if answer["loaded_at"] > met]
    return {
        "one_swarm_s": merged - met,
        "states_loaded": len(healed),
        "last_state_loaded_s_later": max(healed, default=0.0),
        "last_epoch_of_two_lineages_s_later": last_apart - merged,
        "longest_epoch_s": max(gaps),
        "epochs_compared": len(lineages) - sum(epoch <= split for epoch in lineages),
        "state_bytes": STATE_BYTES,
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--json", metavar="PATH", help="parts that are not measured now keep their figures there"
    )
    parser.add_argument("--worker", choices=("members", "trainer"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker = Members() if args.worker == "members" else Trainer()
        names = ("start", "see", "leave", "introduce", "epochs")
        return serve(*(getattr(worker, name) for name in names if hasattr(worker, name)))
    result = {name: {"view": view, "far": far, "merge": merge}[name]() for name in args.part}
    print(json.dumps(result, indent=1))
    if args.json:
        path = Path(args.json)
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**before, **result, "environment": environment()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
