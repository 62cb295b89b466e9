"""`p2pavg bootstrap`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from p2pavg.identity import Identity
from p2pavg.membership.table.address import (
    Address,
    format_host_port,
    initial_addresses,
    parse_host_port,
    wildcard,
)
from p2pavg.membership.table.dht import DHT

DEFAULT_LISTEN = "0.0.0.0:31330"
Result = TypeVar("Result")


def register(subparsers: Any) -> None:
    """Add the verb to the command line's sub-parsers."""
    bootstrap = subparsers.add_parser(
        "bootstrap",
        description="Runs a node of the table that does not train; any peer is as good a way in.",
        epilog="example: p2pavg bootstrap --listen 0.0.0.0:31330",
    )
    add = bootstrap.add_argument
    add("--listen", default=DEFAULT_LISTEN, metavar="HOST:PORT", help="default: %(default)s")
    add(
        "--announce",
        metavar="HOST:PORT",
        help="the address to print, if not the one found",
    )
    add("--initial-peers", nargs="*", metavar="HOST:PORT", help="join the table of these nodes")
    add(
        "--identity",
        metavar="PATH",
        help="where the identity is kept; default: in ~/.config/p2pavg, by port",
    )
    bootstrap.set_defaults(func=run_bootstrap)


def run_bootstrap(args: argparse.Namespace) -> int:
    """Run the node until SIGINT or SIGTERM."""
    host, port = parse_host_port(args.listen)
    if args.listen == DEFAULT_LISTEN:
        host = wildcard()
    if args.announce is not None:
        parse_host_port(args.announce)
    named = initial_addresses(args.initial_peers or None)
    path = args.identity or Path("~/.config/p2pavg").expanduser() / f"bootstrap-{port}.key"
    identity = Identity.load_or_create(path)
    return _run(_bootstrap(identity, host, port, named, args.announce))


async def _bootstrap(
    identity: Identity, host: str, port: int, initial_peers: Sequence[Address], announce: str | None
) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    dht = await DHT.start(identity, host=host, port=port, initial_peers=initial_peers)
    if announce is not None:
        dht.node.announced = frozenset([parse_host_port(announce)[0]])
    try:
        print(announce or format_host_port(*dht.external_addresses()[0]), flush=True)
        await stop.wait()
    finally:
        await dht.stop()
    return 0


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    import uvloop

    with contextlib.suppress(KeyboardInterrupt):
        return uvloop.run(work)
    raise SystemExit(130)
