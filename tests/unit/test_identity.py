from __future__ import annotations

import stat
from pathlib import Path

import pytest

from p2pavg.errors import ConfigurationError
from p2pavg.identity import Identity, peer_id_of, short_id, verify


def test_the_peer_id_is_bound_to_the_key() -> None:
    """A peer id is the first 20 bytes of the public key's SHA-256, and two identities differ."""
    one, other = Identity.generate(), Identity.generate()
    assert one.peer_id == peer_id_of(one.public_key)
    assert len(one.peer_id) == 20
    assert len(one.public_key) == 32
    assert one.peer_id != other.peer_id
    assert one.peer_id.hex().startswith(short_id(one.peer_id))  # one name: reports have the whole id
    assert len(short_id(one.peer_id)) == 8


def test_only_the_owner_can_sign() -> None:
    """A signature holds for its message and key, and for nothing else, whatever its length."""
    one, other = Identity.generate(), Identity.generate()
    signature = one.sign(b"message")
    assert verify(one.public_key, b"message", signature)
    assert not verify(one.public_key, b"another", signature)
    assert not verify(other.public_key, b"message", signature)
    assert not verify(one.public_key, b"message", signature[:-1])
    assert not verify(b"", b"message", signature)


def test_identities_follow_from_one_and_a_name() -> None:
    """The same name gives the same identity each time, another name or another origin another one."""
    one, other = Identity.generate(), Identity.generate()
    assert one.derived("a").peer_id == one.derived("a").peer_id
    ids = {made.peer_id for made in (one, one.derived("a"), one.derived("b"), other.derived("a"))}
    assert len(ids) == 4


def test_an_identity_survives_restarts(tmp_path: Path) -> None:
    """The second load gives the same identity, from a file that only its owner can read."""
    path = tmp_path / "deep" / "peer.key"
    first = Identity.load_or_create(path)
    assert Identity.load_or_create(path).peer_id == first.peer_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["peer.key"]


def test_a_broken_identity_file_is_a_clear_error(tmp_path: Path) -> None:
    """A file that holds something else is named, and is not overwritten."""
    path = tmp_path / "peer.key"
    path.write_text("not a key")
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match="delete it"):
        Identity.load_or_create(path)
    assert path.read_text() == "not a key"


def test_an_identity_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """A file that somebody made readable is named, with what to do."""
    path = tmp_path / "peer.key"
    Identity.load_or_create(path)
    path.chmod(0o640)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        Identity.load_or_create(path)


def test_the_private_key_does_not_show() -> None:
    """An identity's representation names the peer and nothing secret."""
    one = Identity.generate()
    assert repr(one) == f"Identity({short_id(one.peer_id)})"
