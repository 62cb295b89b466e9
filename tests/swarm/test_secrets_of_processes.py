"""Secrets of a closed run, looked for in all that its processes leave for others to see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from p2pavg.credentials import Authority, Credentials, texts
from p2pavg.identity import short_id
from tests.unit.credentials.test_secrets import _forms

PEER = """
import asyncio, logging, sys
import numpy as np
from p2pavg import Peer

async def main():
    async with Peer("r", listen="127.0.0.1:0", initial_peers=sys.argv[1:]) as peer:
        print(peer.address, flush=True)
        await peer.all_reduce(np.ones(1000, np.float32), group_size=2)
        sys.stdin.readline()
        print(peer._settings, peer._runtime._identity, peer._runtime.links, file=sys.stderr)
        raise RuntimeError("what a crash would show")

logging.basicConfig(level=logging.DEBUG, filename=f"{sys.argv[1:] and 'two' or 'one'}.log")
asyncio.run(main(), debug=True)
"""


@pytest.mark.swarm
@pytest.mark.cold  # command lines are looked at
def test_no_secret_is_left_where_others_see_it(tmp_path: Path) -> None:
    """Two processes average with every logger at debug level, and crash: no key in their command lines, logs,
    reports, standard streams, nor in any file that others can read.
    """
    authority, files = Authority.new("r"), []
    members = [authority.member() for _ in range(2)]
    for number, member in enumerate(members):
        files.append(tmp_path / f"member-{number}")
        texts.write(files[-1], member.to_text())
    started: list[subprocess.Popen[str]] = []
    shown = ""
    try:
        for path in files:
            initial = [started[0].stdout.readline().strip()] if started else []
            started.append(
                subprocess.Popen(
                    [sys.executable, "-c", PEER, *initial],
                    cwd=tmp_path,
                    env={**os.environ, "P2PAVG_CREDENTIALS": str(path), "P2PAVG_REPORTS": "reports.jsonl"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        shown += "".join(Path(f"/proc/{p.pid}/cmdline").read_text() for p in started)
        for process in started:
            out, err = process.communicate("\n", timeout=60)
            assert "what a crash would show" in err
            shown += out + err
    finally:
        for process in started:
            process.kill()
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path not in files]
    assert {"one.log", "two.log", "reports.jsonl"} <= {path.name for path in left}
    shown += "".join(path.read_text(errors="replace") for path in left)
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)
    assert all(short_id(member.identity.peer_id) in shown for member in members)  # it is all of theirs
    for secret in _secrets(authority, members):
        assert not any(form in shown for form in _forms(secret))


def _secrets(authority: Authority, members: list[Credentials]) -> list[bytes]:
    return [
        authority.key.private_bytes_raw(),
        authority.run_key,
        *(m.identity.private_bytes() for m in members),
    ]
