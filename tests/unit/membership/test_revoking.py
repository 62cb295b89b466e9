"""A member that must go: links, rounds and the command that revokes it, with real peers on loopback."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from p2pavg.cli import main
from p2pavg.credentials import Authority, accept, new_request, texts
from p2pavg.errors import CredentialError
from p2pavg.identity import short_id
from p2pavg.peer.peer import Peer
from tests.unit.transport.endpoints import DEADLINE_S
from tests.unit.transport.engine_swarm import poll

RUN = "revoking"


async def test_a_revoked_member_has_no_link_after_seconds(tmp_path: Path) -> None:
    """The owner names a member by eight digits: its links end, it is told why, the others average without
    it, and its credentials let it in no more.
    """
    file = tmp_path / "run.authority"
    texts.write(file, Authority.new(RUN).to_text())
    authority = Authority.load(file)
    members = [authority.member() for _ in range(3)]

    def peer(number: int, *known: Peer) -> Peer:
        ways = [other.address for other in known]
        text = members[number].to_text()
        return Peer(RUN, listen="127.0.0.1:0", credentials=text, initial_peers=ways)

    async with peer(0) as one, peer(1, one) as two:
        async with peer(2, one) as gone:
            ones = np.ones(100, np.float32)
            average = [asyncio.create_task(p.all_reduce(ones.copy(), group_size=3)) for p in (one, two, gone)]
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.gather(*average)
            arguments = ["credentials", "revoke", str(file), short_id(gone.peer_id)]
            code = await asyncio.to_thread(main, [*arguments, "--initial-peers", two.address])
            assert code == 0
            await poll(lambda: gone.peer_id not in one.peers and gone.peer_id not in two.peers)
            with pytest.raises(CredentialError, match="revoked"):
                async with asyncio.timeout(DEADLINE_S):
                    await gone.all_reduce(ones.copy(), group_size=3)
            pair = [asyncio.create_task(p.all_reduce(ones.copy(), group_size=2)) for p in (one, two)]
            async with asyncio.timeout(DEADLINE_S):
                reports = await asyncio.gather(*pair)
            assert all(len(report.members) == 2 for report in reports)
        with pytest.raises(CredentialError, match="revoked"):
            async with peer(2, one) as again, asyncio.timeout(DEADLINE_S):
                await again.all_reduce(ones.copy(), group_size=3)


def test_the_authoritys_file_keeps_whom_it_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids and files of peers are revoked once each, in a file that only its owner can read and that keeps
    them all.
    """
    file, invited = tmp_path / "run.authority", tmp_path / "peer.credentials"
    texts.write(file, Authority.new(RUN).to_text())
    authority = Authority.load(file)
    member = authority.member()
    texts.write(invited, member.to_text())
    assert main(["credentials", "revoke", str(file), str(invited), "ab" * 20]) == 0
    assert main(["credentials", "revoke", str(file), member.identity.peer_id.hex()]) == 0
    assert "2 former members" in capsys.readouterr().out
    assert file.stat().st_mode & 0o077 == 0
    request, invitation = tmp_path / "peer.request", tmp_path / "peer.invitation"
    _, asked = new_request()
    kept, answered = new_request()
    texts.write(request, asked)
    texts.write(invitation, authority.invite(answered))
    assert main(["credentials", "revoke", str(file), str(request), str(invitation)]) == 0
    assert main(["credentials", "revoke", str(file)]) == 0
    assert capsys.readouterr().out.count("4 former members") == 2
    revoked = Authority.load(file).revoked
    assert member.identity.peer_id in revoked
    assert accept(kept, invitation.read_text().strip()).identity.peer_id in revoked
    assert len(list(tmp_path.iterdir())) == 4


async def test_the_file_tells_again_whom_it_revoked(tmp_path: Path) -> None:
    """After all members were stopped nobody alive knows who was revoked: the command without a name tells."""
    file = tmp_path / "run.authority"
    texts.write(file, Authority.new(RUN).to_text())
    authority = Authority.load(file)
    one, gone = authority.member(), authority.member()
    assert main(["credentials", "revoke", str(file), gone.identity.peer_id.hex()]) == 0
    async with Peer(RUN, listen="127.0.0.1:0", credentials=one.to_text()) as peer:
        await peer.all_reduce(np.ones(100, np.float32), group_size=1)  # from then on it is in view
        assert peer._runtime is not None
        view = peer._runtime.view
        assert not view.is_revoked(gone.identity.peer_id)
        arguments = ["credentials", "revoke", str(file), "--initial-peers", peer.address]
        assert await asyncio.to_thread(main, arguments) == 0
        assert view.is_revoked(gone.identity.peer_id)


def test_what_cannot_be_revoked_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name without a way into the run, a file that names no peer and a shared secret are one clear line."""
    file, secret = tmp_path / "run.authority", tmp_path / "run.secret"
    texts.write(file, Authority.new(RUN).to_text())
    assert main(["credentials", "new", "another", "--shared", "--out", str(secret)]) == 0
    for arguments, words in (
        ([str(file), "3fa95c04"], "--initial-peers"),
        ([str(file), str(file)], "names no peer"),
        ([str(secret), "ab" * 20], "shared secret"),
    ):
        assert main(["credentials", "revoke", *arguments]) == 1
        told = capsys.readouterr().err
        assert words in told
        assert len(told.strip().splitlines()) == 1
