"""`p2pavg launch SCRIPT --to local --peers N`: the shortest way to a swarm."""

from __future__ import annotations

import argparse
from pathlib import Path

from p2pavg.bench.options import positive_int
from p2pavg.errors import ConfigurationError
from p2pavg.launch.local import Local

MOST_PEERS = 64


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line's sub-parsers."""
    launch = subparsers.add_parser(
        "launch",
        description="Starts a training script as several peers of a swarm on this machine, behind a "
        "bootstrap node of their own, and shows what they print. The script builds its optimizer "
        "without initial_peers=, which then come from P2PAVG_INITIAL_PEERS. Ctrl-C lets all of them leave.",
        usage="%(prog)s SCRIPT [--to local] [--peers N] [-- ARGUMENTS OF THE SCRIPT]",
        epilog="example: p2pavg launch examples/train_lm.py --peers 3 -- --epochs 20",
    )
    launch.add_argument("script", metavar="SCRIPT", type=Path, help="a Python script")
    launch.add_argument("--to", choices=("local",), default="local", help="where: processes of this machine")
    launch.add_argument(
        "--peers", type=positive_int, default=2, metavar="N", help="how many; default: %(default)d"
    )
    launch.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Start the peers and wait for them. Returns 0 when each of them ended with 0."""
    if not args.script.is_file():
        raise ConfigurationError(f"there is no script {str(args.script)!r}")
    if args.peers > MOST_PEERS:
        raise ConfigurationError(f"--peers {args.peers} is more than {MOST_PEERS} on one machine")
    return Local(args.script, args.rest, args.peers).run()
