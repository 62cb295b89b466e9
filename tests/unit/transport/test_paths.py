"""What is remembered of paths between runs."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import pytest

from p2pavg.transport import paths as paths_module
from p2pavg.transport.links.streams.count import StreamCount, StreamTransfer
from p2pavg.transport.paths import MOST, OLDEST_S, PathFacts, Paths, usual_file

HERE, THERE = "10.0.0.1", "10.0.1.1"


def facts(rtt_s: float = 0.1, brings_bps: float = 5e7, streams: int = 24, age: float = 0.0) -> PathFacts:
    return PathFacts(rtt_s, brings_bps, streams, time.time() - age)


def test_a_later_run_knows_the_path(tmp_path: Path) -> None:
    """What one process learned the next one knows, of that pair of hosts, at that round trip."""
    file, learned = tmp_path / "cache" / "paths.json", facts()
    first = Paths(file)
    assert first.known(HERE, THERE, 0.1) is None
    first.learn(HERE, THERE, learned)
    first.save()
    later = Paths(file)
    assert later.known(HERE, THERE, 0.11) == learned
    assert later.known(HERE, THERE, 0.3) is None  # another way than then
    assert later.known(THERE, HERE, 0.1) is None


def test_processes_of_one_machine_keep_what_others_wrote(tmp_path: Path) -> None:
    """Two that learn different paths at once both find them again, and nothing else lies in the folder."""
    file = tmp_path / "paths.json"
    one, other = Paths(file), Paths(file)
    one.learn(HERE, THERE, facts())
    other.learn(HERE, "10.0.2.1", facts())
    one.save()
    other.save()
    later = Paths(file)
    assert later.known(HERE, THERE, 0.1)
    assert later.known(HERE, "10.0.2.1", 0.1)
    assert list(tmp_path.iterdir()) == [file]


def test_two_that_write_at_once_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that saves while another has read the file, and not written it yet, waits for that one."""
    monkeypatch.setattr(paths_module, "_PATIENCE_S", 60.0)
    file = tmp_path / "paths.json"
    one, other = Paths(file), Paths(file)
    one.learn(HERE, THERE, facts())
    other.learn(HERE, "10.0.2.1", facts())
    meanwhile = threading.Thread(target=other.save)
    read = one._read

    def read_slowly() -> dict[str, PathFacts]:
        found = read()
        meanwhile.start()
        meanwhile.join(0.2)
        return found

    monkeypatch.setattr(one, "_read", read_slowly)
    one.save()
    meanwhile.join()
    later = Paths(file)
    assert later.known(HERE, THERE, 0.1)
    assert later.known(HERE, "10.0.2.1", 0.1)


def test_old_near_and_unmeasured_paths_do_not_count(tmp_path: Path) -> None:
    """A month later a path may be another one; a near one costs a first round nothing."""
    file = tmp_path / "paths.json"
    paths = Paths(file)
    paths.learn(HERE, "old", facts(age=OLDEST_S + 60))
    paths.learn(HERE, "near", facts(rtt_s=0.0005))
    paths.learn(HERE, "idle", facts(brings_bps=0.0, streams=0))
    paths.save()
    assert not any(
        Paths(file).known(HERE, there, rtt) for there, rtt in (("old", 0.1), ("near", 0.0005), ("idle", 0.1))
    )


def test_a_machine_keeps_nothing_of_its_way_to_itself(tmp_path: Path) -> None:
    """A busy machine answers itself late and brings little, which says nothing of its next run; what an
    earlier version kept does not count.
    """
    file = tmp_path / "paths.json"
    paths = Paths(file)
    paths.learn(HERE, HERE, facts(rtt_s=0.02, brings_bps=1e6))
    assert paths.known(HERE, HERE, 0.02) is None
    paths.learn(HERE, THERE, facts(rtt_s=0.02))
    paths.save()
    file.write_text(file.read_text().replace(THERE, HERE))
    assert Paths(file).known(HERE, HERE, 0.02) is None


def test_the_file_is_bounded(tmp_path: Path) -> None:
    """Of more paths than fit the newest are kept."""
    file = tmp_path / "paths.json"
    paths = Paths(file)
    for number in range(MOST + 5):
        paths.learn(HERE, str(number), facts(age=1000.0 - number / 10))
    paths.save()
    later = Paths(file)
    assert later.known(HERE, "4", 0.1) is None
    assert later.known(HERE, "5", 0.1)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", '{"a b": 5}', '{"a b": {}}', "\x00", "[" * 100_000),
        '{"a b": {"rtt_s": 1, "brings_bps": 1, "streams": Infinity, "at": 1}}',
    ],
)
def test_a_broken_file_tells_nothing_and_is_replaced(tmp_path: Path, text: str) -> None:
    """Whatever stands in the file, a peer starts, and writes what it learns."""
    file = tmp_path / "paths.json"
    file.write_text(text)
    paths = Paths(file)
    assert paths.known(HERE, THERE, 0.1) is None
    paths.learn(HERE, THERE, facts())
    paths.save()
    assert Paths(file).known(HERE, THERE, 0.1)


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    """Where the file cannot be, nothing is kept, and nothing raised."""
    (tmp_path / "file").write_text("")
    paths = Paths(tmp_path / "file" / "paths.json")
    paths.learn(HERE, THERE, facts())
    paths.save()


def test_a_file_system_without_locks_keeps_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of networks have none: what was measured is written all the same."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(paths_module.fcntl, "flock", refuse)
    paths = Paths(tmp_path / "paths.json")
    paths.learn(HERE, THERE, facts())
    paths.save()
    assert Paths(tmp_path / "paths.json").known(HERE, THERE, 0.1)


def test_one_that_holds_the_lock_for_ever_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped while it wrote keeps nobody else from it."""
    monkeypatch.setattr(paths_module, "_PATIENCE_S", 0.01)
    paths = Paths(tmp_path / "paths.json")
    paths.learn(HERE, THERE, facts())
    with paths_module._alone(tmp_path):
        paths.save()
    assert Paths(tmp_path / "paths.json").known(HERE, THERE, 0.1)


def test_what_could_not_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full loses nothing of it, and nothing is left behind there."""
    paths = Paths(tmp_path / "paths.json")
    paths.learn(HERE, THERE, facts())
    with monkeypatch.context() as full:
        full.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        paths.save()
    assert list(tmp_path.iterdir()) == []
    paths.save()
    assert Paths(tmp_path / "paths.json").known(HERE, THERE, 0.1)


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """P2PAVG_PATHS names it, or, when empty, says that there is none."""
    monkeypatch.setenv("P2PAVG_PATHS", "/x/y")
    assert usual_file() == "/x/y"
    monkeypatch.setenv("P2PAVG_PATHS", "")
    assert usual_file() is None
    monkeypatch.delenv("P2PAVG_PATHS")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert usual_file() == "/cache/p2pavg/paths.json"


def test_a_known_number_of_streams_is_not_searched_for() -> None:
    """A link of a known path has that number from the start, and transfers leave it as it is."""
    count = StreamCount(0.3, 4e6)
    blind = count.wanted(1)
    count.begin_with(40, 0.0)
    assert count.wanted(1) == 40 != blind
    for number in range(8):
        count.measured(StreamTransfer(40, 50_000_000, 1.5, 0.3, 1.0), 1, float(number))
    assert count.wanted(1) == 40
    assert count.settled == 40
