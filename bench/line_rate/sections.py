"""What is measured over which topology: a function for each section, given the rounds and the options."""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from bench.line_rate.contestants import WARM_UP, averaging, in_turn, raw, summary
from bench.line_rate.optimum import PAYLOAD, clouds, shares
from p2pavg.lab.topology import load, shipped

SCALED = ("clouds-4", "six-100ms")  # in `streams`: so many links keep the router busy
SIZES = {"home-4": 400_000, "mixed": 4_000_000, "clouds-4": 5_000_000}  # values; elsewhere 10M


def long(rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """100M values over 300 ms."""
    numel = 100_000_000
    found = in_turn(
        {
            "auto": partial(averaging, "two-300ms", 2, numel),
            "raw 16 streams": partial(raw, "two-300ms", 2 * numel, 16),
            "1 stream": partial(averaging, "two-300ms", 2, numel, "1"),
        },
        rounds,
    )
    auto = found["auto"]["seconds"]
    found["over_one_stream"] = found["1 stream"]["seconds"] / auto
    found["over_raw"] = (auto - 3 * 0.3) / found["raw 16 streams"]["seconds"]
    return found


def quarter(rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """25M values over 300 ms."""
    return in_turn({"auto": partial(averaging, "two-300ms", 2, 25_000_000)}, rounds)


def idle(rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """A minute of silence before every round. Both contestants live, and play one after the other."""
    contestants = {
        name: averaging("two-300ms", 2, 100_000_000, streams)
        for name, streams in (("auto", "auto"), ("1 stream", "1"))
    }
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        for contestant in contestants.values():
            stack.enter_context(contestant.workers)
            contestant.play()
        for _ in range(min(rounds, 3)):
            time.sleep(60.0)
            for contestant in contestants.values():
                contestant.play()
        for name, contestant in contestants.items():
            found[name] = summary(contestant)
    found["over_one_stream"] = found["1 stream"]["seconds"] / found["auto"]["seconds"]
    return found


def flowcap(rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """A cap on each flow; also four times as much, where the latency at both ends of a round weighs less."""
    name = "two-300ms-flowcap"
    sizes = {"auto": 100_000_000, "400M": 400_000_000}
    makers = {size: partial(averaging, name, 2, numel) for size, numel in sizes.items()}
    found = in_turn(makers, min(rounds, 3))
    rate_gbps = load(name).rate_mbps("a", "b") * 1e-3
    found["goodput_over_rate"] = found["auto"]["goodput_gbps"] / rate_gbps
    found["goodput_over_rate_400M"] = found["400M"]["goodput_gbps"] / rate_gbps
    return found


def streams(rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """Automatic against fixed."""
    found: dict[str, Any] = {}
    for name in options.topologies or shipped():
        print(name, flush=True)
        shape, numel = load(name), SIZES.get(name, 10_000_000)
        if name in SCALED:
            shape, numel = shape.scaled(options.scale), int(options.scale * numel)
        peers = min(4, len(shape.hosts))
        makers = {k: partial(averaging, shape, peers, numel, k) for k in ("auto", "1", "4", "8", "16")}
        rows = in_turn(makers, min(rounds, 5), WARM_UP.get(name, 1))
        best = min(row["seconds"] for k, row in rows.items() if k != "auto")
        found[name] = {
            **rows,
            "auto_over_best": rows["auto"]["seconds"] / best,
            "numel": numel,
            "peers": peers,
        }
    return found


def stall(rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """One stream of eight is black-holed when half of an undisturbed transfer has passed."""
    contestant = averaging("two-300ms", 2, 100_000_000, "8")
    workers, rate = contestant.workers, load("two-300ms").rate_mbps("a", "b") * 1e6 * PAYLOAD
    found: dict[str, Any] = {}
    with workers:
        for _ in range(rounds + 1):
            contestant.play()
        found["undisturbed"] = summary(contestant)
        usual, allowed = found["undisturbed"]["seconds"], []
        for _ in range(rounds):
            sport, dport, timeout_s, window = workers.all(deadline_s=30.0, do="flows")[0]["flows"][0]
            workers.all(deadline_s=30.0, do="fill")
            cut = threading.Timer(
                usual / 2, partial(workers.lab.cut_flow, "a", "b", sport=sport, dport=dport, both=True)
            )
            cut.start()
            contestant.play(fill=False)
            cut.join()
            allowed.append(usual + timeout_s + 8 * window / rate)
        contestant.warm_up += rounds
        found["stalled"] = summary(contestant)
    found["allowed"] = statistics.median(allowed)
    found["over_allowed"] = found["stalled"]["seconds"] / found["allowed"]
    return found


def capped(rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """What each of two hosts sends with a cap, headers included, while gradients flow."""
    cap = 200.0
    contestant = averaging("lan-4", 2, 25_000_000, max_upload_mbps=cap)
    rates = []
    with contestant.workers as workers:
        contestant.play()
        for _ in range(rounds):
            workers.all(deadline_s=30.0, do="fill")
            before = workers.lab.stats()
            contestant.play(fill=False)
            moved = workers.lab.stats().since(before).paths
            answers = contestant.measured[-1]
            seconds = max(a["last_byte_at"] for a in answers) - min(a["first_byte_at"] for a in answers)
            rates += [8e-6 * moved[pair].sent_bytes / seconds for pair in (("a", "b"), ("b", "a"))]
        found = summary(contestant)
    measured = statistics.median(rates)
    return {**found, "cap_mbps": cap, "mbps": measured, "most_mbps": max(rates), "over_cap": measured / cap}


def encrypted(rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """Open beside closed."""
    shape, numel = load("two-300ms").scaled(options.scale), int(options.scale * 100_000_000)
    found = in_turn(
        {
            "plain": partial(averaging, shape, 2, numel),
            "encrypted": partial(averaging, shape, 2, numel, encrypted=True),
        },
        rounds,
    )
    found["scale"] = options.scale
    found["rate_over_plain"] = found["plain"]["phases"]["transfer"] / found["encrypted"]["phases"]["transfer"]
    return found


SECTIONS = {
    f.__name__: f for f in (long, quarter, idle, flowcap, streams, shares, clouds, stall, capped, encrypted)
}
