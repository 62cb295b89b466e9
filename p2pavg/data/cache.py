"""A cache of shards on disk: each is fetched over HTTP once per machine, by whichever process comes first."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from p2pavg.errors import ConfigurationError, UnreachableError

CHUNK_BYTES = 1 << 20
SILENCE_S = 30.0  # without a byte from a server, after which a try has failed
TRIES = 3
PAUSE_S = 0.5  # before the second try; twice as long before each later one
LOCKS = 64  # processes that want different shards wait for each other once in so many times
LEFT_OVER_S = 3600.0  # a part of a shard that nobody has written to for so long belongs to a dead process
SUFFIX, PART = ".shard", ".part"


class ShardCache:
    """Files of at most `max_bytes` in one folder, which all processes of a machine may share.

    What was used longest ago makes room for what is fetched. A shard is there whole or not at all: it is
    written under another name, and its length is looked at, and its SHA-256 where that is known. A file that
    is open stays readable when another process removes it from the cache.
    """

    def __init__(self, directory: str | os.PathLike[str], max_bytes: int) -> None:
        """Makes the folder. Raises ConfigurationError when that cannot be."""
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise ConfigurationError(
                f"max_bytes of a cache must be a whole number from 1 on, not {max_bytes!r}"
            )
        self.directory = Path(directory)
        self.max_bytes = max_bytes
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"cannot make the cache {str(directory)!r} ({error.strerror}); name a writable folder"
            ) from None

    def open(self, url: str, nbytes: int | None = None, sha256: str | None = None) -> BinaryIO:
        """A shard to read, from its beginning; fetched when it is not here.

        Args:
            url: http or https.
            nbytes: its length, where known; a file of another length is fetched anew.
            sha256: in hexadecimal digits, where known.

        Raises:
            ConfigurationError: it cannot be stored, the server does not have it, or it is another file.
            UnreachableError: the server does not answer, or breaks off, several times.
        """
        if not url.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"a cache fetches http and https URLs, not {url!r}: open the file itself"
            )
        key = hashlib.sha256(f"{url} {sha256 or ''}".encode()).hexdigest()
        with self._locked(f"{int(key[:8], 16) % LOCKS:02}"):
            for found in self.directory.glob(f"{key[:32]}-*{SUFFIX}"):
                if (file := _opened(found, nbytes)) is not None:
                    return file
            part = self.directory / f"{key[:32]}-{os.getpid()}{PART}"
            try:
                length = self._fetched(url, part, nbytes, sha256)
                with self._locked("room"):
                    self._make_room(url, length)
                    whole = part.rename(self.directory / f"{key[:32]}-{length}{SUFFIX}")
                return whole.open("rb")
            except OSError as error:
                if isinstance(error, UnreachableError):
                    raise
                raise self._unstored(url, error) from None
            finally:
                part.unlink(missing_ok=True)

    def _unstored(self, url: str, error: OSError) -> ConfigurationError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return ConfigurationError(
                f"the disk of the cache {str(self.directory)!r} is full, and {url} does not fit: make room "
                "there, or lower max_bytes"
            )
        return ConfigurationError(
            f"cannot store {url} in the cache {str(self.directory)!r}: {error.strerror}"
        )

    def _fetched(self, url: str, part: Path, nbytes: int | None, sha256: str | None) -> int:
        """Download it. Returns its length."""
        pause = PAUSE_S
        for last in (*[False] * (TRIES - 1), True):
            try:
                return self._downloaded(url, part, nbytes, sha256)
            except UnreachableError:
                if last:
                    raise
                time.sleep(pause)
                pause *= 2
        raise AssertionError("a try returns or raises")

    def _downloaded(self, url: str, part: Path, nbytes: int | None, sha256: str | None) -> int:
        with closing(_asked(url)) as answer:
            said = answer.headers.get("Content-Length", "")
            expected = int(said) if said.isdecimal() else nbytes
            if nbytes is not None and expected != nbytes:
                raise ConfigurationError(
                    f"{url} has {expected} bytes where {nbytes} are expected: it is another file; make the "
                    "list of shards anew"
                )
            if expected is not None and expected > self.max_bytes:
                raise ConfigurationError(
                    f"{url} has {expected} bytes, and the cache may have {self.max_bytes}: raise max_bytes"
                )
            length, digest = 0, hashlib.sha256()
            with part.open("wb") as file:
                for chunk in _chunks(url, answer):
                    file.write(chunk)
                    digest.update(chunk)
                    length += len(chunk)
        if expected is not None and length != expected:
            raise UnreachableError(
                f"{url} ended after {length} of {expected} bytes, {TRIES} times: look at the server and the "
                "network between"
            )
        if sha256 is not None and digest.hexdigest() != sha256.lower():
            raise ConfigurationError(
                f"{url} has SHA-256 {digest.hexdigest()[:12]}… where {sha256[:12].lower()}… is expected: it "
                "is another file, or was damaged; make the list of shards anew, or copy the file again"
            )
        return length

    def _make_room(self, url: str, length: int) -> None:
        """Remove what was used longest ago."""
        if length > self.max_bytes:
            raise ConfigurationError(
                f"{url} has {length} bytes, and the cache may have {self.max_bytes}: raise max_bytes"
            )
        kept: list[tuple[float, int, Path]] = []
        for path in self.directory.iterdir():
            with suppress(FileNotFoundError):
                status = path.stat()
                if path.suffix == SUFFIX:
                    kept.append((status.st_mtime, status.st_size, path))
                elif path.suffix == PART and time.time() - status.st_mtime > LEFT_OVER_S:
                    path.unlink()
        total = sum(size for _, size, _ in kept) + length
        for _, size, path in sorted(kept):
            if total <= self.max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """One process, and one thread of it, at a time; a process that dies lets go."""
        with (self.directory / f"lock-{name}").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _opened(path: Path, nbytes: int | None) -> BinaryIO | None:
    """A cached shard that has the length it had, and is expected to have; else it is removed."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None  # another process has just made room
    length = os.fstat(file.fileno()).st_size
    if length != int(path.stem.rpartition("-")[2]) or nbytes not in (None, length):
        file.close()
        path.unlink(missing_ok=True)
        return None
    os.utime(file.fileno())  # used now
    return file


def _asked(url: str) -> http.client.HTTPResponse:
    try:
        answer: http.client.HTTPResponse = urllib.request.urlopen(url, timeout=SILENCE_S)
        return answer
    except urllib.error.HTTPError as error:
        with error:
            if error.code < 500:
                raise ConfigurationError(
                    f"the server does not give {url} ({error.code} {error.reason}): correct the URL, or put "
                    "the file there"
                ) from None
            raise UnreachableError(
                f"the server cannot give {url} now ({error.code} {error.reason})"
            ) from None
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or error
        raise UnreachableError(
            f"{url} cannot be fetched ({why}): does the server run, and is it reached?"
        ) from None


def _chunks(url: str, answer: http.client.HTTPResponse) -> Iterator[bytes]:
    while True:
        try:
            chunk = answer.read(CHUNK_BYTES)
        except http.client.IncompleteRead as error:
            chunk = error.partial
        except OSError as error:
            raise UnreachableError(f"{url} broke off ({error}), {TRIES} times: look at the network") from None
        if not chunk:
            return
        yield chunk
