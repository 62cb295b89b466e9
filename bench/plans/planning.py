"""How long a leader plans for 64 members: `python -m bench.plans.planning`.

All rates of pairs are measured, as they are after a round. Prints milliseconds of CPU, the best of five, by
the regions' sizes and by what is asked for: of a plan for members that were planned for before, whose rates
have changed, and of the first one.
"""

from __future__ import annotations

import logging
import random
import time

from p2pavg.allreduce.choosing import Topology
from p2pavg.allreduce.levels import Swaps, _trees
from p2pavg.allreduce.regions import region_of
from p2pavg.report.distance import Where
from p2pavg.report.prices import PriceTable
from p2pavg.rounds.loop.planning import Planner
from p2pavg.rounds.protocol.roles import LinkFacts, PlanMember

SHAPES = ((8,) * 8, (32, 32), (16,) * 4, (4,) * 16, (49, *(1,) * 15), (64,))
NUMEL = 25_000_000


def members(sizes: tuple[int, ...], seed: int) -> list[PlanMember]:
    """Regions of so many members; rates of pairs of two regions are within a factor of 64, of one of two."""
    dice = random.Random(seed)
    where = [region for region, size in enumerate(sizes) for _ in range(size)]
    names = [bytes([rank]) * 20 for rank in range(len(where))]
    paths = {
        (a, b): (1e9, 0.001) if a == b else (1e7 * 2 ** dice.uniform(0, 5), dice.uniform(0.02, 0.3))
        for a in range(len(sizes))
        for b in range(len(sizes))
    }

    def links(rank: int) -> dict[bytes, LinkFacts]:
        found = {}
        for other, region in enumerate(where):
            bps, rtt_s = paths[region, where[rank]]
            if other != rank:
                found[names[other]] = LinkFacts(bps * dice.uniform(1, 2), rtt_s)
        return found

    return [
        PlanMember(names[rank], True, dice.uniform(2e8, 2e9), 0.0, True, links(rank), f"world/r{region}/z")
        for rank, region in enumerate(where)
    ]


def milliseconds(sizes: tuple[int, ...], topology: Topology, *, first: bool) -> float:
    """Of one plan, in CPU time."""
    found = []
    for seed in range(5):
        asked = members(sizes, seed)
        planner = Planner(
            lambda: NUMEL, lambda n: 2 * n, topology, PriceTable({}, {}, {}).between, swaps=Swaps.ALL
        )
        if first:
            _trees.cache_clear()
            region_of.cache_clear()
            Where.parse.cache_clear()
        else:
            planner(members(sizes, seed + 100))
        begun = time.process_time()
        planner(asked)
        found.append(1e3 * (time.process_time() - begun))
    return min(found)


def table() -> dict[str, dict[str, float]]:
    """By shape and, in it, by topology; the first plan under the name of both."""
    logging.getLogger("p2pavg.rounds").setLevel(logging.ERROR)  # which warns of flat plans for so many
    found: dict[str, dict[str, float]] = {}
    for sizes in SHAPES:
        row = found["+".join(map(str, sizes))] = {}
        for topology in Topology:
            row[topology.value] = milliseconds(sizes, topology, first=False)
        row["first"] = max(milliseconds(sizes, topology, first=True) for topology in Topology)
    return found


def main() -> None:
    for shape, row in table().items():
        print(f"{shape:>33}: " + ", ".join(f"{name} {value:.1f} ms" for name, value in row.items()))


if __name__ == "__main__":
    main()
