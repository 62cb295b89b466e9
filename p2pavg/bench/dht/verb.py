"""`p2pavg bench dht`: storing and finding records in a table of real nodes, with loss and deaths."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from typing import Any

from p2pavg.bench.options import at_least, positive_int, seed
from p2pavg.bench.progress import progress
from p2pavg.bench.result import add_output_options, emit, percentile
from p2pavg.bench.workers import Workers
from p2pavg.errors import ConfigurationError
from p2pavg.report.plot import plain_log, whole

PROCESSES = 4
STEP_DEADLINE_S = 600.0
SETTLE_S = 120.0  # after so many seconds all who joined are idle
READERS_AT_ONCE = 40  # divided among the processes, in each of which they read in turn


def register(subparsers: Any) -> None:
    """Add the verb to the command line's sub-parsers."""
    parser = subparsers.add_parser(
        "dht",
        description="Nodes in 4 processes store and read one key; requests and answers may be lost.",
        epilog="example: p2pavg bench dht --nodes 200 --kill 0.3 --json -",
    )
    add = parser.add_argument
    add("--nodes", type=positive_int, default=200, metavar="N", help="nodes in all; default: %(default)s")
    add("--publishers", type=positive_int, default=50, metavar="N", help="default: %(default)s")
    add("--k", type=positive_int, default=8, metavar="K", help="copies and bucket size; default: %(default)s")
    add("--loss", type=_fraction, default=0.0, metavar="P", help="datagrams lost each way, 0 to 1")
    add("--without-udp", action="store_true", help="all datagrams are lost, so that TCP carries the table")
    add("--kill", type=_fraction, default=0.0, metavar="FRACTION", help="nodes killed, the bootstrap first")
    add(
        "--lifetime",
        type=at_least(1.0),
        default=15.0,
        metavar="SECONDS",
        help="of a record; default: %(default)s",
    )
    add(
        "--idle-seconds",
        type=at_least(0.0),
        default=0.0,
        metavar="S",
        help="also: what N idle members of a run cost",
    )
    add(
        "--settle-seconds",
        type=at_least(0.0),
        default=SETTLE_S,
        metavar="S",
        help="from when all have joined until a run counts as idle; default: %(default)s",
    )
    add(
        "--simulate",
        type=positive_int,
        metavar="N",
        help="instead: what N idle members cost, in virtual time",
    )
    add("--seed", type=seed, default=0)
    add_output_options(parser)
    parser.set_defaults(func=run)


