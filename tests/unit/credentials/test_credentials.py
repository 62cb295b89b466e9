"""Credentials: who gets in, and what a thief of each piece can do with it."""

from __future__ import annotations

import asyncio
import datetime
import os
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg import credentials
from p2pavg.credentials import Authority, Credentials, certificates, environment, texts
from p2pavg.errors import ConfigurationError, CredentialError
from tests.unit.transport.endpoints import Host


def member(authority: Authority, **lifetime: float) -> Credentials:
    """By the long way: request, invitation, accept."""
    kept, request = credentials.new_request()
    invitation = authority.invite(request, datetime.timedelta(**(lifetime or {"days": 1})))
    return credentials.accept(kept, invitation)


async def meet(server: Credentials, client: Credentials) -> tuple[bytes, bytes]:
    """A TLS connection between two members on loopback: (the server's key as the client saw it, and back)."""
    seen: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readexactly(2)
            peer = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            seen.set_result(credentials.certificate_key(peer))
            writer.write(b"hi")
            await writer.drain()
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server.context(server=True))
    port = listening.sockets[0].getsockname()[1]
    try:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=client.context(server=False), server_hostname="p2pavg"
        )
        own = writer.get_extra_info("ssl_object")
        assert own.version() == "TLSv1.3"
        writer.write(b"hi")
        await reader.readexactly(2)
        writer.close()
        return credentials.certificate_key(own.getpeercert(binary_form=True)), await seen
    finally:
        listening.close()


async def test_members_of_one_run_meet() -> None:
    """Two members see each other's own key over TLS 1.3."""
    authority = Authority.new("r")
    one, two = member(authority), Credentials.load(authority.member().to_text())
    keys = await meet(one, two)
    assert keys == (one.identity.public_key, two.identity.public_key)
    assert one.run_key == two.run_key == authority.run_key


async def test_holders_of_one_secret_meet() -> None:
    """A shared secret is enough, and every holder has its own identity."""
    secret = credentials.new_secret("r")
    one, two = Credentials.load(secret), Credentials.load(secret)
    assert one.identity.peer_id != two.identity.peer_id
    assert (await meet(one, two))[0] == one.identity.public_key
    assert one.run_key == two.run_key


async def test_a_member_of_another_run_is_refused() -> None:
    """A certificate of another authority, even for the same run id, opens nothing."""
    with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
        await meet(member(Authority.new("r")), member(Authority.new("r")))


def made_at(monkeypatch: pytest.MonkeyPatch, authority: Authority, **ago: float) -> Credentials:
    """A member for one day, made at another time."""
    with monkeypatch.context() as then:
        moment = datetime.datetime.now(datetime.UTC).replace(microsecond=0) - datetime.timedelta(**ago)
        then.setattr(certificates, "now", lambda: moment)
        return member(authority, days=1)


@pytest.mark.parametrize(("ago", "words"), [(2, "expired at"), (-2, "hold from")])
def test_credentials_tell_both_times_when_they_do_not_hold(
    monkeypatch: pytest.MonkeyPatch, ago: float, words: str
) -> None:
    """Credentials of another time are refused when they are loaded, with their time and the clock's."""
    made = made_at(monkeypatch, Authority.new("r"), days=ago)
    with pytest.raises(CredentialError, match=words) as caught:
        Credentials.load(made.to_text())
    now = datetime.datetime.now(datetime.UTC)
    assert f"clock says {now:%Y-%m-%d}" in str(caught.value)
    assert f"{now - datetime.timedelta(days=ago):%Y-%m-%d}"[:8] in str(caught.value)


@pytest.mark.parametrize("ago", [2, -2])
@pytest.mark.parametrize("who", ["dialler", "listener"])
async def test_a_certificate_of_another_time_names_the_clocks(
    monkeypatch: pytest.MonkeyPatch, who: str, ago: float
) -> None:
    """Whichever side's certificate does not hold now, the dialler is told when it holds and what the clock
    that looked at it says, not that nobody answers.
    """
    authority = Authority.new("run")
    other, right = made_at(monkeypatch, authority, days=ago), member(authority)
    dialler, listener = (other, right) if who == "dialler" else (right, other)
    one, two = Host(dialler.identity), Host(listener.identity)
    await one.start(credentials=dialler)
    await two.start(credentials=listener)
    try:
        with pytest.raises(CredentialError, match=r"holds from .* to .*clock .* says") as caught:
            await one.connect(two)
    finally:
        await one.close()
        await two.close()
    assert f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}" in str(caught.value)
    assert not two.up


