"""What a peer says by itself: how it joins, its name, and a crowd on one machine."""

from __future__ import annotations

import logging
import socket
import traceback

import pytest

from p2pavg.errors import ConfigurationError
from p2pavg.peer import crowd, notice
from p2pavg.peer.arrival import FIRST_WORD_S, NEXT_WORD_S, Arrival
from p2pavg.peer.peer import Peer
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


async def test_a_long_download_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Who downloads for long says from how many and how far it is, now and then, and where it joined."""
    caplog.set_level(logging.INFO, "p2pavg.peer")
    stands, progress = [(0, True)], [None]
    arrival = Arrival("r", lambda: stands[0], lambda: 3, lambda: progress[0])
    clock = Clock()
    arrival._loop = clock  # type: ignore[assignment]
    arrival.look()
    clock.now += FIRST_WORD_S
    arrival.look()
    progress[0] = (10_000_000, 400_000_000, 2)  # type: ignore[call-overload]
    arrival.look()
    clock.now += NEXT_WORD_S
    arrival.look()
    stands[0] = (7, False)
    arrival.look()
    arrival.look()
    assert [record.getMessage() for record in caplog.records] == [
        "asking 3 peers for the state of run 'r'",
        "downloading the state of run 'r' from 2 peers: 10 of 400 MB",
        "joined run 'r' at epoch 7, with 3 peers",
    ]


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
    assert Peer("r", listen="127.0.0.1:0")._settings.name == socket.gethostname().partition(".")[0][:32]
    assert Peer("r", listen="127.0.0.1:0", name="ada")._settings.name == "ada"
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
