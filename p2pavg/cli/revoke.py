"""`p2pavg credentials revoke`: who is a member no more, told to all members."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import re
from collections.abc import Sequence
from pathlib import Path

from p2pavg.credentials import Authority, certificates, texts
from p2pavg.credentials.statements import REVOCATION_BYTES
from p2pavg.errors import ConfigurationError, CredentialError
from p2pavg.identity import peer_id_of, short_id
from p2pavg.membership import DHT, View
from p2pavg.membership.table.address import Address, parse_addresses, wildcard

TELLER_LIFETIME = datetime.timedelta(hours=1)
_ID = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(r"[0-9a-f]{8}")


def register(step: argparse.ArgumentParser) -> None:
    """Add the options to the step's parser."""
    step.add_argument("authority", metavar="AUTHORITY", help="the file that 'new' made; it is changed")
    step.add_argument(
        "peers",
        nargs="*",
        metavar="PEER",
        help="its id (40 digits), the first eight if it is in the run now, or a file: its request, "
        "invitation or credentials; none: tell again whom the file names already",
    )
    step.add_argument(
        "--initial-peers", nargs="+", default=[], metavar="HOST:PORT", help="members to tell, who tell all"
    )
    step.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Sign, keep, and tell the run."""
    path = Path(args.authority)
    kind, _ = texts.read(path)
    if kind == "secret":
        raise CredentialError(
            "who knows a shared secret cannot be shut out; make a new one and give it to the others"
        )
    authority = Authority.load(path)
    names = [peer for peer in args.peers if _id_of(peer) is None]
    if names and not args.initial_peers:
        raise ConfigurationError(
            f"{names[0]!r} is no file and no id of a peer; with --initial-peers HOST:PORT it is looked for "
            "in the run"
        )
    ids = [peer_id for peer in args.peers if (peer_id := _id_of(peer)) is not None]
    told = f"Revoked in {path}"
    if not args.initial_peers:
        authority = _keep(path, authority, ids)
        print(f"{told}: {_count(authority)}. Tell the run: --initial-peers HOST:PORT of any member.")
        return 0
    named = parse_addresses(args.initial_peers)
    authority, heard, there = asyncio.run(_tell(path, authority, ids, names, named))
    print(f"{told}: {_count(authority)}. {heard} of {there} members in view have confirmed it.")
    if heard < there:
        print("The others learn it from them; repeat this command when in doubt.")
    return 0 if heard or not there else 1


def _keep(path: Path, authority: Authority, ids: list[bytes]) -> Authority:
    revoked = authority.revoke(ids)
    if revoked is not authority and revoked.revoked != authority.revoked:
        texts.replace(path, revoked.to_text())
    return revoked


async def _tell(
    path: Path, authority: Authority, ids: list[bytes], names: list[str], initial_peers: Sequence[Address]
) -> tuple[Authority, int, int]:
    teller = authority.member(TELLER_LIFETIME)
    dht = await DHT.start(
        teller.identity, host=wildcard(), port=0, initial_peers=initial_peers, client_only=True
    )
    view = View(dht, authority.run_id, credentials=teller)
    try:
        await view.refresh_now()
        authority = _keep(path, authority, ids + [_named(name, view) for name in names])
        there = len(view.peers)
        return authority, await view.revoke(authority.revoked), there
    finally:
        view.close()
        await dht.stop()


def _named(name: str, view: View) -> bytes:
    found = [peer_id for peer_id in view.peers if short_id(peer_id) == name]
    if len(found) != 1:
        raise ConfigurationError(
            f"{'nobody' if not found else 'more than one peer'} in the run is called {name!r}; give the id "
            "that 'p2pavg peers --json -' shows"
        )
    return found[0]


def _id_of(peer: str) -> bytes | None:
    """From an id, or a file that belongs to the peer; None: it may be a name. Raises CredentialError."""
    if _ID.fullmatch(peer):
        return bytes.fromhex(peer)
    if _NAME.fullmatch(peer) and not Path(peer).exists():
        return None
    kind, fields = texts.read(Path(peer))
    certificate, key = fields.get("certificate"), fields.get("key")
    if kind in ("member", "invitation") and isinstance(certificate, bytes):
        return peer_id_of(certificates.certificate_key(certificate))
    if kind == "request" and isinstance(key, bytes):
        return peer_id_of(key)
    raise CredentialError(f"this is a p2pavg {kind}, which names no peer; name its request or invitation")


def _count(authority: Authority) -> str:
    count = len(authority.revoked) // REVOCATION_BYTES
    return f"{count} former member{'' if count == 1 else 's'}"
