"""Which pairs of NATs two peers pass, how often, how fast: `python -m bench.reach [--tries 100]`.

A lab has a public member and two homes behind each of the nine kinds of NAT. Of all 45 pairs of kinds, both
peers meet again and again, each knowing the other through the member alone; whoever is not met directly is
relayed. Prints a line for each pair whose bar is missed, and a summary.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from p2pavg.bench.machine import environment
from p2pavg.bench.workers import Worker, start
from p2pavg.identity import Identity
from p2pavg.lab import Lab
from p2pavg.lab.topology import parse
from p2pavg.peer.reach.introductions import Introductions
from p2pavg.transport.links.endpoint import Endpoint
from p2pavg.transport.links.link import Link, Message
from p2pavg.transport.python.engine import PythonEngine
from p2pavg.transport.ways.punching import Dependence, Nat, can_meet

RUN = "reach"
PORT = 31330
KINDS = [Nat(mapping, filtering) for mapping in Dependence for filtering in Dependence]
DIRECT_S, RELAYED_S = 2.0, 3.0  # the bars
SHARE = 0.99
DEADLINE_S = 30.0
START_S = 180.0  # in which two dozen processes begin, each with PyTorch


class Member:
    """A worker: one peer without rounds, driven by lines of JSON on its standard input."""

    async def start(self, hidden: bool) -> None:
        """Open its port."""
        self.engine = PythonEngine(self)
        self.endpoint = await Endpoint.start(
            Identity.generate(),
            run_id=RUN,
            listen_host="0.0.0.0",
            listen_port=PORT,
            port_is_default=False,
            engine=self.engine,
            hello={"schema": b"", "role": "watcher", "client_only": hidden},
            streams=1,
            events=self,
        )
        self.introductions = Introductions(self.endpoint, lambda: 1e8, lambda: hidden)

    async def do(self, command: dict[str, Any]) -> dict[str, Any]:
        """One command, one answer."""
        match command:
            case {"do": "who"}:
                return {"peer": self.endpoint.peer_id.hex()}
            case {"do": "dial", "host": host}:
                await self.endpoint.connect(host, PORT, timeout=DEADLINE_S)
            case {"do": "meet", "peer": peer}:
                return await self._meet(bytes.fromhex(peer))
            case {"do": "part", "peer": peer}:
                link = self.endpoint.links.get(bytes.fromhex(peer))
                if link is not None:
                    link.close("the next try")
                while bytes.fromhex(peer) in self.endpoint.links:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        return {}

    async def _meet(self, peer: bytes) -> dict[str, Any]:
        began = time.monotonic()
        met = await self.introductions.meet(peer)
        if not met:
            return {"way": "none", "seconds": time.monotonic() - began}
        link = self.endpoint.links[peer]
        async with asyncio.timeout(DEADLINE_S):
            await link.ready
        return {"way": link.way.value, "seconds": time.monotonic() - began}

    # EndpointEvents and EngineEvents

    def link_up(self, link: Link) -> None:
        """Nothing to do."""

    def link_down(self, link: Link, reason: str) -> None:
        """Nothing more is relayed for it."""
        self.introductions.link_down(link)

    def message(self, link: Link, message: Message) -> None:
        """What others ask."""
        self.introductions.message(link, message)

    def stream_closed(self, link: int, stream: int, reason: str) -> None:
        """It is opened again."""
        self.endpoint.stream_closed(link, stream, reason)


async def work(hidden: bool) -> None:
    """A worker's main loop."""
    member, loop = Member(), asyncio.get_running_loop()
    await member.start(hidden)
    while line := await loop.run_in_executor(None, sys.stdin.buffer.readline):
        sys.stdout.write(json.dumps(await member.do(json.loads(line))) + "\n")
        sys.stdout.flush()


def topology(rtt_ms: float, early_syn: str) -> str:
    """A member and two homes of each kind."""
    names = [f"{side}{number}" for number in range(len(KINDS)) for side in "ab"]
    made = f"hosts = {json.dumps(['member', *names])}\n"
    for number, nat in enumerate(KINDS):
        for side in "ab":
            made += f'[gateways.g{side}{number}]\nhosts = ["{side}{number}"]\n'
            made += f'nat = "{nat.mapping}/{nat.filtering}"\nearly_syn = "{early_syn}"\n'
    return made + f"[[paths]]\nrtt_ms = {rtt_ms}\n"


