"""`p2pavg bootstrap`."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from p2pavg.cli.stopping import until_stopped
from p2pavg.errors import AddressInUseError, ConfigurationError
from p2pavg.identity import Identity
from p2pavg.membership.table.address import (
    Address,
    format_host_port,
    initial_addresses,
    parse_host_port,
    parse_listen,
    wildcard,
)
from p2pavg.membership.table.dht import DHT
from p2pavg.peer.helper import Helper
from p2pavg.peer.ports import PORTS_TRIED
from p2pavg.peer.settings import Settings
from p2pavg.transport.links.listening import TablePort

DEFAULT_LISTEN = "0.0.0.0:31330"
MACHINE_KEY = "~/.config/p2pavg/bootstrap.key"  # one file, however many ports nodes listen on in turn
Result = TypeVar("Result")


def register(subparsers: Any) -> None:
    """Add the verb to the command line's sub-parsers."""
    bootstrap = subparsers.add_parser(
        "bootstrap",
        description="Runs a node of the table that does not train; any peer is as good a way in. With "
        "--run it also helps that run's peers behind NATs to links, and relays for those that get none.",
        epilog="example: p2pavg bootstrap --listen 0.0.0.0:31330 --run my-run",
    )
    add = bootstrap.add_argument
    add(
        "--listen",
        default=DEFAULT_LISTEN,
        metavar="HOST:PORT",
        help="default: %(default)s; port 0: any free one, under an identity of its own",
    )
    add(
        "--announce",
        metavar="HOST:PORT",
        help="the address to print, if not the one found",
    )
    add("--initial-peers", nargs="*", metavar="HOST:PORT", help="join the table of these nodes")
    add(
        "--identity",
        metavar="PATH",
        help="where the identity is kept; default: what follows from ~/.config/p2pavg/bootstrap.key and the "
        "port",
    )
    add(
        "--map-port",
        action=argparse.BooleanOptionalAction,
        help="with --run: ask the gateway to lead a port here; default: in closed runs",
    )
    add("--run", metavar="RUN", help="the run whose peers it helps to links")
    add("--credentials", metavar="PATH", help="of that run, when it is closed")
    add(
        "--max-relay-mbps",
        type=float,
        default=100.0,
        metavar="MBPS",
        help="with --run: most that it relays; 0: nothing; default: %(default)g",
    )
    bootstrap.set_defaults(func=run_bootstrap)


def run_bootstrap(args: argparse.Namespace) -> int:
    """Run the node until SIGINT or SIGTERM."""
    host, port = parse_listen(args.listen)
    if args.listen == DEFAULT_LISTEN:
        host = wildcard()
    if args.announce is not None:
        parse_host_port(args.announce)
    named = initial_addresses(args.initial_peers or None)
    identity = _identity(args.identity, port)
    if args.run is not None:
        settings = Settings(
            args.run,
            initial_peers=args.initial_peers or None,
            listen=args.listen,
            announce=args.announce,
            credentials=args.credentials,
            max_relay_mbps=args.max_relay_mbps,
            map_port=args.map_port,
        )
        return _run(_help(settings, identity))
    if args.credentials is not None:
        raise ConfigurationError("credentials are of a run: name it with --run")
    if args.map_port is not None:
        raise ConfigurationError("a port is mapped for the members of a run: name it with --run")
    return _run(_bootstrap(identity, host, port, named, args.announce))


def _identity(path: str | None, port: int) -> Identity:
    """Of the file, or of this machine and the port. Nobody finds a node on any free port again, and there may
    be several: each is somebody new.
    """
    if path is not None:
        return Identity.load_or_create(path)
    return Identity.load_or_create(MACHINE_KEY).derived(f"bootstrap {port}") if port else Identity.generate()


async def _help(settings: Settings, identity: Identity) -> int:
    helper = Helper(settings, identity)
    with until_stopped() as stop:
        await helper.start()
        try:
            print(format_host_port(*helper.addresses()[0]), flush=True)
            await stop.wait()
        finally:
            await helper.close()
    return 0


async def _bootstrap(
    identity: Identity, host: str, port: int, initial_peers: Sequence[Address], announce: str | None
) -> int:
    with until_stopped() as stop:
        tcp, dht = await _open_ports(identity, host, port, initial_peers)
        try:
            if announce is not None:
                dht.node.announced = frozenset([parse_host_port(announce)[0]])
            try:
                print(announce or format_host_port(*dht.external_addresses()[0]), flush=True)
                await stop.wait()
            finally:
                await dht.stop()
        finally:
            await tcp.close()
    return 0


async def _open_ports(
    identity: Identity, host: str, port: int, initial_peers: Sequence[Address]
) -> tuple[TablePort, DHT]:
    """The TCP and the UDP port on one number; where that may be any, another when UDP has it no more."""
    for attempt in range(PORTS_TRIED):
        tcp = TablePort(host, port)
        try:
            dht = await DHT.start(
                identity, host=host, port=tcp.port, initial_peers=initial_peers, attach=tcp.attach
            )
            return tcp, dht
        except AddressInUseError:
            await tcp.close()
            if port or attempt == PORTS_TRIED - 1:
                raise
        except BaseException:
            await tcp.close()
            raise
    raise AssertionError("the last attempt returns or raises")


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    import uvloop

    with contextlib.suppress(KeyboardInterrupt):
        return uvloop.run(work)
    raise SystemExit(130)
