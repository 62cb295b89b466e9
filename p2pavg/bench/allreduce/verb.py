"""`bench allreduce`: N real processes average M float32, on loopback or in the lab."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from p2pavg import codecs
from p2pavg.allreduce.choosing import Topology
from p2pavg.allreduce.regions import NEAR_RTT_S
from p2pavg.bench.allreduce.worker import RUN_ID
from p2pavg.bench.options import at_least, compression, positive_int, processes
from p2pavg.bench.progress import progress
from p2pavg.bench.result import add_output_options, emit
from p2pavg.bench.workers import Workers
from p2pavg.credentials import new_secret
from p2pavg.errors import ConfigurationError
from p2pavg.printable import counted
from p2pavg.report.plot import whole

EXAMPLE = "example: p2pavg bench allreduce --peers 4 --numel 25000000 --compression fp16 --rounds 5"
ROUND_DEADLINE_S = 600.0


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("allreduce", epilog=EXAMPLE)
    add_arguments(parser)
    add_output_options(parser)
    parser.set_defaults(func=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that define a measurement."""
    parser.add_argument("--peers", type=processes, default=2, help="processes (default 2)")
    parser.add_argument(
        "--numel", type=positive_int, default=25_000_000, help="float32 elements (default 25 million)"
    )
    parser.add_argument(
        "--compression",
        type=compression,
        default="fp16",
        help=f"{', '.join(codecs.WIRE_IDS)}, or MODULE:NAME of a Codec of your own; default: fp16",
    )
    parser.add_argument("--streams", type=_streams, default="auto", help="TCP streams per link, or auto")
    parser.add_argument(
        "--rounds", type=positive_int, default=5, help="measured rounds, after one to warm up"
    )
    parser.add_argument("--idle-seconds", type=at_least(0.0), default=0.0, help="pause before every round")
    parser.add_argument(
        "--beside", choices=("none", "python", "torch"), default="none", help="what else every peer computes"
    )
    parser.add_argument("--encrypted", action="store_true", help="as a closed run, with credentials")
    parser.add_argument(
        "--plan", choices=tuple(map(str, Topology)), default="auto", help="how the bytes travel"
    )
    parser.add_argument("--prices", metavar="TOML", help="a price table, for the cheapest plan")
    parser.add_argument(
        "--regions", type=_regions, help="peers in each region, as 4+4; default: by round trips"
    )
    parser.add_argument("--lab", metavar="TOPOLOGY", help="run on the hosts of a lab topology")


def _streams(text: str) -> str | int:
    return text if text == "auto" else positive_int(text)


def _regions(text: str) -> list[int]:
    return [positive_int(size) for size in text.split("+")]


def _names(args: argparse.Namespace) -> list[str]:
    """The region of each peer, in order; "" where none is named."""
    named = [f"bench/{index}" for index, size in enumerate(args.regions or ()) for _ in range(size)]
    if args.regions and len(named) != args.peers:
        raise ConfigurationError(f"--regions names {len(named)} peers, not {args.peers}")
    return named or [""] * args.peers


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    result = measure(args)
    emit(args, result, _words(result), lambda figure: _draw(figure, result))
    return 0


def measure(args: argparse.Namespace, regions: Sequence[str] = ()) -> dict[str, Any]:
    """The result as JSON data. regions: of each peer, by name; none: as `args` says.

    Raises P2PAvgError when a worker fails.
    """
    rounds: list[list[dict[str, Any]]] = []
    with (
        progress("averaging", args.rounds + 1) as advance,
        Workers(args.peers, "p2pavg.bench.allreduce.worker", topology=args.lab) as workers,
    ):
        regions = list(regions) or _names(args)
        joined = workers.join(
            numel=args.numel,
            peers=args.peers,
            compression=args.compression,
            streams=args.streams,
            beside=args.beside,
            plan=args.plan,
            prices=args.prices,
            regions=regions,
            credentials=new_secret(RUN_ID) if args.encrypted else None,
        )
        for index in range(args.rounds + 1):
            if index:
                time.sleep(args.idle_seconds)
            workers.all(deadline_s=ROUND_DEADLINE_S, do="fill")
            rounds.append(workers.all(deadline_s=ROUND_DEADLINE_S, do="round", index=index))
            advance(1)
        lab = workers.lab_verdict()
    where = {answer["peer"]: region for answer, region in zip(joined, regions, strict=True)}
    between = [sum(_between(where, regions[i], a) for i, a in enumerate(answers)) for answers in rounds[1:]]
    more = {
        "bytes_between_regions": statistics.median(between),
        "seconds_first": max(answer["seconds"] for answer in rounds[0]),
    }
    return {**_summary(args, rounds[1:]), **more, **lab}


