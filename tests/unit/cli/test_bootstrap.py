"""`p2pavg bootstrap` on whatever port is free."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2pavg import cli
from p2pavg.cli import membership
from p2pavg.identity import Identity
from p2pavg.membership.table.address import parse_host_port
from p2pavg.transport.links import listening


class Stopped:
    """A node that is told to stop as soon as it has said its address."""

    def __enter__(self) -> Stopped:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    async def wait(self) -> None:
        pass


@pytest.fixture
def bootstrap(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs the verb with port 0 and tells the address that it printed; nothing is written at home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(membership, "until_stopped", Stopped)

    def run(*words: str) -> str:
        assert cli.main(["bootstrap", "--listen", "127.0.0.1:0", *words]) == 0
        return capsys.readouterr().out.strip()

    return run


@pytest.mark.parametrize("words", [(), ("--run", "r")])
def test_port_0_is_any_free_one(
    bootstrap: Callable[..., str], words: tuple[str, ...], tmp_path: Path
) -> None:
    """A node that may have any port says which it took; it is nobody who has been there before."""
    host, port = parse_host_port(bootstrap(*words))
    assert host == "127.0.0.1"
    assert port > 0
    assert not list(tmp_path.iterdir())


def test_a_number_that_udp_has_not_free_is_not_taken(
    bootstrap: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number that the system gave for TCP is taken for UDP: the node takes another one for both."""
    given: list[int] = []

    class Given(membership.TablePort):
        """Another program has UDP on the first port that is given."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            if not given:
                other.bind(("127.0.0.1", self.port))
            given.append(self.port)

    monkeypatch.setattr(membership, "TablePort", Given)
    with socket.socket(type=socket.SOCK_DGRAM) as other:
        assert bootstrap() == f"127.0.0.1:{given[1]}"
    assert given[0] != given[1]


def test_two_that_listen_at_once_on_any_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gave one port to two, and the other one listens first: another port is asked for."""
    listen, refused = listening._listen, threading.Event()

    def second(host: str, port: int) -> socket.socket:
        if refused.is_set():
            return listen(host, port)
        refused.set()
        with listen(host, port) as first:
            return listen(host, first.getsockname()[1])

    monkeypatch.setattr(listening, "_listen", second)
    with listening.bind("127.0.0.1", 0, port_is_default=False) as sock:
        assert sock.getsockname()[1] > 0


def test_several_nodes_on_any_port_are_several() -> None:
    """Nodes on any free port are told apart, as their ports are not known when they begin."""
    ids = {membership._identity(None, 0).peer_id for _ in range(2)}
    assert len(ids) == 2


def test_a_port_keeps_its_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node on a port that was chosen is the same after a restart, and another one on another port."""
    monkeypatch.setenv("HOME", str(tmp_path))
    one, again, other = (membership._identity(None, port).peer_id for port in (31330, 31330, 31331))
    assert one == again != other
    named = membership._identity(str(tmp_path / "key"), 0)
    assert named.peer_id == Identity.load_or_create(tmp_path / "key").peer_id


def test_a_wish_that_cannot_be_met_is_told_by_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is no gateway to ask, the sentence names --map-port as it was typed."""
    assert cli.main(["bootstrap", "--listen", "127.0.0.1:0", "--run", "r", "--map-port"]) == 1
    assert "p2pavg bootstrap: --map-port has no gateway to ask: " in capsys.readouterr().err
