"""What a peer says by itself: how it joins, its name, and a crowd on one machine."""

from __future__ import annotations

import logging
import socket
import traceback
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from p2pavg.errors import ConfigurationError
from p2pavg.membership import PeerInfo
from p2pavg.peer.peer import Peer
from p2pavg.peer.words import company, crowd, notice
from p2pavg.peer.words.observer import Observer
from p2pavg.printable import counted


def test_a_notice_needs_no_logging(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a set-up of logging a notice goes to stderr; whoever silences the logger silences it."""
    monkeypatch.setattr(notice.logger, "hasHandlers", lambda: False)
    notice.tell("joined at epoch %d", 3)
    monkeypatch.setattr(notice.logger, "level", logging.ERROR)
    notice.logger.manager._clear_cache()  # type: ignore[attr-defined]
    notice.tell("joined at epoch %d", 4)
    notice.logger.manager._clear_cache()  # type: ignore[attr-defined]
    assert capsys.readouterr().err == "joined at epoch 3\n"


class Clock:
    """The loop's, moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        return self.now


@pytest.mark.parametrize(("company", "said"), [(3, ["joined run 'r' at epoch 7, with 3 peers"]), (0, [])])
def test_where_a_peer_joined_is_told_once(
    caplog: pytest.LogCaptureFixture, company: int, said: list[str]
) -> None:
    """Whoever finds others says where it joined, once it has the state; who begins a run joins nobody."""
    caplog.set_level(logging.INFO, "p2pavg.peer")
    stands = [(0, True)]
    link: Any = SimpleNamespace(hello={"role": "trainer"}, local_host="h", address=("elsewhere", 1))
    links = {bytes([n]) * 20: SimpleNamespace(**vars(link), peer_id=bytes([n]) * 20) for n in range(company)}
    looking = Observer("r", links, lambda host: False, lambda: stands[0], list, 1)  # type: ignore[arg-type]
    for now in ((0, True), (7, False), (8, False), (9, True), (9, False)):
        stands[0] = now
        looking.standing_changed()
    assert [record.getMessage() for record in caplog.records] == said


def test_who_is_linked_late_says_where_it_joined_too(caplog: pytest.LogCaptureFixture) -> None:
    """A newcomer whose first link comes up after it began to look for the state has not begun the run."""
    caplog.set_level(logging.INFO, "p2pavg.peer")
    stands, links = [(0, True)], {}
    looking = Observer("r", links, lambda host: False, lambda: stands[0], list, 1)
    link: Any = SimpleNamespace(
        hello={"role": "trainer"}, local_host="h", address=("elsewhere", 1), peer_id=b"a" * 20
    )
    links[b"a" * 20] = link
    looking.link_up(link)
    stands[0] = (7, False)
    looking.standing_changed()
    assert [record.getMessage() for record in caplog.records] == ["joined run 'r' at epoch 7, with 1 peer"]


def test_a_machine_whose_address_changes_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A link that begins at another address of this machine than the last one to that peer: said once."""
    first: Any = SimpleNamespace(hello={}, local_host="10.0.0.1", address=("there", 1), peer_id=b"a" * 20)
    moved = SimpleNamespace(**{**vars(first), "local_host": "10.0.0.2"})
    looking = Observer("r", {}, lambda host: False, lambda: (0, False), list, 1)
    for link in (first, first, moved, moved):
        looking.link_up(link)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("this machine's address has changed from 10.0.0.1 to 10.0.0.2")


def test_prices_of_other_regions_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """A price table that names no peer's region: a warning when others are heard, and no second one."""
    link: Any = SimpleNamespace(
        hello={"role": "trainer"}, local_host="h", address=("there", 1), peer_id=b"a" * 20
    )
    here = [PeerInfo(b"a" * 20, (("there", 1),), region="eu-west-1")]
    asked: list[set[str]] = []

    def misplaced(regions: Collection[str]) -> str:
        asked.append(set(regions))
        return "no peer is there"

    links: dict[bytes, Any] = {}
    looking = Observer("r", links, lambda host: False, lambda: (0, False), lambda: here, 1, misplaced)
    looking.beat(set())
    links[b"a" * 20] = link
    for _ in range(3):
        looking.beat(set())
    assert asked == [{"eu-west-1"}]
    assert [record.getMessage() for record in caplog.records] == ["no peer is there"]


@pytest.mark.parametrize(
    ("peers", "threads", "cores", "words"),
    [
        (1, 16, 16, None),
        (2, 8, 16, None),
        (2, 16, 16, "OMP_NUM_THREADS=8"),
        (5, 4, 4, "OMP_NUM_THREADS=1"),
        (5, 1, 4, None),  # more peers than cores: threads cannot help
        (3, 0, 2, None),  # a GPU computes
    ],
)
def test_too_many_threads_are_told(peers: int, threads: int, cores: int, words: str | None) -> None:
    """Peers of one machine whose threads are more than its cores are told how many to use."""
    told = crowd.advice(peers, threads, cores)
    assert (told is None) if words is None else (told is not None and words in told)


def test_a_peer_is_called_like_its_host() -> None:
    """The name is the host's unless one is given; what is no name is refused."""
    assert Peer("r", listen="127.0.0.1:0")._settings.label == socket.gethostname().partition(".")[0][:32]
    assert Peer("r", listen="127.0.0.1:0", name="ada")._settings.label == "ada"
    for name in ("", "x" * 33, 5):
        with pytest.raises(ConfigurationError, match="name must be a text of 1 to 32"):
            Peer("r", listen="127.0.0.1:0", name=name)  # type: ignore[arg-type]


def test_an_error_shows_no_trick() -> None:
    """The traceback of an error of ours ends with a line that a reader can make sense of."""
    peer = Peer("r", listen="198.51.100.1:0")
    with pytest.raises(ConfigurationError, match="cannot listen on") as caught:
        peer.start()
    shown = "".join(traceback.format_exception(caught.value))
    assert "with_traceback" not in shown
    assert "asyncio" not in shown


def test_one_is_not_several() -> None:
    """Counts agree with their nouns."""
    assert [counted(n, "peer") for n in (0, 1, 2)] == ["0 peers", "1 peer", "2 peers"]


def test_losing_all_company_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who hears nobody any more for seconds says so, once, and when somebody is heard again; a short pause,
    or others that leave on purpose, are no news.
    """
    caplog.set_level(logging.INFO, "p2pavg.peer")
    clock = Clock()
    monkeypatch.setattr(company.time, "monotonic", clock.time)
    one, two = b"a" * 20, b"b" * 20
    looking = company.Company("r")
    looking.look({one, two}, set(), [])
    looking.look(set(), set(), [])
    clock.now += company.ALONE_S / 2
    looking.look({one}, set(), [])
    looking.look(set(), {one}, [])
    clock.now += 2 * company.ALONE_S
    looking.look(set(), {one}, [])
    assert not caplog.records
    looking.look({one, two}, set(), [])
    for _ in range(3):
        looking.look(set(), set(), [])
        clock.now += company.ALONE_S
    looking.look({two}, set(), [])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith("nobody of run 'r' is heard any more (2 peers before)")
    assert said[1] == "1 peer of run 'r' heard again"


def test_who_reaches_nobody_is_told_after_seconds(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who finds trainers and gets no link to any says so after seconds, once; who gets one sooner, or had
    company before, is told nothing of ports.
    """
    clock = Clock()
    monkeypatch.setattr(company.time, "monotonic", clock.time)
    trainer = PeerInfo(b"a" * 20, (("127.0.0.1", 4000),))

    def said(*heard: bool) -> list[str]:
        caplog.clear()
        looking = company.Company("r")
        for each in heard:
            looking.look({trainer.peer_id} if each else set(), set(), [trainer])
            clock.now += 0.6 * company.UNREACHED_S
        return [record.getMessage() for record in caplog.records]

    assert said(False, False, True) == []
    alone = said(*[False] * 8)
    assert len(alone) == 1
    assert "127.0.0.1:4000, but none of them answers over TCP" in alone[0]
    assert "over TCP" not in "".join(said(True, *[False] * 8))