def _between(where: Mapping[str, str], region: str, answer: Mapping[str, Any]) -> int:
    """Frame bytes that a peer sent to other regions, by the regions' names, or else by RTT."""
    return sum(
        count
        for peer, count, rtt_s in answer["links"]
        if (where.get(peer) != region if region else rtt_s > NEAR_RTT_S)
    )


def _summary(args: argparse.Namespace, rounds: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    seconds = [max(answer["seconds"] for answer in answers) for answers in rounds]
    median = statistics.median(seconds)
    flat = [answer for answers in rounds for answer in answers]
    sent = statistics.median(answer["bytes_sent"] for answer in flat)
    busy = statistics.median(
        max(a["last_byte_at"] for a in answers) - min(a["first_byte_at"] for a in answers)
        for answers in rounds
    )
    return {
        "seconds_median": median,
        "seconds": seconds,
        "gbps_per_peer": 8e-9 * sent / median,
        "bytes_sent_per_peer": sent,
        "plan": args.plan,
        "goodput_gbps": 8e-9 * sent / busy if busy > 0 else None,
        "cpu_seconds_per_peer": statistics.median(answer["cpu_seconds"] for answer in flat),
        "averaging_cpu_seconds_per_peer": statistics.median(
            answer["averaging_cpu_seconds"] for answer in flat
        ),
        "extra_memory_bytes": max(answer["extra_memory_bytes"] for answer in flat),
        "max_abs_error": max(answer["max_abs_error"] for answer in flat),
        "bit_identical": all(len({answer["digest"] for answer in answers}) == 1 for answers in rounds),
        "streams": max(answer["streams"] for answer in flat),
        "peers": args.peers,
        "numel": args.numel,
        "compression": args.compression,
        "beside": args.beside,
        "beside_units_per_second": statistics.median(answer["beside_rate"] for answer in flat),
        "engine": flat[0]["engine"],
        "encrypted": args.encrypted,
        "topology": args.lab,
        "attempts": max(answer["attempts"] for answer in flat),
        "phases": {
            name: statistics.median(answer[name] for answer in flat)
            for name in ("waiting", "matchmaking", "transfer", "commit", "update")
        },
    }


def _words(result: dict[str, Any]) -> list[str]:
    same = "all peers hold the same bits" if result["bit_identical"] else "PEERS DIFFER"
    return [
        f"{counted(result['peers'], 'peer')} averaged {result['numel']:,} float32 ({result['compression']}, "
        f"{result['streams']} streams, {result['engine']}) in {result['seconds_median']:.3f} s (median of "
        f"{len(result['seconds'])}); {same}, largest error {result['max_abs_error']:.2g}",
        f"each sent {result['bytes_sent_per_peer'] / 1e6:.1f} MB, {result['gbps_per_peer']:.2f} Gb/s "
        f"over the round, {result['bytes_between_regions'] / 1e6:.1f} MB in all between regions; "
        f"{result['averaging_cpu_seconds_per_peer']:.3f} CPU seconds of averaging per peer",
        "seconds by phase: " + ", ".join(f"{name} {value:.3f}" for name, value in result["phases"].items()),
    ]


def _draw(figure: Any, result: dict[str, Any]) -> None:
    axes = figure.subplots()
    axes.bar(range(1, len(result["seconds"]) + 1), result["seconds"])
    axes.axhline(result["seconds_median"], linestyle="--", color="black", linewidth=1, label="median")
    axes.legend(loc="lower right")
    whole(axes.xaxis)
    axes.set_xlabel("round")
    axes.set_ylabel("seconds")
    axes.set_title(
        f"{counted(result['peers'], 'peer')}, {result['numel']:,} float32, {result['compression']}"
    )
