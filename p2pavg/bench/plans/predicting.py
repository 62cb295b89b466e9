"""What each plan is predicted to take over a lab topology, whose rates are known. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from p2pavg import codecs
from p2pavg.allreduce.choosing import (
    Choice,
    PlanInputs,
    cheapest_homes,
    dollars,
    flat,
    gather,
    swaps_of,
    two_levels,
)
from p2pavg.allreduce.loads import Capacity, link_rates
from p2pavg.allreduce.regions import regions
from p2pavg.lab.topology import Topology
from p2pavg.plan import MOST_GATHERED
from p2pavg.report.prices import PriceTable

FLAT, TWO_LEVEL, CHEAPEST, GATHER = "flat", "two-level", "cheapest", "all-gather"
_BYTES = 1e6 / 8  # a second, of 1 Mb/s


@dataclass(frozen=True, slots=True)
class Prediction:
    """One plan. seconds: of its transfer, by the rates and the longest round trip of the network. crossing:
    bytes from region to region, contributions and results. dollars: for them.
    """

    name: str
    seconds: float | None
    crossing: float
    dollars: float


def predict(
    topology: Topology, peers: int, numel: int, codec: codecs.Codec, prices: PriceTable | None = None
) -> list[Prediction]:
    """Flat, over regions, the cheapest where there are prices, and what an all-gather of a 64th would take.

    A host's name is taken for the name of its region in the table of prices.
    """
    asked = inputs(topology, peers, numel, codec, prices)
    found: list[tuple[str, PlanInputs, Choice | None]] = [
        (FLAT, asked, flat(asked)),
        (TWO_LEVEL, asked, two_levels(asked)),
    ]
    if prices is not None:
        found.append((CHEAPEST, asked, two_levels(asked, cheapest_homes(asked))))
    if 1 < peers <= MOST_GATHERED:
        few = replace(asked, nbytes=sixty_fourth().encoded_size(numel))
        found.append((GATHER, few, gather(few)))
    return [
        Prediction(name, choice.seconds, crossing(choice, question), choice.dollars)
        for name, question, choice in found
        if choice is not None
    ]


def sixty_fourth() -> codecs.Codec:
    """What `Outer(density=1/64)` sends."""
    return codecs.get("sparse-64")


def inputs(
    topology: Topology, peers: int, numel: int, codec: codecs.Codec, prices: PriceTable | None = None
) -> PlanInputs:
    """What a leader would plan by, had it measured the network as it is."""
    hosts = topology.hosts[:peers]
    pairs = {(a, b): (hosts[a], hosts[b]) for a in range(peers) for b in range(peers) if a != b}
    sharing = Counter(topology.paths[ends].shared for ends in pairs.values())
    shared = {
        # As all plans use the pairs behind one uplink at once, each gets its share.
        pair: topology.rate_mbps(*ends) / (sharing[number] if (number := topology.paths[ends].shared) else 1)
        for pair, ends in pairs.items()
    }
    rtts = {pair: topology.rtt_ms(*ends) / 1000 for pair, ends in pairs.items()}
    groups = regions([""] * peers, rtts)
    cost: Mapping[tuple[int, int], float] | None = None
    if prices is not None:
        cost = {(a, b): 0.0 if a == b else prices.between(hosts[a], hosts[b]) for a in groups for b in groups}
    return PlanInputs(
        numel,
        codec.encoded_size(numel),
        [
            Capacity(_rate(topology.nodes[host].egress_mbps), _rate(topology.nodes[host].ingress_mbps))
            for host in hosts
        ],
        link_rates(peers, {pair: rate * _BYTES for pair, rate in shared.items() if rate < float("inf")}),
        groups,
        max((rtt for (a, b), rtt in rtts.items() if groups[a] == groups[b]), default=0.0),
        max(rtts.values(), default=0.0),
        swaps_of(codec, codecs.for_results(codec)),
        cost,
        [True] * peers,
    )


def names_of_groups(topology: Topology, peers: int) -> list[str]:
    """For each peer the host whose name stands for its region: the first in it."""
    return [topology.hosts[group] for group in inputs(topology, peers, 1, codecs.get("none")).groups]


def crossing(choice: Choice, question: PlanInputs) -> float:
    """Bytes between regions: what the plan costs where each of them costs a dollar."""
    each = {(a, b): float(a != b) for a in question.groups for b in question.groups}
    priced = replace(question, prices=each)
    if choice.plan.gathers:
        return gather(priced).dollars * 1e9
    return dollars(choice.plan, priced) * 1e9


def _rate(mbps: float) -> float | None:
    return mbps * _BYTES or None