def rounds(pairs: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The pairs in groups in which nobody meets two others at once."""
    groups: list[list[tuple[int, int]]] = []
    for one, other in pairs:
        mine = {f"a{one}", f"b{other}"}
        for group in groups:
            if not any(mine & {f"a{a}", f"b{b}"} for a, b in group):
                group.append((one, other))
                break
        else:
            groups.append([(one, other)])
    return groups


def measure(tries: int, rtt_ms: float, early_syn: str, pairs: list[tuple[int, int]]) -> dict[str, Any]:
    """Every pair, so many times."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {pair: [] for pair in pairs}
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with Lab(parse(topology(rtt_ms, early_syn), "reach")) as lab:
        workers: dict[str, Worker] = {}
        needed = {f"a{one}" for one, _ in pairs} | {f"b{other}" for _, other in pairs}
        try:
            for index, host in enumerate(["member", *sorted(needed)]):
                argv = [sys.executable, "-m", "bench.reach", "--work", "member" if index == 0 else "home"]
                workers[host] = Worker(index, start(argv, env, lab=lab, host=host))
            peers = {}
            for host, worker in workers.items():
                worker.send(do="who")
                peers[host] = worker.receive(START_S)["peer"]
            for host in needed:
                workers[host].send(do="dial", host=lab.address("member"))
            for host in needed:
                workers[host].receive(DEADLINE_S)
            for _ in range(tries):
                for group in rounds(pairs):
                    for one, other in group:
                        workers[f"a{one}"].send(do="meet", peer=peers[f"b{other}"])
                    for one, other in group:
                        found[one, other].append(workers[f"a{one}"].receive(DEADLINE_S))
                    for one, other in group:
                        workers[f"a{one}"].send(do="part", peer=peers[f"b{other}"])
                        workers[f"b{other}"].send(do="part", peer=peers[f"a{one}"])
                    for one, other in group:
                        workers[f"a{one}"].receive(DEADLINE_S)
                        workers[f"b{other}"].receive(DEADLINE_S)
        finally:
            for worker in workers.values():
                worker.close()
    return {"pairs": [row(KINDS[one], KINDS[other], found[one, other]) for one, other in pairs]}


def row(one: Nat, other: Nat, tried: list[dict[str, Any]]) -> dict[str, Any]:
    """What became of one pair."""
    possible = can_meet(one, other)
    wanted, most = ("punched", DIRECT_S) if possible else ("relayed", RELAYED_S)
    seconds = [try_["seconds"] for try_ in tried if try_["way"] == wanted]
    good = sum(second <= most for second in seconds)
    return {
        "one": f"{one.mapping}/{one.filtering}",
        "other": f"{other.mapping}/{other.filtering}",
        "possible": possible,
        "tries": len(tried),
        "good": good,
        "ways": {way: sum(t["way"] == way for t in tried) for way in ("punched", "relayed", "none")},
        "seconds_median": statistics.median(seconds) if seconds else None,
        "seconds_most": max(seconds, default=None),
    }


def summary(pairs: list[dict[str, Any]], way: str) -> dict[str, float]:
    """Of pairs that are all to be linked in one way."""
    medians = [pair["seconds_median"] for pair in pairs if pair["seconds_median"] is not None]
    return {
        "pairs": len(pairs),
        "tries": sum(pair["tries"] for pair in pairs),
        "linked": sum(pair["ways"][way] for pair in pairs),
        "in_time": sum(pair["good"] for pair in pairs),
        "seconds_median": round(statistics.median(medians), 3) if medians else 0.0,
        "seconds_most": round(max((pair["seconds_most"] or 0.0 for pair in pairs), default=0.0), 3),
    }


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m bench.reach", description=__doc__)
    add = parser.add_argument
    add("--tries", type=int, default=100, help="of each pair; default: %(default)s")
    add("--rtt-ms", type=float, default=40.0, help="between any two; default: %(default)s")
    add(
        "--early-syn", choices=("drop", "reset"), default="drop", help="what a NAT does with an uninvited SYN"
    )
    add("--pairs", choices=("all", "direct", "relayed"), default="all", help="which; default: %(default)s")
    add("--pair", help="one pair alone, such as independent/port:port/address")
    add("--json", metavar="PATH", type=Path)
    add("--work", choices=("member", "home"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.work:
        asyncio.run(work(args.work == "home"))
        return 0
    pairs = [
        (one, other)
        for one, other in itertools.combinations_with_replacement(range(len(KINDS)), 2)
        if args.pairs == "all" or can_meet(KINDS[one], KINDS[other]) == (args.pairs == "direct")
    ]
    if args.pair:
        names = [f"{nat.mapping}/{nat.filtering}" for nat in KINDS]
        one, other = sorted(names.index(name) for name in args.pair.split(":"))
        pairs = [(one, other)]
    result = {"environment": environment(), "rtt_ms": args.rtt_ms, "early_syn": args.early_syn}
    result |= measure(args.tries, args.rtt_ms, args.early_syn, pairs)
    for pair in result["pairs"]:
        if pair["good"] < SHARE * pair["tries"] or args.pair:
            print(f"{pair['one']} and {pair['other']}: {pair['ways']}, median {pair['seconds_median']}")
    for possible, name in ((True, "direct"), (False, "relayed")):
        of = [pair for pair in result["pairs"] if pair["possible"] is possible]
        if of:
            found = summary(of, "punched" if possible else "relayed")
            result |= {f"{name}_{figure}": value for figure, value in found.items()}
            print(f"{name}: {found}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
