"""How long a read of a large table takes after many deaths, in virtual time, whatever the machine does.

    python -m bench.table_reads --json bench/results/table_reads.json

Fifty of 200 nodes store one key at once, thirty of a hundred die, the living of the fifty store again, and
each survivor reads, four at a time: `bench dht --nodes 200 --kill 0.3` without its processors. Answers come
after 1 to 3 ms. In the second half the storing is a storm, in which answers take 50 to 150 ms: so busy are
two cores that hold 200 nodes.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from p2pavg.bench.dht.simulation import Network, simulate
from p2pavg.bench.options import positive_int
from p2pavg.bench.result import add_output_options, emit, percentile
from p2pavg.membership import DHT, key_of

NODES, PUBLISHERS, DEAD = 200, 50, 60
KEY, VALUE, LIFETIME_S = key_of("bench"), bytes(60), 15.0
ONE_WAY_S, STORM_ONE_WAY_S = 0.001, 0.05  # half less to half more each time
AT_ONCE = 4


async def read_times(seed: int, storm: bool) -> list[float]:
    """Seconds of each survivor's first read."""
    network = Network(seed=seed)
    usual = ONE_WAY_S
    network.delay = lambda source, destination: usual * network.rng.uniform(0.5, 1.5)
    nodes = [await network.start()]
    while len(nodes) < NODES:
        host, port = network.rng.choice(nodes).external_addresses()[0]
        nodes.append(await network.start([f"{host}:{port}"], join_timeout=20.0))
    if storm:
        usual = STORM_ONE_WAY_S
    publishers = network.rng.sample(nodes, PUBLISHERS)
    await asyncio.gather(*(node.store(KEY, VALUE, LIFETIME_S) for node in publishers))
    dead = {nodes[0], *network.rng.sample(nodes[1:], DEAD - 1)}
    await asyncio.gather(*(node.stop() for node in dead))
    await asyncio.gather(*(node.store(KEY, VALUE, LIFETIME_S) for node in publishers if node not in dead))
    usual = ONE_WAY_S
    alive = [node for node in nodes if node not in dead]
    spent = await asyncio.gather(*(_in_turn(alive[at::AT_ONCE]) for at in range(AT_ONCE)))
    await asyncio.gather(*(node.stop() for node in alive))
    return [seconds for times in spent for seconds in times]


async def _in_turn(nodes: list[DHT]) -> list[float]:
    time, spent = asyncio.get_running_loop().time, []
    for node in nodes:
        began = time()
        await node.get(KEY)
        spent.append(time() - began)
    return spent


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--tables", type=positive_int, default=1, help="of each kind (default: %(default)s)")
    add_output_options(parser, plot=False)
    args = parser.parse_args()
    found: dict[str, Any] = {"nodes": NODES, "killed": DEAD, "tables": args.tables}
    lines = []
    for name, storm in (("calm", False), ("storm", True)):
        spent = [s for seed in range(args.tables) for s in simulate(read_times(seed, storm))]
        middle, most = (1000 * percentile(spent, percent) for percent in (50, 99))
        found |= {f"{name}_get_ms_p50": middle, f"{name}_get_ms_p99": most}
        lines.append(f"{name}: {len(spent)} reads, p50 {middle:.0f} ms, p99 {most:.0f} ms")
    emit(args, found, lines)


if __name__ == "__main__":
    main()
