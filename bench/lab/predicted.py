"""Twelve swarms foretold before they run: `python -m bench.lab.predicted --json PATH`.

Three networks, two and four peers, waiting and delayed, whose calculation sleeps. `p2pavg bench net` measures
each link; one swarm's reports give the constants (speed of a peer, overheads); eleven predictions are written
down, and then the eleven swarms run. A run for which the lab's router was late is void: it is made again, and
told as void when it was late twice.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from statistics import mean
from typing import Any

from p2pavg.bench.machine import environment, usable_cores
from p2pavg.bench.net.verb import between
from p2pavg.bench.scenario.replay import Replay, Sleeper, Training, among, replay
from p2pavg.bench.workers import WorkerError
from p2pavg.errors import P2PAvgError
from p2pavg.forecast.evidence import Evidence, from_reports
from p2pavg.forecast.laws import LinkProfile, PeerProfile, Swarm, Workload, epoch
from p2pavg.lab import Lab, load
from p2pavg.lab.topology import Topology

SPS, BATCH, TARGET = 100.0, 10, 1200
EPOCHS = 15
NET_SECONDS, NET_GIGABYTES = 30.0, 1.0
CORES_OF = {2: Fraction(2, 3), 4: Fraction(2)}  # kept busy by so many sleepers and their router
MANY_RTTS = 5  # of bytes / rate, from which on the bar for communication is 15%, not 30%


@dataclass(frozen=True, slots=True)
class Network:
    """A topology with its rates times `scale`, the hosts that train, in order, and the vector's elements."""

    topology: str
    scale: float
    hosts: tuple[str, ...]
    values: int

    def load(self) -> Topology:
        return among(load(self.topology).scaled(self.scale), self.hosts)


NETWORKS = (
    Network("six-100ms", 0.06, ("a", "b", "c", "d"), 3_000_000),
    Network("home-4", 0.5, ("a", "b", "c", "d"), 1_000_000),
    Network("mixed", 0.1, ("a", "b", "c", "home"), 500_000),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A swarm: how many of a network's hosts train, and whether updates are delayed."""

    network: Network
    peers: int
    delayed: bool

    @property
    def name(self) -> str:
        return f"{self.network.topology}/{self.peers}/{'delayed' if self.delayed else 'waiting'}"

    @property
    def training(self) -> Training:
        return Training(TARGET, self.network.values, self.delayed)

    def run(self, folder: Path | None) -> Replay:
        sleepers = [Sleeper(host, host, SPS, BATCH) for host in self.network.hosts[: self.peers]]
        kept = folder / f"{self.name.replace('/', '-')}.jsonl" if folder else None
        for last in (False, False, True):
            try:
                found = replay(self.network.load(), sleepers, self.training, EPOCHS, kept)
            except WorkerError:  # on a busy machine a process may not have started within its deadline
                if last:
                    raise
                continue
            if found.void is None or last:
                break
        return found


class Cores:
    """The machine's cores, lent to swarms: as many run at once as find theirs free, and one always may."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lent = Fraction(0)
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def lend(self, wanted: Fraction) -> Iterator[None]:
        """Wait until so many are free, and have them meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lent or self._lent + wanted <= self._count)
            self._lent += wanted
        try:
            yield
        finally:
            with self._changed:
                self._lent -= wanted
                self._changed.notify_all()


CASES = tuple(Case(*one) for one in itertools.product(NETWORKS, (2, 4), (False, True)))
BASE = CASES[0]
Links = Mapping[str, Mapping[str, Any]]  # "src:dst" -> rtt_ms, gbps there


