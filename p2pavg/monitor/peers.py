"""`p2pavg peers RUN`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from p2pavg.credentials import Credentials, from_environment
from p2pavg.errors import ConfigurationError
from p2pavg.identity import short_id
from p2pavg.membership.peerinfo import PeerInfo
from p2pavg.membership.table.address import Address, format_host_port, initial_addresses
from p2pavg.membership.view import LIFETIME
from p2pavg.monitor.picture import Picture
from p2pavg.monitor.watcher import Watcher
from p2pavg.printable import counted, figure

Row = tuple[PeerInfo, float]  # and the seconds since it last said that it is there
SILENT_S = LIFETIME / 2  # a peer says so every third of the lifetime, or nearly every half


def register(subparsers: Any) -> None:
    """Add the verb to the command line's sub-parsers."""
    peers = subparsers.add_parser(
        "peers",
        description="Prints who is in a run now. Ends with exit code 1 when nobody is.",
        epilog="example: p2pavg peers my-run --initial-peers 10.0.0.5:31330",
    )
    add = peers.add_argument
    add("run_id", metavar="RUN")
    add("--initial-peers", nargs="+", metavar="HOST:PORT", help="any member; default: $P2PAVG_INITIAL_PEERS")
    add("--credentials", metavar="PATH", help="of a closed run; default: $P2PAVG_CREDENTIALS")
    add("--json", metavar="PATH", help="write the table as JSON; - is stdout")
    peers.set_defaults(func=run_peers)


def run_peers(args: argparse.Namespace) -> int:
    """Print the table once."""
    initial_peers = initial_addresses(args.initial_peers or None)
    if not initial_peers:
        raise ConfigurationError("no way into the swarm; name any member with --initial-peers host:port")
    source = args.credentials or from_environment()
    credentials = None if source is None else Credentials.load(source)
    rows = asyncio.run(_members(args.run_id, initial_peers, credentials))
    if args.json is not None:
        document = json.dumps({"run": args.run_id, "peers": [_as_json(*row) for row in rows]}, indent=2)
        if args.json == "-":
            print(document)
            return _code(args.run_id, rows)
        try:
            Path(args.json).write_text(document + "\n")
        except OSError as error:
            raise ConfigurationError(
                f"the table cannot be written to {args.json}: {error.strerror}"
            ) from None
    if rows:
        _print_table(args.run_id, rows)
    return _code(args.run_id, rows)


def _code(run_id: str, rows: Sequence[Row]) -> int:
    """The exit code: 0 when somebody is there. Says it when nobody is."""
    if not rows:
        print(f"p2pavg peers: nobody is in run {run_id!r} (the swarm itself answered)", file=sys.stderr)
    return int(not rows)


async def _members(
    run_id: str, initial_peers: Sequence[Address], credentials: Credentials | None
) -> list[Row]:
    """The records of the run. Raises CredentialError when none can be read with these credentials."""
    watcher = Watcher(Picture(run_id))
    await watcher.start(initial_peers, credentials)
    try:
        members = sorted(watcher.members, key=lambda info: (info.role, info.region, info.peer_id))
        return [(info, watcher.quiet_s(info)) for info in members]
    finally:
        await watcher.close()


def _as_json(info: PeerInfo, quiet_s: float) -> dict[str, Any]:
    return {
        "peer_id": info.peer_id.hex(),
        "name": info.name or short_id(info.peer_id),
        "addresses": [format_host_port(*address) for address in info.addresses],
        "client_only": info.client_only,
        "udp": info.udp,
        "region": info.region,
        "epoch": info.epoch,
        "lineage": info.lineage.hex(),
        "samples_per_second": info.samples_per_second,
        "role": "downloading" if info.joining else info.role,
        "seen_seconds_ago": round(quiet_s, 1),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(info.incarnation / 1000)),
    }


def _print_table(run_id: str, rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    regions = any(info.region for info, _ in rows)
    joining = sum(info.joining for info, _ in rows)
    told = counted(len(rows) - joining, "peer") + (f" and {joining} downloading" if joining else "")
    title = Text(f"run {run_id}: {told}")
    table = Table(title=title, box=None, title_justify="left", pad_edge=False, padding=(0, 1, 0, 0))
    numbers = ("epoch", "samples/s")
    for column in ("peer", "id", "address", *(["region"] if regions else []), "role", *numbers):
        table.add_column(column, justify="right" if column in numbers else "left")
    for info, quiet_s in rows:
        cells = (
            info.name or "-",
            short_id(info.peer_id),
            format_host_port(*info.addresses[0]) if info.addresses else "-",
            *([info.region or "-"] if regions else []),
            f"silent {quiet_s:.0f} s" if quiet_s > SILENT_S else _role(info),
            str(info.epoch),
            figure(info.samples_per_second, 4),
        )
        table.add_row(*map(Text, cells))  # Text, as peers wrote some of it: no markup is read
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if any(quiet_s > SILENT_S for _, quiet_s in rows):
        print(f"silent: it may have died; it is listed until nothing was heard of it for {LIFETIME:.0f} s")
    if any(info.client_only and not info.joining for info, _ in rows):
        print("out only: nobody can open a connection to that peer, it opens them")
    if any(not info.udp for info, _ in rows):
        print("TCP: UDP does not reach that peer, so the others find it over TCP")
    newest = max(info.epoch for info, _ in rows)
    if len({info.lineage for info, _ in rows if info.epoch == newest}) > 1:
        print("peers at the same epoch hold different histories: parts of the swarm have averaged apart")


def _role(info: PeerInfo) -> str:
    """What it does, and how it is reached where that is not the usual way."""
    role = "joining" if info.joining else "out only" if info.client_only else info.role
    return role if info.udp else f"{role}, TCP"
