"""Shards on disk: fetched once per machine, whole or not at all, within a bound; errors are one sentence."""

from __future__ import annotations

import hashlib
import http.server
import multiprocessing
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pavg.data import cache as module
from p2pavg.data.cache import SUFFIX, ShardCache
from p2pavg.errors import ConfigurationError, UnreachableError


class Server:
    """Gives `files` by path; counts requests. `cut`: paths of which only so many bytes are sent, so often."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()
        self.cut: dict[str, tuple[int, int]] = {}
        self.failing = 0  # answers of 503 to come
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked[self.path] += 1
                if outer.failing:
                    outer.failing -= 1
                    self.send_error(503)
                    return
                if self.path not in outer.files:
                    self.send_error(404)
                    return
                data = outer.files[self.path]
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                sent, times = outer.cut.get(self.path, (len(data), 0))
                if times:
                    outer.cut[self.path] = sent, times - 1
                    data = data[:sent]
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    made = Server()
    yield made
    made.close()


def shards(folder: Path) -> list[Path]:
    return list(folder.glob(f"*{SUFFIX}"))


def read(cache: ShardCache, url: str, **known: Any) -> bytes:
    with cache.open(url, **known) as file:
        return file.read()


def test_a_shard_is_fetched_once(server: Server, tmp_path: Path) -> None:
    """The second time, and by another cache on the same folder, nothing is asked of the server."""
    server.files["/a.tar"] = data = os.urandom(3000)
    known = {"nbytes": 3000, "sha256": hashlib.sha256(data).hexdigest()}
    assert read(ShardCache(tmp_path, 10**6), f"{server.url}/a.tar", **known) == data
    assert read(ShardCache(tmp_path, 10**6), f"{server.url}/a.tar", **known) == data
    assert server.asked == {"/a.tar": 1}


def test_what_was_used_longest_ago_makes_room(server: Server, tmp_path: Path) -> None:
    """The folder never has more than max_bytes of shards; a file that is open stays readable."""
    cache = ShardCache(tmp_path, 2500)
    for name in "abc":
        server.files[f"/{name}"] = name.encode() * 1000
    with cache.open(f"{server.url}/a") as first:
        os.utime(shards(tmp_path)[0], (1, 1))
        read(cache, f"{server.url}/b")
        for path in shards(tmp_path):
            os.utime(path, (2, 2) if path.read_bytes()[:1] == b"b" else (1, 1))
        read(cache, f"{server.url}/a")  # used now
        read(cache, f"{server.url}/c")
        assert sum(path.stat().st_size for path in shards(tmp_path)) == 2000
        assert {path.read_bytes()[:1] for path in shards(tmp_path)} == {b"a", b"c"}
        read(cache, f"{server.url}/b")
        read(cache, f"{server.url}/c")
        assert first.read() == b"a" * 1000


def test_a_truncated_download_is_tried_again_and_named(server: Server, tmp_path: Path) -> None:
    """One that breaks off is fetched again; if each try does, one sentence says after how many bytes."""
    server.files["/a"] = bytes(5000)
    server.cut["/a"] = 100, 2
    assert read(ShardCache(tmp_path, 10**6), f"{server.url}/a") == bytes(5000)
    server.files["/b"] = bytes(5000)
    server.cut["/b"] = 100, 99
    with pytest.raises(UnreachableError, match="/b ended after 100 of 5000 bytes, 3 times"):
        ShardCache(tmp_path, 10**6).open(f"{server.url}/b")
    assert len(shards(tmp_path)) == 1
    assert not list(tmp_path.glob("*.part"))


def test_a_wrong_hash_or_length_is_named(server: Server, tmp_path: Path) -> None:
    """Another file than the list says is not stored, and one sentence tells what differs."""
    server.files["/a"] = bytes(100)
    cache = ShardCache(tmp_path, 10**6)
    with pytest.raises(ConfigurationError, match="/a has SHA-256 cd00e292c597… where abc… is expected"):
        cache.open(f"{server.url}/a", sha256="abc")
    with pytest.raises(ConfigurationError, match="/a has 100 bytes where 99 are expected"):
        cache.open(f"{server.url}/a", nbytes=99)
    assert not shards(tmp_path)


def test_a_damaged_file_is_fetched_again(server: Server, tmp_path: Path) -> None:
    """A cached shard that lost its end is not given out."""
    server.files["/a"] = data = os.urandom(900)
    cache = ShardCache(tmp_path, 10**6)
    read(cache, f"{server.url}/a")
    os.truncate(shards(tmp_path)[0], 500)
    assert read(cache, f"{server.url}/a") == data
    assert server.asked["/a"] == 2


def test_a_full_disk_is_named(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """No space left on the device: one sentence names the folder and what to do; nothing half written
    stays.
    """
    server.files["/a"] = bytes(100)
    if not os.path.exists("/dev/full"):
        pytest.skip("this machine has no /dev/full")
    with monkeypatch.context() as patch:
        whole = Path.open
        patch.setattr(
            Path, "open", lambda path, mode: whole(Path("/dev/full") if mode == "wb" else path, mode)
        )
        with tempfile.TemporaryDirectory() as folder:
            with pytest.raises(ConfigurationError, match=rf"the disk of the cache '{folder}' is full"):
                ShardCache(folder, 10**6).open(f"{server.url}/a")
            assert not shards(Path(folder))


def test_a_shard_larger_than_the_cache_is_named(server: Server, tmp_path: Path) -> None:
    """Before anything of it is fetched."""
    server.files["/a"] = bytes(200)
    with pytest.raises(
        ConfigurationError, match="has 200 bytes, and the cache may have 100: raise max_bytes"
    ):
        ShardCache(tmp_path, 100).open(f"{server.url}/a")


def test_a_server_that_does_not_answer_is_named(server: Server, tmp_path: Path) -> None:
    """A refused connection, a file that is not there, a server with a fault: one sentence each."""
    cache = ShardCache(tmp_path, 10**6)
    with pytest.raises(UnreachableError, match=r"http://127\.0\.0\.1:9/a cannot be fetched .*refused"):
        cache.open("http://127.0.0.1:9/a")
    with pytest.raises(ConfigurationError, match=r"does not give .*/a \(404 Not Found\): correct the URL"):
        cache.open(f"{server.url}/a")
    server.failing = 99
    with pytest.raises(UnreachableError, match=r"cannot give .*/a now \(503"):
        cache.open(f"{server.url}/a")
    server.failing, server.files["/a"] = 1, b"x"
    assert read(cache, f"{server.url}/a") == b"x"


def test_what_a_cache_cannot_be_is_refused(tmp_path: Path) -> None:
    """A folder that cannot be made, a size that is none, a URL that is a file."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot make the cache"):
        ShardCache(tmp_path / "file" / "x", 100)
    with pytest.raises(ConfigurationError, match="max_bytes of a cache must be a whole number"):
        ShardCache(tmp_path, 0)
    with pytest.raises(ConfigurationError, match="fetches http and https URLs"):
        ShardCache(tmp_path, 100).open("a.tar")


def _reads(folder: str, url: str, go: Any, found: Any) -> None:
    cache = ShardCache(folder, 10**8)
    go.wait()
    for name in "abcd":
        with cache.open(f"{url}/{name}") as file:
            found.put(hashlib.sha256(file.read()).hexdigest())


def test_processes_of_a_machine_fetch_each_shard_once(server: Server, tmp_path: Path) -> None:
    """Three processes want the same shards at the same time: each is asked for once, and all get it whole."""
    for name in "abcd":
        server.files[f"/{name}"] = os.urandom(300_000)
    context = multiprocessing.get_context("fork")
    go, found = context.Event(), context.Queue()
    readers = [context.Process(target=_reads, args=(str(tmp_path), server.url, go, found)) for _ in range(3)]
    for reader in readers:
        reader.start()
    go.set()
    got = Counter(found.get(timeout=60) for _ in range(12))
    for reader in readers:
        reader.join(30)
    assert server.asked == {f"/{name}": 1 for name in "abcd"}
    assert got == {hashlib.sha256(data).hexdigest(): 3 for data in server.files.values()}