async def test_clocks_may_be_a_day_late_and_ten_minutes_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate that ended five minutes ago still works, and begins a day before it was made."""
    authority = Authority.new("r")
    late = member(authority, minutes=-5)
    assert (await meet(member(authority), late))[1] == late.identity.public_key
    Credentials.load(late.to_text())
    fresh = member(authority).to_text()
    now = datetime.datetime.now(datetime.UTC)
    monkeypatch.setattr(certificates, "now", lambda: now - datetime.timedelta(hours=23))
    Credentials.load(fresh)
    monkeypatch.setattr(certificates, "now", lambda: now - datetime.timedelta(hours=25))
    with pytest.raises(CredentialError, match=r"hold from .* and this machine's clock says"):
        Credentials.load(fresh)


def test_a_stolen_invitation_is_useless() -> None:
    """Whoever holds an invitation but not the key of the request gets neither certificate nor run key."""
    authority = Authority.new("r")
    _, request = credentials.new_request()
    thief, _ = credentials.new_request()
    with pytest.raises(CredentialError, match="another key"):
        credentials.accept(thief, authority.invite(request))


def test_an_invitation_does_not_show_the_run_key() -> None:
    """The run key is not in the invitation's bytes."""
    authority = Authority.new("r")
    _, request = credentials.new_request()
    _, fields = texts.from_text(authority.invite(request))
    assert all(authority.run_key not in value for value in fields.values() if isinstance(value, bytes))


def test_a_forged_request_is_refused() -> None:
    """A request whose sealing key was exchanged on the way is refused: the run key would go to the thief."""
    authority = Authority.new("r")
    _, request = credentials.new_request()
    _, thiefs = credentials.new_request()
    fields = {
        **texts.from_text(request)[1],
        "sealing_key": texts.from_text(thiefs)[1]["sealing_key"],
    }
    with pytest.raises(CredentialError, match="signature"):
        authority.invite(texts.to_text("request", fields))


def test_files_are_private(tmp_path: Path) -> None:
    """Secret files are made 0600, never overwritten, and refused when others can read them."""
    path = tmp_path / "member"
    text = Authority.new("r").member().to_text()
    texts.write(path, text)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Credentials.load(path).run_id == "r"
    with pytest.raises(ConfigurationError, match="exists"):
        texts.write(path, text)
    path.chmod(0o644)
    with pytest.raises(CredentialError, match="chmod 600"):
        Credentials.load(path)


@pytest.mark.parametrize("kind", ["authority", "request", "request-key", "invitation"])
def test_the_wrong_piece_says_what_to_do(kind: str) -> None:
    """Training with another piece than a member's names what to do with it."""
    authority = Authority.new("r")
    kept, request = credentials.new_request()
    pieces = {
        "authority": authority.to_text(),
        "request": request,
        "request-key": kept,
        "invitation": authority.invite(request),
    }
    with pytest.raises(CredentialError, match=r"credentials|owner"):
        Credentials.load(pieces[kind])


def test_nothing_secret_in_words() -> None:
    """The repr of credentials and identities shows no key."""
    made = Authority.new("r").member()
    shown = repr(made) + repr(made.identity) + str(made)
    assert made.run_key.hex() not in shown
    assert made.identity.private_bytes().hex() not in shown


@given(st.text(max_size=300), st.sampled_from(texts.KINDS))
def test_any_text_is_refused_in_one_way(text: str, kind: str) -> None:
    """Whatever follows the prefix, reading it gives fields or CredentialError."""
    for source in (text, f"p2pavg-{kind}:{text}"):
        try:
            texts.from_text(source)
        except CredentialError:
            continue


@given(
    st.sampled_from(["member", "secret"]),
    st.dictionaries(
        st.sampled_from(["run", "key", "certificate", "authority", "run_key", "secret"]),
        st.one_of(st.binary(max_size=40), st.text(max_size=5), st.integers(-(2**63), 2**63), st.none()),
    ),
)
def test_any_fields_are_refused_in_one_way(kind: str, fields: dict[str, object]) -> None:
    """Credentials with wrong, missing or damaged fields raise CredentialError."""
    try:
        Credentials.load(texts.to_text(kind, fields))
    except CredentialError:
        return
    assert kind == "secret"


def test_a_certificate_that_only_openssl_refuses() -> None:
    """A damaged authority that cryptography reads and OpenSSL does not is a clear error when it is loaded."""
    made = Authority.new("r").member()
    kind, fields = texts.from_text(made.to_text())
    authority, strict = fields["authority"], 0
    for at in range(30, 40):  # the algorithm and the issuer's name
        damaged = bytearray(authority)
        damaged[at] ^= 8
        try:
            Credentials.load(texts.to_text(kind, {**fields, "authority": bytes(damaged)}))
        except CredentialError as error:
            strict += isinstance(error.__context__, ssl.SSLError)
    assert strict


def test_a_line_in_the_environment_is_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret line is read once from the environment, which children inherit, and is still known here; a
    path stays.
    """
    line = credentials.new_secret("r")
    monkeypatch.setattr(environment, "_line", None)
    monkeypatch.setenv(environment.VARIABLE, line)
    assert credentials.from_environment() == line
    assert environment.VARIABLE not in os.environ
    child = [sys.executable, "-c", f"import os; print(os.environ.get({environment.VARIABLE!r}))"]
    assert subprocess.run(child, capture_output=True, text=True, check=True).stdout.strip() == "None"
    assert credentials.from_environment() == line  # a second optimizer of this process
    monkeypatch.setenv(environment.VARIABLE, "path/of.credentials")
    assert credentials.from_environment() == "path/of.credentials"
    assert os.environ[environment.VARIABLE] == "path/of.credentials"
