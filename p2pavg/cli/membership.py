"""`p2pavg bootstrap` and `p2pavg peers RUN`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from p2pavg.credentials import Credentials, from_environment
from p2pavg.errors import ConfigurationError
from p2pavg.identity import Identity, short_id
from p2pavg.membership.peerinfo import PeerInfo
from p2pavg.membership.table.address import format_host_port, parse_host_port, wildcard
from p2pavg.membership.table.dht import DHT
from p2pavg.membership.view import View

DEFAULT_LISTEN = "0.0.0.0:31330"
Result = TypeVar("Result")


def register(subparsers: Any) -> None:
    """Add the two verbs to the command line's sub-parsers."""
    bootstrap = subparsers.add_parser(
        "bootstrap",
        help="run a node that others name in initial_peers",
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

    peers = subparsers.add_parser(
        "peers",
        help="a table of the peers of a run",
        description="Prints who is in a run now.",
        epilog="example: p2pavg peers my-run --initial-peers 10.0.0.5:31330",
    )
    add = peers.add_argument
    add("run_id", metavar="RUN")
    add("--initial-peers", nargs="+", metavar="HOST:PORT", help="any member; default: $P2PAVG_INITIAL_PEERS")
    add("--credentials", metavar="PATH", help="of a closed run; default: $P2PAVG_CREDENTIALS")
    add("--json", metavar="PATH", help="write the table as JSON; - is stdout")
    peers.set_defaults(func=run_peers)


def run_bootstrap(args: argparse.Namespace) -> int:
    """Run the node until SIGINT or SIGTERM."""
    host, port = parse_host_port(args.listen)
    if args.listen == DEFAULT_LISTEN:
        host = wildcard()
    if args.announce is not None:
        parse_host_port(args.announce)
    path = args.identity or Path("~/.config/p2pavg").expanduser() / f"bootstrap-{port}.key"
    identity = Identity.load_or_create(path)
    return _run(_bootstrap(identity, host, port, _initial_peers(args), args.announce))


async def _bootstrap(
    identity: Identity, host: str, port: int, initial_peers: list[str], announce: str | None
) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    dht = await DHT.start(identity, host=host, port=port, initial_peers=initial_peers)
    try:
        print(announce or format_host_port(*dht.external_addresses()[0]), flush=True)
        await stop.wait()
    finally:
        await dht.stop()
    return 0


def run_peers(args: argparse.Namespace) -> int:
    """Print the table once."""
    initial_peers = _initial_peers(args)
    if not initial_peers:
        raise ConfigurationError("no way into the swarm; name any member with --initial-peers host:port")
    source = args.credentials or from_environment()
    run_key = None if source is None else Credentials.load(source).key_for(b"table")
    rows = _run(_members(args.run_id, initial_peers, run_key))
    if args.json is not None:
        document = json.dumps({"run": args.run_id, "peers": [_as_json(info) for info in rows]}, indent=2)
        if args.json == "-":
            print(document)
            return 0
        try:
            Path(args.json).write_text(document + "\n")
        except OSError as error:
            raise ConfigurationError(
                f"the table cannot be written to {args.json}: {error.strerror}"
            ) from None
    _print_table(args.run_id, rows)
    return 0


async def _members(run_id: str, initial_peers: list[str], run_key: bytes | None) -> list[PeerInfo]:
    dht = await DHT.start(
        Identity.generate(), host=wildcard(), port=0, initial_peers=initial_peers, client_only=True
    )
    view = View(dht, run_id, run_key=run_key)
    try:
        await view.refresh_now()
        return sorted(view.peers.values(), key=lambda info: (info.role, info.region, info.peer_id))
    finally:
        view.close()
        await dht.stop()


def _as_json(info: PeerInfo) -> dict[str, Any]:
    return {
        "peer_id": info.peer_id.hex(),
        "name": short_id(info.peer_id),
        "addresses": [format_host_port(*address) for address in info.addresses],
        "client_only": info.client_only,
        "region": info.region,
        "epoch": info.epoch,
        "lineage": info.lineage.hex(),
        "samples_per_second": info.samples_per_second,
        "role": info.role,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(info.incarnation / 1000)),
    }


def _print_table(run_id: str, rows: list[PeerInfo]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        print(f"nobody is in run {run_id!r} (the swarm itself answered)")
        return
    table = Table(title=Text(f"run {run_id}: {len(rows)} peers"))
    for column in ("peer", "address", "region", "role", "epoch", "lineage", "samples/s"):
        table.add_column(column, justify="right" if column in ("epoch", "samples/s") else "left")
    for info in rows:
        address = format_host_port(*info.addresses[0]) if info.addresses else "-"
        cells = (
            short_id(info.peer_id),
            f"{address} (client only)" if info.client_only else address,
            info.region or "-",
            info.role,
            str(info.epoch),
            info.lineage.hex()[:8] or "-",
            f"{info.samples_per_second:.1f}",
        )
        table.add_row(*map(Text, cells))  # as it is: others wrote some of it
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _initial_peers(args: argparse.Namespace) -> list[str]:
    if args.initial_peers:
        return list(args.initial_peers)
    return [part for part in os.environ.get("P2PAVG_INITIAL_PEERS", "").replace(",", " ").split() if part]


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    import uvloop

    with contextlib.suppress(KeyboardInterrupt):
        return uvloop.run(work)
    raise SystemExit(130)
