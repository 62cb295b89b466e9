"""Real peers that train over a lab's network with sleeping calculation, and what their reports say."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from p2pavg.bench.workers import START_DEADLINE_S, Workers
from p2pavg.errors import P2PAvgError
from p2pavg.lab.topology import Topology
from p2pavg.report import RoundReport
from p2pavg.report.reading import load

WORKER = "p2pavg.bench.scenario.worker"
WARM_UP = 2  # epochs that are not measured: the first peers train while others join, and links are cold
SLOWEST_EPOCH_S = 600.0


@dataclass(frozen=True, slots=True)
class Sleeper:
    """A peer. host: of the topology. sps: samples/s. batch: samples of a step, which sleeps batch / sps."""

    host: str
    region: str
    sps: float
    batch: int


@dataclass(frozen=True, slots=True)
class Training:
    """What a swarm trains. target: samples of an epoch. values: elements of the vector."""

    target: int
    values: int
    delayed: bool = False
    compression: str = "fp16"


@dataclass(frozen=True, slots=True)
class Replay:
    """What was measured. reports: of rounds with everybody, after the warm-up. lab: the router's lateness."""

    reports: tuple[RoundReport, ...]
    lab: dict[str, Any]

    @property
    def void(self) -> str | None:
        """Why the measurement proves nothing; None: the router was on time."""
        found: str | None = self.lab.get("void_reason")
        return found

    @property
    def first(self) -> list[RoundReport]:
        """The reports of one peer, in order: each epoch once."""
        peer = self.reports[0].peer
        return [report for report in self.reports if report.peer == peer]

    def figures(self) -> dict[str, float]:
        """What predictions are held against, by their names."""
        return {
            "samples_per_second": self.samples_per_second,
            "epoch_s": self.epoch_s,
            "communication_s": self.communication_s,
        }

    @property
    def samples_per_second(self) -> float:
        """Samples in averages over wall clock."""
        return sum(r.samples for r in self.first) / sum(r.seconds_total for r in self.first)

    @property
    def epoch_s(self) -> float:
        return median(report.seconds_total for report in self.first)

    @property
    def communication_s(self) -> float:
        """Of an epoch, the update included, hidden or not: median of all peers' reports."""
        return median(report.seconds_communication + report.seconds_update for report in self.reports)

    @property
    def bytes_sent(self) -> float:
        """Of all peers together in an epoch, in frames."""
        peers = len({report.peer for report in self.reports})
        return peers * sum(report.bytes_sent for report in self.reports) / len(self.reports)

    @property
    def bytes_between_regions(self) -> float:
        """Of all peers together in an epoch, in frames."""
        regions = {report.peer: report.region for report in self.reports}
        crossed = sum(
            link.bytes_sent
            for report in self.reports
            for link in report.links
            if regions.get(link.peer) != report.region
        )
        return crossed / len({report.epoch for report in self.reports})


def among(topology: Topology, hosts: Sequence[str]) -> Topology:
    """The network of these hosts alone, in this order."""
    nodes = {host: topology.nodes[host] for host in hosts}
    paths = {pair: path for pair, path in topology.paths.items() if set(pair) <= set(hosts)}
    return replace(topology, nodes=nodes, paths=paths)


def replay(
    topology: Topology,
    sleepers: Sequence[Sleeper],
    training: Training,
    epochs: int,
    reports_to: Path | None = None,
) -> Replay:
    """Let the peers train `epochs` measured epochs. reports_to: a file that gets all reports, as JSONL.

    Raises P2PAvgError when a peer fails, or no round had all of them.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reports.jsonl"
        _, lab = replay_of(
            None, topology, sleepers, training, epochs, environment={"P2PAVG_REPORTS": str(path)}
        )
        reports = load([path]).rounds()
        if reports_to is not None:
            reports_to.write_bytes(path.read_bytes())
    whole = {
        report.epoch for report in reports if report.epoch >= WARM_UP and len(report.members) == len(sleepers)
    }
    if not whole:
        raise P2PAvgError(
            f"no round after the warm-up had all {len(sleepers)} peers, so nothing was measured; "
            "try more --epochs, or a quieter machine"
        )
    return Replay(tuple(report for report in reports if report.epoch in whole), lab)


def replay_of(
    argv: Sequence[str] | None,
    topology: Topology,
    sleepers: Sequence[Sleeper],
    training: Training,
    epochs: int,
    *,
    environment: Mapping[str, str] | None = None,
    slowest_epoch_s: float = SLOWEST_EPOCH_S,
    **more: Any,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Peers of any system, WARM_UP epochs first: what each answered to `train`, and the router's lateness.

    argv: a command that speaks as `worker` does, which it is without one. slowest_epoch_s: of an epoch, on
    average: after that peers are to answer with what they have. more: for their `start`.
    """
    network = among(topology, [sleeper.host for sleeper in sleepers])
    told = [
        {"batch": one.batch, "step_seconds": one.batch / one.sps, "region": one.region} for one in sleepers
    ]
    with Workers(len(sleepers), WORKER, topology=network, environment=environment, argv=argv) as workers:
        workers.join(sleepers=told, run_id="replay", **asdict(training), **more)
        seconds = slowest_epoch_s * (epochs + WARM_UP)
        answers = workers.all(
            deadline_s=seconds + SLOWEST_EPOCH_S, do="train", epochs=epochs + WARM_UP, seconds=seconds
        )
        lab = workers.lab_verdict()["lab"]
        if argv is None:  # whose reports are written when it leaves
            workers.all(deadline_s=START_DEADLINE_S, do="leave")
    return answers, lab
