"""`p2pavg credentials new|request|invite|accept|revoke|show`.

Secrets go into files that only their owner can read, or through stdin and stdout; never onto a command line.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from p2pavg import credentials
from p2pavg.cli import revoke
from p2pavg.credentials import DEFAULT_LIFETIME, Authority, certificates, texts
from p2pavg.errors import ConfigurationError, CredentialError
from p2pavg.identity import peer_id_of, short_id
from p2pavg.peer.settings import MAX_RUN_ID

STDIO = "-"
REQUEST_KEY = "p2pavg-request.key"
MEMBER = "p2pavg-member.credentials"
MOST_IDENTITIES = 1000
MOST_DAYS = 3650


def register(subparsers: Any) -> None:
    """Add the verb to the command line's sub-parsers."""
    parser = subparsers.add_parser(
        "credentials",
        description="Makes what a closed run needs. The owner: new, then invite. A newcomer: request, send "
        "it to the owner, accept the invitation that comes back, and train with credentials=FILE or "
        "P2PAVG_CREDENTIALS=FILE.",
        epilog="example: p2pavg credentials new my-run",
    )
    steps = parser.add_subparsers(dest="step", metavar="STEP", required=True)
    new = _step(steps, "new", "make a run's authority, or its shared secret", "new my-run", _new)
    new.add_argument("run_id", metavar="RUN")
    new.add_argument(
        "--shared",
        action="store_true",
        help="one secret for all peers: simpler, but every holder can let others in, none can be shut out",
    )
    _output(new, "RUN.authority or RUN.secret")

    request = _step(
        steps, "request", "ask to be let in: prints what to send to the owner", "request", _request
    )
    request.add_argument(
        "--key",
        default=REQUEST_KEY,
        metavar="PATH",
        help="where its key is kept; default: %(default)s",
    )

    invite = _step(
        steps, "invite", "let peers in", "invite my-run.authority --request newcomer.request", _invite
    )
    invite.add_argument("authority", metavar="AUTHORITY", help="the file that 'new' made; - is stdin")
    how = invite.add_mutually_exclusive_group(required=True)
    how.add_argument("--request", metavar="PATH", help="the newcomer's request; - is stdin")
    how.add_argument(
        "--count", type=int, metavar="N", help="make N whole identities instead; who holds one is that peer"
    )
    invite.add_argument(
        "--days",
        type=float,
        default=DEFAULT_LIFETIME.days,
        help="how long they may take part; default: %(default)s",
    )
    _output(invite, "stdout; with --count, N files that begin so")

    accept = _step(steps, "accept", "turn an invitation into credentials", "accept my.invitation", _accept)
    accept.add_argument(
        "invitation",
        nargs="?",
        default=STDIO,
        metavar="PATH",
        help="the owner's answer; default: stdin",
    )
    accept.add_argument(
        "--key", default=REQUEST_KEY, metavar="PATH", help="what 'request' stored; default: %(default)s"
    )
    _output(accept, MEMBER)

    revoke.register(
        _step(
            steps,
            "revoke",
            "shut members out, within seconds",
            "revoke my-run.authority 3fa95c04 --initial-peers host:31330",
            revoke.run,
        )
    )

    show = _step(
        steps, "show", "tell what a file is; shows no secret", "show p2pavg-member.credentials", _show
    )
    show.add_argument("source", metavar="PATH", help="any file that these verbs made; - is stdin")