def measured_links(network: Network) -> dict[str, dict[str, float]]:
    """What `bench net` says of each ordered pair of hosts. Pairs without a host in common are measured
    at once.
    """
    found: dict[str, dict[str, float]] = {}
    first, second, third, fourth = network.hosts
    with Lab(network.load()) as lab:

        def look(pair: tuple[str, str]) -> None:
            src, dst = pair
            told = between(lab, src, dst, NET_SECONDS, NET_GIGABYTES)
            if told["void_reason"]:
                raise P2PAvgError(f"the link {src}:{dst} of {network.topology}: {told['void_reason']}")
            sweep = told["reverse"]["sweep"]  # empty when the time was over
            if not sweep:
                sweep = between(lab, dst, src, NET_SECONDS, NET_GIGABYTES)["sweep"]
            found[f"{src}:{dst}"] = {"rtt_ms": told["rtt_ms"], "gbps": told["rate_gbps"]}
            found[f"{dst}:{src}"] = {"rtt_ms": told["rtt_ms"], "gbps": max(one["gbps"] for one in sweep)}

        for pairs in (
            ((first, second), (third, fourth)),
            ((first, third), (second, fourth)),
            ((first, fourth), (second, third)),
        ):
            with ThreadPoolExecutor() as pool:
                list(pool.map(look, pairs))
    return found


def written(links: Mapping[str, Links]) -> list[dict[str, Any]]:
    """The links as rows of the result."""
    return [
        {"network": network, "way": way, **told}
        for network, ways in links.items()
        for way, told in ways.items()
    ]


