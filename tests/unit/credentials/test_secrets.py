"""What must not come out, and what must not go in: secrets in words, pickle on any path."""

from __future__ import annotations

import ast
import asyncio
import base64
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import p2pavg
from p2pavg.credentials import Authority, Credentials, texts
from p2pavg.errors import CredentialError
from p2pavg.peer.peer import Peer
from p2pavg.transport.engine import StreamKeys
from p2pavg.transport.links import handshake

UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {("torch", "load"), ("torch", "save"), ("np", "load"), ("numpy", "load")}


def _unsafe(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (a.name for a in names if a.name.split(".")[0] in UNSAFE)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in UNSAFE:
                yield module
            case ast.Attribute(value=ast.Name(id=owner), attr=attr) if (owner, attr) in UNSAFE_CALLS:
                yield f"{owner}.{attr}"
            case ast.Name(id="eval" | "exec" as name):
                yield name


def test_nothing_that_runs_what_it_reads() -> None:
    """No module of the package unpickles, or evaluates what it was sent."""
    root = Path(p2pavg.__file__).parent
    found = {str(path): list(_unsafe(ast.parse(path.read_text()))) for path in root.rglob("*.py")}
    assert len(found) > 100
    assert not {path: names for path, names in found.items() if names}
    assert list(_unsafe(ast.parse("import pickle\ntorch.load(x)\nexec(x)")))  # it would see them


def _forms(secret: bytes) -> set[str]:
    """As it might be written; the middle of base64 whatever comes before."""
    coded = (base64.urlsafe_b64encode(b"x" * shift + secret).decode()[4:-4] for shift in range(3))
    return {secret.hex(), repr(secret), *coded}


def _shows(text: str, made: Credentials) -> bool:
    secrets = (made.identity.private_bytes(), made.run_key)
    return any(form in text for secret in secrets for form in _forms(secret))


def test_no_secret_in_a_representation() -> None:
    """Tools that print variables, as many do under a traceback, print no key: of a run, a peer, or a link."""
    authority = Authority.new("r")
    made = authority.member()
    hello = handshake.make_hello(made.identity, "r", 31330, 5, {})
    for told in (
        authority,
        made,
        made.identity,
        hello,
        settings_with(made),
        StreamKeys(b"s" * 32, b"s" * 32),
    ):
        shown = repr(told)
        assert not _shows(shown, made)
        assert not any(form in shown for form in _forms(hello.token) | _forms(b"s" * 32))


def settings_with(made: Credentials) -> object:
    peer = Peer("r", listen="127.0.0.1:0", credentials=made.to_text())
    assert peer._settings.credentials is not None
    return peer._settings


@pytest.mark.parametrize("damage", ["cut", "no key", "no certificate", "other authority"])
def test_no_secret_in_an_error(damage: str) -> None:
    """The traceback for damaged credentials holds no key."""
    authority = Authority.new("r")
    made = authority.member()
    text = made.to_text()
    assert _shows(text, made)
    kind, fields = texts.from_text(text)
    match damage:
        case "cut":
            text = text[:-60]
        case "no key":
            text = texts.to_text(kind, {**fields, "key": b"short"})
        case "no certificate":
            text = texts.to_text(kind, {**fields, "certificate": b"no"})
        case "other authority":
            text = texts.to_text(kind, {**fields, "authority": Authority.new("r").certificate})
    with pytest.raises(CredentialError) as caught:
        Credentials.load(text).context(server=True)
    assert not _shows("".join(traceback.format_exception(caught.value)), made)


@pytest.mark.parametrize("begin", ["", "credentials ", "p2pavg-membr:", "p2pavg-member "])
def test_no_secret_in_the_name_of_a_file(begin: str) -> None:
    """A line whose beginning is damaged is taken for a file's name, which the error does not repeat."""
    made = Authority.new("r").member()
    with pytest.raises(CredentialError, match="cannot read the credentials file") as caught:
        Credentials.load(begin + made.to_text().partition(":")[2])
    assert not _shows("".join(traceback.format_exception(caught.value)), made)
    with pytest.raises(CredentialError, match=r"no/such/file\.credentials"):
        Credentials.load("no/such/file.credentials")


@pytest.mark.parametrize("given", [5, b"p2pavg-member:AAAA", "~nobody-of-this-name/file"])
def test_what_is_no_path_is_refused(given: Any) -> None:
    """In one sentence, which does not repeat what was given in place of a path."""
    with pytest.raises(CredentialError, match=r"as a path|cannot read") as caught:
        Credentials.load(given)
    assert "AAAA" not in str(caught.value)


async def test_no_secret_in_logs_or_table(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Two members meet and average with every logger at debug level: no key in a log line, nor in the report,
    nor in the records of the table.
    """
    caplog.set_level(logging.DEBUG)
    authority = Authority.new("r")
    members, files = [authority.member() for _ in range(2)], []
    for number, member in enumerate(members):
        files.append(tmp_path / f"{number}")
        texts.write(files[-1], member.to_text())
    listen = "127.0.0.1:0"
    async with (
        Peer("r", listen=listen, credentials=files[0]) as one,
        Peer("r", listen=listen, credentials=files[1], initial_peers=[one.address]) as two,
    ):
        reports = await asyncio.gather(
            one.all_reduce(np.ones(100, np.float32), group_size=2),
            two.all_reduce(np.ones(100, np.float32), group_size=2),
        )
        assert one._runtime is not None
        held = [h.record for h in one._runtime.dht.node.store.live(one._runtime.view._key, 0.0)]
    assert held
    assert caplog.text
    shown = [caplog.text, *(report.to_json() for report in reports)]
    for member in members:
        assert not any(_shows(text, member) for text in shown)
        for secret in (member.identity.private_bytes(), member.run_key):
            assert not any(secret in record.encoded for record in held)