def _step(steps: Any, name: str, words: str, example: str, run: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = steps.add_parser(
        name,
        help=words,
        description=words[0].upper() + words[1:] + ".",
        epilog=f"example: p2pavg credentials {example}",
    )
    parser.set_defaults(func=run)
    return parser


def _output(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--out", metavar="PATH", help=f"default: {default}; - is stdout")


def _new(args: argparse.Namespace) -> int:
    run_id: str = args.run_id
    if not 0 < len(run_id) <= MAX_RUN_ID:
        raise ConfigurationError(f"a run's name has 1 to {MAX_RUN_ID} characters")
    if args.shared:
        path = args.out or _file_name(run_id, "secret")
        then = f"Copy it to every peer, and train with credentials={path!r}."
        _write(path, credentials.new_secret(run_id), then)
        return 0
    path = args.out or _file_name(run_id, "authority")
    then = f"Keep it safe. Next: p2pavg credentials invite {path} --request PATH, or --count N."
    _write(path, Authority.new(run_id).to_text(), then)
    return 0


def _request(args: argparse.Namespace) -> int:
    then = "Send the line below to the run's owner; it is no secret."
    if args.key != STDIO and Path(args.key).exists():  # an invitation may be on its way, for this key alone
        sent = credentials.request_again(_read(args.key))
        print(f"{args.key} is there already, and this is its request again. {then}", file=sys.stderr)
    else:
        kept, sent = credentials.new_request()
        _write(args.key, kept, then, aside=True)
    print(sent)
    return 0


def _invite(args: argparse.Namespace) -> int:
    if not 0 < args.days <= MOST_DAYS:
        raise ConfigurationError(f"--days must be above 0 and at most {MOST_DAYS}")
    if args.request == args.authority == STDIO:
        raise ConfigurationError("only one of authority and request can come from stdin")
    lifetime = datetime.timedelta(days=args.days)
    authority = Authority.load(_read(args.authority))
    if args.request is not None:
        invitation = authority.invite(_read(args.request), lifetime)
        _write(args.out or STDIO, invitation, "Send it to the newcomer; nobody else can use it.")
        return 0
    if not 0 < args.count <= MOST_IDENTITIES:
        raise ConfigurationError(f"--count must be 1 to {MOST_IDENTITIES}")
    out = args.out or STDIO
    for number in range(1, args.count + 1):
        path = out if out == STDIO else f"{out}-{number}"
        _write(path, authority.member(lifetime).to_text(), "Give it to one peer alone.")
    return 0


def _accept(args: argparse.Namespace) -> int:
    made = credentials.accept(_read(args.key), _read(args.invitation))
    path = args.out or MEMBER
    _write(path, made.to_text(), f"Train run {made.run_id!r} with credentials={path!r}.")
    return 0


def _show(args: argparse.Namespace) -> int:
    kind, fields = texts.from_text(_read(args.source))
    print(f"a p2pavg {kind}" + _details(kind, fields))
    return 0


def _details(kind: str, fields: Mapping[str, Any]) -> str:
    run_id, key, certificate = fields.get("run"), fields.get("key"), fields.get("certificate")
    told = f" of run {run_id!r}" if isinstance(run_id, str) else ""
    if kind in ("member", "invitation") and isinstance(certificate, bytes):
        peer = short_id(peer_id_of(certificates.certificate_key(certificate)))
        end = certificates.certificate_end(certificate)
        told += f", for peer {peer}, until {end:%Y-%m-%d %H:%M} UTC"
        if end < datetime.datetime.now(datetime.UTC):
            told += " (expired)"
    elif kind == "request" and isinstance(key, bytes):
        told += f" of peer {short_id(peer_id_of(key))}"
    return told


def _read(path: str) -> str:
    """The line in a file, or on stdin. Raises CredentialError."""
    if path == STDIO:
        try:
            return sys.stdin.read(texts.MAX_TEXT + 1)
        except ValueError:
            raise CredentialError(
                "stdin holds no text; give the line that 'p2pavg credentials' made"
            ) from None
    if path.startswith("p2pavg-") and ":" in path:
        raise CredentialError("secrets do not belong on a command line; name a file, or - for stdin")
    kind, fields = texts.read(Path(path))
    return texts.to_text(kind, fields)


def _write(path: str, text: str, then: str, *, aside: bool = False) -> None:
    """Into a private file, or to stdout; what to do next goes where it does not mix with it."""
    if path == STDIO:
        print(text)
        return
    texts.write(path, text)
    print(f"Wrote {path}, readable by you alone. {then}", file=sys.stderr if aside else sys.stdout)


def _file_name(run_id: str, kind: str) -> str:
    return re.sub(r"[^\w.-]", "_", run_id).lstrip(".-") + "." + kind
