"""The bars of plans, measured and held against: `python -m bench.plans [--json PATH] [--only SECTION...]`.

bytes: bytes between regions, of regions of several sizes on loopback.
planning: how long a leader plans for 64 members.
uplinks: two levels beside a flat plan where the hosts of a site share its uplink.
flowcaps: the same where each pair of two sites has a rate of its own.
clouds: eight peers in four regions, a vector of 25M; all rates and the vector at a tenth of that, so that two
    cores can carry it and seconds mean the same.
full: the same at full scale, where cores are busier than the network.
lan: "auto" beside a flat plan where two levels save nothing.
lockstep: rounds over 300 ms, 25M.
first-LAB: a first round beside later ones, blind, and with what the last run learned of the links.

Plans that are compared take turns, in swarms of their own. About eleven minutes on two idle cores; on a
machine that does something else no seconds mean anything, and `late` says that the lab's router was. --scale
shortens all vectors, to try it out. A section that is not measured now stays in PATH as it was.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.plans import planning, shapes
from p2pavg import codecs
from p2pavg.allreduce.choosing import flat, two_levels
from p2pavg.bench.allreduce import verb
from p2pavg.bench.options import at_least, positive_int
from p2pavg.bench.plans.predicting import inputs, names_of_groups
from p2pavg.bench.result import add_section_options, emit_sections
from p2pavg.lab.topology import Topology, load

Figures = dict[str, Any]
SCALE = 0.1  # of `clouds`
FIRST = {  # values for which a later round takes a second or two
    "two-300ms": 25_000_000,
    "two-300ms-flowcap": 25_000_000,
    "clouds-4": 8_000_000,
    "six-100ms": 8_000_000,
    "mixed": 5_000_000,
    "home-4": 1_000_000,
    "homes": 1_000_000,
    "uplinks": 4_000_000,
    "join-4": 4_000_000,
}


def row(what: str, found: float | None, bar: float, *, most: bool, **more: Any) -> Figures:
    """A figure and its bar. most: it may be no more than the bar, else no less. found: None: nothing."""
    holds = None if found is None else found <= bar if most else found >= bar
    return {"what": what, "found": found, "bar": bar, "most": most, "holds": holds, **more}


def swarm(
    lab: str | Topology, numel: float, rounds: int, plan: str = "auto", peers: int | None = None
) -> Figures:
    """What `bench allreduce` measures of one swarm over a topology."""
    topology = load(lab) if isinstance(lab, str) else lab
    count = peers or len(topology.hosts)
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    words = ("--peers", count, "--numel", int(numel), "--rounds", rounds, "--plan", plan)
    asked = parser.parse_args([str(word) for word in words], argparse.Namespace(lab=topology))
    return verb.measure(asked, names_of_groups(topology, count))


def beside(lab: str, numel: float, plans: tuple[str, str], turns: int, peers: int | None = None) -> Figures:
    """Medians of two plans by turns: seconds of a round, and of its transfer."""
    found: dict[str, list[Figures]] = {plan: [] for plan in plans}
    for turn in range(turns):
        for plan in plans[:: -1 if turn % 2 else 1]:
            found[plan].append(swarm(lab, numel, 3, plan, peers))
    told: Figures = {}
    for plan, runs in found.items():
        told[f"{plan}_s"] = statistics.median(second for run in runs for second in run["seconds"])
        told[f"{plan}_transfer_s"] = statistics.median(run["phases"]["transfer"] for run in runs)
    told["late"] = any(run["lab"]["void"] for runs in found.values() for run in runs)
    told["bit_identical"] = all(run["bit_identical"] for runs in found.values() for run in runs)
    return told


def bytes_(args: argparse.Namespace) -> Figures:
    rows = []
    for shape in shapes.SHAPES:
        found = shapes.measure(shape, "two-level", int(2_000_000 * args.scale), 2, None)
        rows.append(row(f"bytes between regions, {shape}", found["times_the_least"], 1.05, most=True))
    return {"bytes": rows}


def plan_ms(args: argparse.Namespace) -> Figures:
    found = planning.table()
    worst = max(value for each in found.values() for name, value in each.items() if name != "first")
    first = max(each["first"] for each in found.values())
    return {
        "planning": [
            row("planning for 64 members, ms of CPU", worst, 5.0, most=True, by_shape=found),
            row("the first plan for 64 members, ms of CPU", first, 5.0, most=True),
        ]
    }


def faster(lab: str, numel: float, bar: float, args: argparse.Namespace) -> list[Figures]:
    members = len(load(lab).hosts) // 2
    found = beside(lab, numel * args.scale, ("flat", "two-level"), args.turns)
    times = found["flat_transfer_s"] / found["two-level_transfer_s"]
    return [row(f"transfer beside flat, {lab}, m = {members}", times, bar * members, most=False, **found)]


def uplinks(args: argparse.Namespace) -> Figures:
    return {"uplinks": faster("uplinks", 8_000_000, 0.9, args)}


def flowcaps(args: argparse.Namespace) -> Figures:
    return {"flowcaps": faster("flowcaps", 8_000_000, 0.8, args)}


def clouds(args: argparse.Namespace) -> Figures:
    return {"clouds": [over_clouds(SCALE, args)]}


def full(args: argparse.Namespace) -> Figures:
    return {"full": [over_clouds(1.0, args)]}


def over_clouds(scale: float, args: argparse.Namespace) -> Figures:
    """Held against what nobody can beat: the bytes with three of the longest round trips, and CPU time of all
    peers and the router on all cores.
    """
    topology, numel, rounds = load("clouds-4").scaled(scale), int(25_000_000 * scale * args.scale), 5
    asked = inputs(topology, 8, numel, codecs.get("fp16"))
    rates = replace(asked, near_rtt_s=0.0, far_rtt_s=0.0)
    plans = [plan for plan in (flat(rates), two_levels(rates)) if plan is not None]
    best = min(plan.seconds for plan in plans if plan.seconds is not None)
    found = swarm(topology, numel, rounds)
    cpu = 8 * found["cpu_seconds_per_peer"] + found["lab"]["router_cpu_s"] / (rounds + 1)
    busy = cpu / (os.cpu_count() or 1)
    more = {
        "late": found["lab"]["void"],
        "transfer_s": found["phases"]["transfer"],
        "seconds": found["seconds"],
    }
    more |= {"bytes_bound_s": best, "cpu_bound_s": busy, "seconds_first": found["seconds_first"]}
    what = f"seconds of a round, clouds-4, 8 x 25M, all at {scale:g} of the scale"
    bar = max(1.6, 1.15 * (best + 3 * asked.far_rtt_s), 1.15 * busy)
    return row(what, found["seconds_median"], bar, most=True, **more)


def lan(args: argparse.Namespace) -> Figures:
    rows = []
    for peers in (2, 4):
        found = beside("lan-4", 25_000_000 * args.scale, ("flat", "auto"), args.turns, peers)
        ratio = found["flat_s"] / found["auto_s"]
        rows.append(row(f"rate of auto beside flat, lan-4, {peers} hosts", ratio, 0.97, most=False, **found))
    return {"lan": rows}


def lockstep(args: argparse.Namespace) -> Figures:
    found = swarm("two-300ms", 25_000_000 * args.scale, 8)
    more = {"late": found["lab"]["void"], "phases": found["phases"], "seconds": found["seconds"]}
    return {
        "lockstep": [
            row("seconds of a round over 300 ms, 25M", found["seconds_median"], 1.3, most=True, **more)
        ]
    }


def first(lab: str, args: argparse.Namespace) -> Figures:
    rows = []
    with paths_of_its_own():
        for knows, bar in (("blind", 2.0), ("links known from the last run", 1.3)):
            found = swarm(lab, FIRST[lab] * args.scale, 3)
            times = found["seconds_first"] / found["seconds_median"]
            more = {"seconds_first": found["seconds_first"], "seconds": found["seconds"]}
            rows.append(
                row(f"first round beside later ones, {lab}, {knows}", times, bar, most=True)
                | {**more, "late": found["lab"]["void"]}
            )
    return {f"first-{lab}": rows}


@contextmanager
def paths_of_its_own() -> Iterator[None]:
    """What swarms learn of paths is kept from one to the next, and begins with nothing."""
    before = os.environ.get("P2PAVG_PATHS")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["P2PAVG_PATHS"] = str(Path(folder, "paths.json"))
        try:
            yield
        finally:
            del os.environ["P2PAVG_PATHS"]
            if before is not None:
                os.environ["P2PAVG_PATHS"] = before


SECTIONS: dict[str, Callable[[argparse.Namespace], Figures]] = {
    "bytes": bytes_,
    "planning": plan_ms,
    "uplinks": uplinks,
    "flowcaps": flowcaps,
    "clouds": clouds,
    "full": full,
    "lan": lan,
    "lockstep": lockstep,
    **{f"first-{lab}": partial(first, lab) for lab in FIRST},
}


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add_section_options(parser, SECTIONS)
    parser.add_argument("--turns", type=positive_int, default=2, help="of each of two plans (default 2)")
    parser.add_argument("--scale", type=at_least(1e-4), default=1.0, help="of all vectors (default 1)")
    with paths_of_its_own():
        return emit_sections(parser.parse_args(), SECTIONS)


if __name__ == "__main__":
    sys.exit(main())
