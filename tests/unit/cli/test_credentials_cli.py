"""The verb `p2pavg credentials`, as a person uses it."""

from __future__ import annotations

import io
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2pavg import cli
from p2pavg.credentials import Credentials, texts


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*words: str) -> int:
    return cli.main(["credentials", *words])


def mode(path: str) -> int:
    return stat.S_IMODE(Path(path).stat().st_mode)


def test_a_newcomer_is_let_in(capsys: pytest.CaptureFixture[str]) -> None:
    """new, request, invite and accept end with credentials that load, and every secret file is private."""
    assert run("new", "my-run") == 0
    capsys.readouterr()
    assert run("request") == 0
    Path("newcomer.request").write_text(capsys.readouterr().out)
    assert run("invite", "my-run.authority", "--request", "newcomer.request", "--days", "2") == 0
    Path("invitation").write_text(capsys.readouterr().out)
    assert run("accept", "invitation") == 0
    loaded = Credentials.load("p2pavg-member.credentials")
    assert loaded.run_id == "my-run"
    for path in ("my-run.authority", "p2pavg-request.key", "p2pavg-member.credentials"):
        assert mode(path) == 0o600


def test_secrets_come_through_stdin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The invitation, and any file that is named -, is read from stdin."""
    run("new", "r", "--out", "-")
    authority = capsys.readouterr().out
    run("request", "--key", "k")
    Path("req").write_text(capsys.readouterr().out)
    monkeypatch.setattr("sys.stdin", io.StringIO(authority))
    assert run("invite", "-", "--request", "req") == 0
    monkeypatch.setattr("sys.stdin", io.StringIO(capsys.readouterr().out))
    assert run("accept", "--key", "k", "--out", "-") == 0
    assert Credentials.load(capsys.readouterr().out).run_id == "r"


def test_count_makes_whole_identities(capsys: pytest.CaptureFixture[str]) -> None:
    """--count N prints N identities of one authority, each for another key, or writes N private files."""
    run("new", "r")
    capsys.readouterr()
    assert run("invite", "r.authority", "--count", "3") == 0
    printed = [Credentials.load(line) for line in capsys.readouterr().out.split()]
    assert len({made.identity.peer_id for made in printed}) == 3
    assert run("invite", "r.authority", "--count", "2", "--out", "spot") == 0
    assert Credentials.load("spot-2").run_key == printed[0].run_key
    assert mode("spot-1") == 0o600


def test_one_secret_for_all() -> None:
    """--shared makes a private file that is enough by itself."""
    assert run("new", "r", "--shared") == 0
    assert mode("r.secret") == 0o600
    assert Credentials.load("r.secret").run_id == "r"


def test_a_request_is_printed_again(capsys: pytest.CaptureFixture[str]) -> None:
    """`request` beside a key that is there prints the same line and keeps the key: an invitation may be on
    its way. A file that is no such key stays, too.
    """
    assert run("request") == 0
    key, sent = Path("p2pavg-request.key").read_text(), capsys.readouterr().out
    assert run("request") == 0
    again = capsys.readouterr()
    assert (again.out, Path("p2pavg-request.key").read_text()) == (sent, key)
    assert "is there already, and this is its request again" in again.err
    run("new", "r")
    assert run("request", "--key", "r.authority") == 1
    assert "not what 'credentials request' stored" in capsys.readouterr().err
    assert Path("r.authority").stat().st_size > 100


def test_show_tells_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    """show names kind, run, peer and end of a file, and prints none of its secret bytes."""
    run("new", "r")
    run("invite", "r.authority", "--count", "1", "--out", "m")
    made = Credentials.load("m-1")
    capsys.readouterr()
    for path, expected in (("r.authority", "authority of run 'r'"), ("m-1", "member of run 'r', for peer ")):
        assert run("show", path) == 0
        shown = capsys.readouterr().out
        assert expected in shown
        assert len(shown) < 120
        for secret in (made.run_key, made.identity.private_bytes()):
            assert secret.hex() not in shown
    assert f"{made.expires:%Y-%m-%d}" in shown


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["invite", "nothing.authority", "--count", "1"], "cannot read"),
        (["invite", "r.authority", "--request", "r.authority"], "not a request"),
        (["invite", "r.authority", "--count", "0"], "--count"),
        (["invite", "r.authority", "--count", "1", "--days", "-1"], "--days"),
        (["invite", "r.authority", "--count", "1", "--days", "nan"], "--days"),
        (["new", "r"], "exists"),
        (["new", "r" * 300], "characters"),
        (["accept", "--key", "r.authority", "r.authority"], "not what"),
        (["show", "p2pavg-secret:AAAA"], "command line"),
        (["show", "readable"], "chmod 600"),
        (["show", "garbage"], "garbage: no credentials of p2pavg"),
        (["invite", "r.authority", "--request", "empty"], "empty: nothing is in there"),
        (["new", "x", "--out", "/nowhere/file"], "cannot write"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake ends with exit code 1 and one line that says what to do."""
    run("new", "r")
    texts.write("readable", Path("r.authority").read_text())
    Path("readable").chmod(0o644)
    Path("garbage").write_text("hello")
    Path("garbage").chmod(0o600)
    Path("empty").touch()
    capsys.readouterr()
    assert run(*words) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert why in told.err
    assert told.err.count("\n") == 1


def test_a_request_that_would_weaken_the_run_key_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A request whose sealing key is a point of low order, rightly signed, is refused."""
    run("new", "r")
    own = Ed25519PrivateKey.generate()
    fields = {
        "key": own.public_key().public_bytes_raw(),
        "sealing_key": bytes(32),
        "signature": own.sign(b"p2pavg request" + bytes(32)),
    }
    Path("req").write_text(texts.to_text("request", fields))
    capsys.readouterr()
    assert run("invite", "r.authority", "--request", "req") == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_too_many_words_show_the_usage_of_their_step(capsys: pytest.CaptureFixture[str]) -> None:
    """A word too many shows the usage of the step that was meant."""
    with pytest.raises(SystemExit) as left:
        run("accept", "one", "two")
    assert left.value.code == 2
    assert "usage: p2pavg credentials accept" in capsys.readouterr().err
