"""Who plays in the sections: p2pavg in fp16, and plain TCP streams; and what is kept of their rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from bench.versus.contestant import Contestant
from p2pavg.bench.workers import Workers
from p2pavg.credentials import new_secret
from p2pavg.lab.topology import Topology

WARM_UP = {"clouds-4": 3}  # rounds that find the streams and the parts; elsewhere one


def summary(contestant: Contestant) -> dict[str, Any]:
    """Medians."""
    rounds, seconds = contestant.measured, contestant.seconds()
    found: dict[str, Any] = {"seconds": statistics.median(seconds), "all_seconds": contestant.all_seconds()}
    found["first_seconds"], found["warm_up_rounds"] = found["all_seconds"][0], contestant.warm_up
    verdict = contestant.workers.lab_verdict().get("lab", {})
    found["void_reason"] = verdict.get("void_reason")
    if "streams" in rounds[0][0]:
        found["streams"] = max(answer["streams"] for answer in rounds[-1])
        found["bit_identical"] = all(len({a["digest"] for a in answers}) == 1 for answers in rounds)
        found["goodput_gbps"] = statistics.median(
            8e-9
            * statistics.median(a["bytes_sent"] for a in answers)
            / (max(a["last_byte_at"] for a in answers) - min(a["first_byte_at"] for a in answers))
            for answers in rounds
        )
        found["phases"] = {
            name: statistics.median(a[name] for answers in rounds for a in answers)
            for name in ("waiting", "matchmaking", "transfer", "commit", "update")
        }
    return found


def averaging(
    topology: str | Topology | None,
    peers: int,
    numel: int,
    streams: str = "auto",
    encrypted: bool = False,
    **config: Any,
) -> Contestant:
    """p2pavg in fp16. topology: of the lab; None: over loopback."""
    workers = Workers(peers, "bench.line_rate.peer", topology=topology)
    workers.join(
        numel=numel,
        peers=peers,
        compression="fp16",
        streams=streams if streams == "auto" else int(streams),
        beside="none",
        credentials=new_secret("bench-allreduce") if encrypted else None,
        **config,
    )
    return Contestant("p2pavg", workers)


def raw(topology: str, total: int, streams: int) -> Contestant:
    """Plain TCP connections."""
    workers = Workers(2, "bench.line_rate.raw_streams", topology=topology)
    workers.join(bytes=total, streams=streams)
    return Contestant("raw", workers)


def in_turn(makers: Mapping[str, Callable[[], Contestant]], rounds: int, warm_up: int = 1) -> dict[str, Any]:
    """Each contestant lives alone while it plays: two labs at once would share the machine's cores."""
    found: dict[str, Any] = {}
    for name, make in makers.items():
        contestant = make()
        contestant.warm_up = warm_up
        with contestant.workers:
            for _ in range(warm_up + rounds):
                contestant.play(fill=contestant.name != "raw")
            found[name] = summary(contestant)
        print(f"  {name}: {found[name]['seconds']:.3f} s", flush=True)
    return found