def read_links(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """The links that `written` wrote."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        told = {"rtt_ms": row["rtt_ms"], "gbps": row["gbps"]}
        found.setdefault(row["network"], {})[row["way"]] = told
    return found


def foretold(case: Case, links: Links, evidence: Evidence) -> dict[str, Any]:
    """What the laws say, from the links and the constants of the base alone."""
    hosts = case.network.hosts[: case.peers]
    shape = case.network.load()
    profiles = {
        (i, j): LinkProfile(links[f"{a}:{b}"]["rtt_ms"] / 1e3, links[f"{a}:{b}"]["gbps"] * 1e9 / 8)
        for (i, a), (j, b) in itertools.permutations(enumerate(hosts), 2)
    }
    speed = mean(member.sps for member in evidence.swarm.members)

    def card(at: int, end: int, told: float) -> float | None:
        """A machine's rate as its offer tells, but no more than its fastest link was seen to carry."""
        seen = max(link.rate for pair, link in profiles.items() if pair[end] == at)
        return min(seen, told / 8e-6) if told else None

    members = [
        PeerProfile(
            host,
            host,
            speed,
            card(i, 0, shape.nodes[host].egress_mbps),
            card(i, 1, shape.nodes[host].ingress_mbps),
        )
        for i, host in enumerate(hosts)
    ]
    job = Workload(TARGET, case.network.values, delayed=case.delayed)
    found = epoch(job, Swarm(members, profiles), evidence.overheads)
    slowest = min(profiles.items(), key=lambda item: item[1].rate)
    return {
        "samples_per_second": found.samples_per_second,
        "epoch_s": found.total,
        "communication_s": found.communication,
        "bytes_s": found.transfer.seconds,
        "bytes": sum(found.transfer.sent.values()),
        "rtts_of_bytes": found.transfer.seconds / found.rtt,
        "binds": found.transfer.binds,
        "slowest_link": [hosts[i] for i in slowest[0]],
    }


def outcome(run: Replay) -> dict[str, Any]:
    """What came of a swarm, and how busy the machine was."""
    return run.figures() | {
        "bytes": run.bytes_sent,
        "epochs": len(run.first),
        "void": run.void,
        "late_us_p99": run.lab["late_us_p99"],
        "load": os.getloadavg()[0],  # of the machine: peers that wait for a processor are late, too
    }


def off(row: Mapping[str, Any], what: str) -> float:
    """Predicted over measured, less one."""
    return float(row["predicted"][what] / row["measured"][what] - 1)


def judged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The bars: of the swarms that were foretold and are not void."""
    fair = [row for row in rows if row["case"] != BASE.name and row["measured"]["void"] is None]
    speed = [abs(off(row, "samples_per_second")) for row in fair]
    far = [
        row["case"]
        for row in fair
        if abs(off(row, "communication_s"))
        > (0.15 if row["predicted"]["rtts_of_bytes"] >= MANY_RTTS else 0.30)
    ]
    return {
        "foretold": len(fair),
        "samples_per_second_mean": mean(speed),
        "samples_per_second_worst": max(speed),
        "communication_beyond_its_bar": far,
        "bytes_worst": max(abs(off(row, "bytes")) for row in fair),
        "adding": adding(rows),
    }


def adding(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What two more peers change, foretold and measured, for each network without delay."""
    by_case = {row["case"]: row for row in rows}
    found = []
    for network in NETWORKS:
        few, many = (by_case[Case(network, peers, False).name] for peers in (2, 4))
        told, happened = (
            many[which]["samples_per_second"] / few[which]["samples_per_second"] - 1
            for which in ("predicted", "measured")
        )
        found.append(
            {
                "network": network.topology,
                "predicted": told,
                "measured": happened,
                "advice": "add" if told > 0 else "do not add",
                "came_true": math.copysign(1, told) == math.copysign(1, happened),
            }
        )
    return found


def words(row: Mapping[str, Any]) -> str:
    """One swarm, for people."""
    told, found = row["predicted"], row["measured"]
    return (
        f"{row['case']:>20}: {told['samples_per_second']:6.1f} samples/s foretold, "
        f"{found['samples_per_second']:6.1f} measured ({off(row, 'samples_per_second'):+.1%}); "
        f"communication {told['communication_s']:.2f} and {found['communication_s']:.2f} s "
        f"({off(row, 'communication_s'):+.0%}); bytes {off(row, 'bytes'):+.1%}; binds: {told['binds']}"
        + (f"; VOID: {found['void']}" if found["void"] else "")
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="predictions are here before the swarms run")
    parser.add_argument("--links", type=Path, help="an earlier result: take the links as measured then")
    parser.add_argument("--reports", type=Path, help="a folder that gets the reports of every run")
    args = parser.parse_args()
    if args.reports:
        args.reports.mkdir(parents=True, exist_ok=True)
    if args.links:
        links = read_links(json.loads(args.links.read_text())["links"])
    else:
        with ThreadPoolExecutor() as pool:  # their links are thin: three labs keep the machine half idle
            found = pool.map(measured_links, NETWORKS)
            links = {network.topology: told for network, told in zip(NETWORKS, found, strict=True)}
        args.json.write_text(json.dumps({"links": written(links)}, indent=1) + "\n")
    base = BASE.run(args.reports)
    evidence = from_reports(base.reports)
    rows: list[dict[str, Any]] = [
        {"case": case.name, "predicted": foretold(case, links[case.network.topology], evidence)}
        for case in CASES
    ]
    document: dict[str, Any] = {
        "links": written(links),
        "constants_from": BASE.name,
        "constants": {"samples_per_second": evidence.swarm.members[0].sps, **asdict(evidence.overheads)},
        "predicted_at": time.time(),
        "rows": rows,
        "environment": environment(),
    }

    def keep() -> None:
        args.json.write_text(json.dumps(document, indent=1) + "\n")

    keep()
    lock = threading.Lock()
    cores = Cores(usable_cores())

    def play(case: Case, row: dict[str, Any]) -> None:
        if case is BASE:
            run = base
        else:
            with cores.lend(CORES_OF[case.peers]):
                run = case.run(args.reports)
        with lock:
            row["measured"] = outcome(run) | {"at": time.time()}
            keep()
            print(words(row), flush=True)

    with ThreadPoolExecutor(len(CASES)) as pool:
        list(pool.map(play, CASES, rows))
    document["bars"] = judged(rows)
    keep()
    print(json.dumps(document["bars"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
