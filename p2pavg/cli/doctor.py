"""`p2pavg doctor`: one page about this machine, and what to do about each thing on it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from p2pavg.cli.machine_checks import Check, CheckResult, checks
from p2pavg.cli.reach import look, told
from p2pavg.errors import ConfigurationError, P2PAvgError
from p2pavg.membership.table.address import Address, parse_host_port
from p2pavg.peer.settings import DEFAULT_PORT

MARKS = {CheckResult.GOOD: "ok", CheckResult.SLOW: "--", CheckResult.BAD: "!!", CheckResult.UNKNOWN: "??"}


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line's sub-parsers."""
    doctor = subparsers.add_parser(
        "doctor",
        description="Looks at this machine: native modules, GPU, ports, addresses, clock, TCP settings, open "
        "files, disk; and says what to do about each. With the address of a member of any run, others try to "
        "reach this machine, too. Ends with exit code 1 when something is wrong.",
        epilog="example: p2pavg doctor 203.0.113.5:31330",
    )
    doctor.add_argument(
        "member", nargs="?", metavar="HOST:PORT", help="who tries to reach this machine; default: nobody"
    )
    doctor.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="the port to try; default: %(default)d"
    )
    doctor.add_argument("--json", metavar="PATH", help="write what was found as JSON; - is stdout")
    doctor.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Look, and tell."""
    if not 1 <= args.port < 65536:
        raise ConfigurationError(f"--port {args.port} is no port; ports are 1 to 65535")
    member = None if args.member is None else parse_host_port(args.member)
    found = list(checks(args.port))
    if member is not None:
        found = [reachability(member, args.port) if check.name == "addresses" else check for check in found]
    if args.json is not None:
        document = json.dumps({"checks": [asdict(check) for check in found]}, indent=2) + "\n"
        if args.json == "-":
            sys.stdout.write(document)
        else:
            Path(args.json).write_text(document)
    if args.json != "-":
        print("\n".join(page(found)))
    return int(any(check.state is CheckResult.BAD for check in found))


def reachability(member: Address, port: int) -> Check:
    """Whether others open connections to this machine, as members find by trying."""
    name = "reached by others"
    try:
        seen = look(member, port)
    except P2PAvgError as error:
        return Check(name, CheckResult.BAD, "nobody answers", str(error))
    first, *rest = told(seen)
    return Check(name, _REACHED[seen.reach], first, " ".join(rest))


_REACHED: dict[str, CheckResult] = {
    "open": CheckResult.GOOD,
    "mapped": CheckResult.GOOD,
    "out only": CheckResult.SLOW,
    "unknown": CheckResult.UNKNOWN,
}


def page(found: Sequence[Check]) -> Iterator[str]:
    """Lines for people."""
    width = max(len(check.name) for check in found)
    for check in found:
        yield f"{MARKS[check.state]}  {check.name:<{width}}  {check.found}"
        if check.advice:
            yield f"    {'':<{width}}  {check.advice}"
    yield ""
    yield ", ".join(f"{mark} {state}" for state, mark in MARKS.items())
