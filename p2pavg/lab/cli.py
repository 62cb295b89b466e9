"""`p2pavg lab up|down|exec|set|stats`."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from p2pavg.errors import ConfigurationError, P2PAvgError
from p2pavg.lab import lab, state, topology
from p2pavg.lab.lab import RunningLab
from p2pavg.lab.stats import LabStats

_FLAGS = {"true": 1.0, "on": 1.0, "yes": 1.0, "false": 0.0, "off": 0.0, "no": 0.0}


def register(subparsers: Any) -> None:
    """Add `lab` and its verbs to a command line."""
    parser = subparsers.add_parser(
        "lab",
        description="An emulated wide-area network on one Linux machine: a network namespace for each host, "
        "the kernel's own TCP, and delay, rate, loss and partitions between them.",
        epilog="example: p2pavg lab up two-300ms && p2pavg lab exec two-300ms a -- iperf3 -c 10.77.0.2",
    )
    add_verbs(parser)


def add_verbs(parser: argparse.ArgumentParser) -> None:
    """Add up, down, exec, set and stats to `parser`."""
    verbs = parser.add_subparsers(metavar="up|down|exec|set|stats", required=True)

    up = verbs.add_parser(
        "up",
        help="start a lab",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="topologies:\n"
        + "\n".join(f"  {name:20} {topology.load(name).description}" for name in topology.shipped())
        + "\n\nexample: p2pavg lab up clouds-4 --name mine",
    )
    up.add_argument("topology", metavar="TOPOLOGY", help="one of those below, or a .toml file")
    up.add_argument("--name", help="what to call it (default: the topology's name)")
    up.set_defaults(func=_up)

    down = verbs.add_parser(
        "down", help="stop a lab and all that runs in it", epilog="example: p2pavg lab down clouds-4"
    )
    down.add_argument("name", metavar="NAME")
    down.set_defaults(func=_down)

    execute = verbs.add_parser(
        "exec", help="run a program on a host", epilog="example: p2pavg lab exec lan-4 a -- ping 10.77.0.2"
    )
    execute.add_argument("name", metavar="NAME")
    execute.add_argument("host", metavar="HOST")
    execute.add_argument("argv", metavar="COMMAND", nargs=argparse.REMAINDER)
    execute.set_defaults(func=_exec)

    change = verbs.add_parser(
        "set",
        help="change a path or a host while the lab runs",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"of a path: {', '.join(topology.PATH_SETTINGS)}\n"
        "           cut=SPORT:DPORT (one flow; 0 is any port), restore=1 (undo all cuts)\n"
        f"of a host: {', '.join(topology.NODE_SETTINGS)}, address=A.B.C.D\n"
        "of a gateway: address=A.B.C.D (its outside address)\n"
        "delay_ms is one way, loss a fraction, a rate of 0 unlimited.\n\n"
        "example: p2pavg lab set two-300ms a:b --both loss=0.01 rate_mbps=100",
    )
    change.add_argument("name", metavar="NAME")
    change.add_argument(
        "target",
        metavar="A:B|HOST|GATEWAY",
        help="the path from A to B, a host, or a gateway; '*' is every host",
    )
    change.add_argument("settings", metavar="KEY=VALUE", nargs="+")
    change.add_argument("--both", action="store_true", help="the path from B to A as well")
    change.set_defaults(func=_set)

    stats = verbs.add_parser(
        "stats",
        help="bytes and packets per ordered host pair, and how late the router was",
        epilog="example: p2pavg lab stats two-300ms --json -",
    )
    stats.add_argument("name", metavar="NAME")
    stats.add_argument("--json", metavar="PATH", help="write the counters as JSON; '-' is stdout")
    stats.set_defaults(func=_stats)


def _up(args: argparse.Namespace) -> int:
    shape = topology.load(args.topology)
    name = args.name or shape.name
    lab.start(shape, name, detached=True)
    running = RunningLab(name)
    print(f"{name}: {shape.description}")
    for host in running.hosts:
        print(f"  {host:8} {running.address(host)}")
    if running.state.priority == "normal":
        print("The router runs at normal priority: watch 'late' in 'p2pavg lab stats'.")
    return 0


def _down(args: argparse.Namespace) -> int:
    with state.exclusive():
        if not state.reclaim(args.name):
            raise P2PAvgError(
                f"No lab {args.name!r} is up; those up are: {', '.join(state.names()) or 'none'}."
            )
    return 0


def _exec(args: argparse.Namespace) -> int:
    running = RunningLab(args.name)
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    command = running.command(args.host, argv or [os.environ.get("SHELL", "/bin/sh")])
    os.execve(command[0], command, running.environment(args.host))


def _set(args: argparse.Namespace) -> int:
    running = RunningLab(args.name)
    settings: dict[str, float] = {}
    cuts: list[tuple[int, int]] = []
    restore = False
    address = ""
    for word in args.settings:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigurationError(f"{word!r} is not KEY=VALUE.")
        try:
            if key == "cut":
                sport, dport = value.split(":")
                cuts.append((int(sport), int(dport)))
            elif key == "address":
                address = value
            elif key == "restore":
                restore = bool(int(value))
            else:
                settings[key] = _FLAGS[value] if value in _FLAGS else float(value)
        except ValueError:
            raise ConfigurationError(f"{word!r}: {value!r} is not a value that {key} can have.") from None
    src, colon, dst = args.target.partition(":")
    if not colon:
        if cuts or restore or args.both:
            raise ConfigurationError("cut, restore and --both are for a path: name it as A:B.")
        if address and src in running.hosts:
            running.set_address(src, address)
        elif address:
            running.set_outside(src, address)
        if settings:
            running.set_node(src, **settings)
        return 0
    if address:
        raise ConfigurationError("address is a setting of a host or a gateway, not of a path.")
    if restore:
        running.restore_flows(src, dst, both=args.both)
    for sport, dport in cuts:
        running.cut_flow(src, dst, sport=sport, dport=dport, both=args.both)
    if settings:
        running.set(src, dst, both=args.both, **settings)
    return 0


def _stats(args: argparse.Namespace) -> int:
    stats = RunningLab(args.name).stats()
    rtts = [
        (path["delay_ns"] + stats.settings[dst, src]["delay_ns"]) * 1e-6
        for (src, dst), path in stats.settings.items()
    ]
    document = stats.to_json(min(rtts))
    if args.json == "-":
        print(json.dumps(document))
        return 0
    if args.json:
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n")
    for line in describe(stats, document["void_reason"]):
        print(line)
    return 0


def describe(stats: LabStats, void_reason: str | None) -> list[str]:
    """The counters as lines for people: every pair that sent something, and the router's lateness."""
    lines = [f"{'path':20} {'sent MB':>10} {'delivered':>10} {'lost':>8} {'dropped':>8} {'cut':>8}"]
    for (src, dst), path in stats.paths.items():
        if path.sent_packets:
            lines.append(
                f"{src + ' > ' + dst:20} {path.sent_bytes / 1e6:10.3f} {path.delivered_bytes / 1e6:10.3f} "
                f"{path.lost_packets:8} {path.dropped_packets:8} {path.cut_packets:8}"
            )
    lines.append(
        f"router: {stats.priority} priority, {stats.cpu_s:.2f} CPU-s in {stats.seconds:.1f} s; "
        f"deliveries late by up to {stats.late_us(50):.0f} us (half), {stats.late_us(99):.0f} us (99%), "
        f"{stats.late_us(100):.0f} us (all)"
    )
    if void_reason:
        lines.append(f"VOID: {void_reason}")
    return lines