def _fraction(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not a fraction from 0 to 1")
    return value


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and report it."""
    if args.simulate is not None:
        return _simulate(args)
    if args.publishers > args.nodes:
        raise ConfigurationError("there are more publishers than nodes; raise --nodes or lower --publishers")
    result = measure(args)
    emit(args, result, _lines(result), lambda figure: _draw(figure, result))
    for key in ("get_seconds", "store_seconds"):
        result.pop(key, None)
    return 0


def _simulate(args: argparse.Namespace) -> int:
    """The traffic, in virtual time, of a run too large for one machine, measured when the joining is over."""
    from p2pavg.bench.dht.idle import idle_cost

    with progress(f"simulating {args.simulate} members"):
        cost = idle_cost(args.simulate, warm_seconds=args.settle_seconds, seconds=args.idle_seconds or 60.0)
    result: dict[str, Any] = {
        "simulated": True,
        "members": args.simulate,
        "settle_seconds": args.settle_seconds,
        "member_bytes_per_s_mean": sum(cost.bytes_per_s) / args.simulate,
        "member_bytes_per_s_p99": percentile(cost.bytes_per_s, 99),
        "member_bytes_per_s_max": max(cost.bytes_per_s),
        "member_datagrams_per_s": cost.datagrams_per_s_mean,
        "members_seen_min": min(cost.seen),
    }
    line = (
        f"{args.simulate} simulated members: {result['member_bytes_per_s_mean']:.0f} B/s on average, "
        f"{result['member_bytes_per_s_max']:.0f} at most, {cost.datagrams_per_s_mean:.1f} datagrams/s, both "
        f"directions; each sees at least {min(cost.seen)} others"
    )
    emit(args, result, [line], lambda figure: _draw_traffic(figure, cost.bytes_per_s))
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark; its result as JSON data."""
    rng = random.Random(args.seed)
    owners = [[n for n in range(args.nodes) if n % PROCESSES == p] for p in range(PROCESSES)]
    publishers = rng.sample(range(args.nodes), args.publishers)
    dead = _victims(rng, args)
    if dead.issuperset(publishers):
        raise ConfigurationError("all publishers would be killed; lower --kill or raise --publishers")
    with Workers(PROCESSES, "p2pavg.bench.dht.worker") as workers, progress("bench dht") as _:
        joins = _join(workers, owners, args)
        stores = _each(workers, "store", owners, publishers)
        result: dict[str, Any] = {
            "nodes": args.nodes,
            "publishers": args.publishers,
            "k": args.k,
            "loss": args.loss,
            "without_udp": args.without_udp,
            "kill": args.kill,
            "lifetime_s": args.lifetime,
            "join_ms_p50": _ms(joins, 50),
            "join_ms_max": _ms(joins, 100),
            "store_ms_p50": _ms(_seconds(stores), 50),
            "store_ms_p99": _ms(_seconds(stores), 99),
            "store_seconds": _seconds(stores),
        }
        ids = {int(n): peer_id for answer in stores for n, peer_id in answer["ids"].items()}
        result |= _kill_and_read(workers, owners, args, publishers, ids, dead)
        if args.idle_seconds:
            result |= _idle(workers, args.settle_seconds, args.idle_seconds)
    return result


def _join(workers: Workers, owners: list[list[int]], args: argparse.Namespace) -> list[float]:
    """Start the bootstrap node; then every process starts its nodes, each joining through the one before."""
    config = {"k": args.k, "lifetime": args.lifetime, "without_udp": args.without_udp}
    first = workers.workers[0]
    first.send(do="start", numbers=[0], way_in=[], seed=args.seed, loss=args.loss, **config)
    way_in = [first.receive(STEP_DEADLINE_S)["address"]]
    for index, worker in enumerate(workers.workers):
        loss = args.loss if index else 0.0  # the first process has begun to lose datagrams before
        numbers = [n for n in owners[index] if n != 0]
        seed = args.seed + index
        worker.send(do="start", numbers=numbers, way_in=way_in, seed=seed, loss=loss, **config)
    return [s for w in workers.workers for s in w.receive(STEP_DEADLINE_S)["seconds"]]


def _victims(rng: random.Random, args: argparse.Namespace) -> set[int]:
    count = round(args.kill * args.nodes)
    return {0, *rng.sample(range(1, args.nodes), count - 1)} if count else set()


def _kill_and_read(
    workers: Workers,
    owners: list[list[int]],
    args: argparse.Namespace,
    publishers: list[int],
    ids: dict[int, str],
    dead: set[int],
) -> dict[str, Any]:
    """Kill nodes, let the survivors refresh and each read; read again when the records of the dead have
    ended.
    """
    last_refresh = time.monotonic()
    _each(workers, "kill", owners, sorted(dead))
    alive = [n for n in range(args.nodes) if n not in dead]
    living = [n for n in publishers if n not in dead]
    cold = _read(workers, owners, alive, living, args.lifetime)
    wanted = {ids[n] for n in living}
    found = [len(wanted.intersection(f)) / len(wanted) for answer in cold for f in answer["found"]]
    warm = _read(workers, owners, alive, living, args.lifetime)
    result = {
        "get_ms_p50": _ms(_seconds(cold), 50),
        "get_ms_p99": _ms(_seconds(cold), 99),
        "get_seconds": _seconds(cold),
        "warm_get_ms_p50": _ms(_seconds(warm), 50),
        "gets": len(found),
        "found_fraction": sum(found) / len(found),
    }
    gone = {ids[n] for n in publishers if n in dead}
    wait = last_refresh + args.lifetime + 1.0 - time.monotonic()
    if gone and wait > 0:
        time.sleep(wait)
    late = _read(workers, owners, alive, living, args.lifetime)
    stale = [len(gone.intersection(f)) for answer in late for f in answer["found"]]
    result["stale_fraction"] = sum(stale) / max(1, len(stale) * len(gone))
    return result


def _read(
    workers: Workers, owners: list[list[int]], readers: list[int], publishers: list[int], lifetime: float
) -> list[dict[str, Any]]:
    """Every reader reads once, while the publishers refresh three times in a lifetime."""
    answers: list[dict[str, Any]] = []
    refreshed = float("-inf")
    for at in range(0, len(readers), READERS_AT_ONCE):
        if time.monotonic() - refreshed > lifetime / 3:
            refreshed = time.monotonic()
            _each(workers, "store", owners, publishers)
        answers += _each(workers, "get", owners, readers[at : at + READERS_AT_ONCE])
    return answers


def _idle(workers: Workers, settle: float, seconds: float) -> dict[str, Any]:
    """The cost of membership in a run of all live nodes: let time pass once all know each other."""
    workers.all(do="views_start", deadline_s=STEP_DEADLINE_S)
    workers.all(do="measure", seconds=settle, deadline_s=STEP_DEADLINE_S)
    answers = workers.all(do="measure", seconds=seconds, deadline_s=STEP_DEADLINE_S)
    per_second, wire = ([b / seconds for a in answers for b in a[key]] for key in ("bytes", "wire_bytes"))
    members = len(per_second)
    return {
        "members": members,
        "settle_seconds": settle,
        "member_bytes_per_s_mean": sum(per_second) / members,
        "member_bytes_per_s_max": max(per_second),
        "member_wire_bytes_per_s_mean": sum(wire) / members,
        "member_wire_bytes_per_s_max": max(wire),
        "member_core_fraction": sum(a["cpu_seconds"] for a in answers) / seconds / members,
        "members_seen_min": min(seen for answer in answers for seen in answer["seen"]),
    }


def _each(
    workers: Workers, command: str, owners: list[list[int]], numbers: list[int]
) -> list[dict[str, Any]]:
    for worker, own in zip(workers.workers, owners, strict=True):
        mine = set(own)
        worker.send(do=command, numbers=[n for n in numbers if n in mine])
    return [worker.receive(STEP_DEADLINE_S) for worker in workers.workers]


def _seconds(answers: list[dict[str, Any]]) -> list[float]:
    return [s for answer in answers for s in answer["seconds"]]


def _ms(seconds: list[float], percent: float) -> float:
    return percentile(seconds, percent) * 1000


def _lines(result: dict[str, Any]) -> list[str]:
    lines = [
        f"{result['nodes']} nodes, {result['publishers']} publishers, k = {result['k']}, "
        f"loss {result['loss']:.0%} each way, {result['kill']:.0%} killed",
        f"join    p50 {result['join_ms_p50']:.0f} ms   max {result['join_ms_max']:.0f} ms",
        f"store   p50 {result['store_ms_p50']:.0f} ms   p99 {result['store_ms_p99']:.0f} ms (all at once)",
        f"get     p50 {result['get_ms_p50']:.0f} ms   p99 {result['get_ms_p99']:.0f} ms (first read)   "
        f"p50 {result['warm_get_ms_p50']:.0f} ms (again)",
        f"found   {result['found_fraction']:.4f}   stale {result['stale_fraction']:.4f}",
    ]
    if "members" in result:
        lines.append(
            f"idle    {result['member_bytes_per_s_mean']:.0f} B/s on average, "
            f"{result['member_bytes_per_s_max']:.0f} at most, {result['member_core_fraction']:.2%} of a core "
            f"each, for {result['members']} members; with headers and acknowledgements "
            f"{result['member_wire_bytes_per_s_mean']:.0f} and {result['member_wire_bytes_per_s_max']:.0f}"
        )
    return lines


def _draw(figure: Any, result: dict[str, Any]) -> None:
    axes = figure.add_subplot()
    for name, key in (("get, first read", "get_seconds"), ("store, all at once", "store_seconds")):
        values = sorted(s * 1000 for s in result[key])
        axes.plot(values, [(i + 1) / len(values) for i in range(len(values))], label=name)
    axes.set_xscale("log")
    plain_log(axes.xaxis)
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("fraction done")
    axes.set_title(
        f"{result['nodes']} nodes, {result['kill']:.0%} killed, loss {result['loss']:.0%} each way"
    )
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_traffic(figure: Any, bytes_per_s: Sequence[float]) -> None:
    axes = figure.subplots()
    axes.hist(bytes_per_s, bins=50)
    axes.set_xlabel("bytes per second, both directions")
    axes.set_ylabel("members")
    whole(axes.yaxis)
    axes.set_title(f"{len(bytes_per_s)} simulated members, idle")
