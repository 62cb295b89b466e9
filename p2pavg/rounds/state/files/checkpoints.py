"""Checkpoints: the state of a run in files, in the same form in which newcomers download it. No pickle.

A file is a magic, the length of its head, the head (msgpack: run, schema, software, manifest, history), and
the state in a `blockfile`; the manifest's hashes cover its chunks as they are unpacked.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import secrets
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np
import numpy.typing as npt

from p2pavg.errors import ConfigurationError, StateError
from p2pavg.rounds.state import manifest as state
from p2pavg.rounds.state.files import blockfile
from p2pavg.rounds.state.files.blockfile import Disk
from p2pavg.rounds.state.generation_rows import Generations, from_rows
from p2pavg.rounds.state.manifest import Manifest
from p2pavg.rounds.training import State

logger = logging.getLogger("p2pavg.state")
U8 = npt.NDArray[np.uint8]

MAGIC = b"p2pavg checkpoint 3\n"
MAX_HEAD_BYTES = 1 << 28
KEPT = 3
SUFFIX = ".p2pavg"


@dataclass(frozen=True, slots=True)
class About:
    """Whose state a checkpoint is."""

    run_id: str
    schema: bytes  # of the model and the optimizer
    description: str  # of both, in words
    software: str  # what the bits of further steps depend on, e.g. "torch 2.13.0"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a file holds."""

    path: Path
    state: State
    history: Generations


class Checkpoints:
    """The checkpoints of one run in one directory. Several peers may share the directory."""

    def __init__(self, directory: str | os.PathLike[str], about: About, keep: int = KEPT) -> None:
        """Makes the directory. Raises ConfigurationError when that cannot be."""
        self.directory = Path(directory)
        self.about = about
        self.disk = Disk()
        self._keep = keep
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"cannot make checkpoint_dir {str(directory)!r} ({error.strerror}); name a writable directory"
            ) from None
        plain = re.sub(r"[^A-Za-z0-9_.-]", "_", about.run_id)[:60]
        self._stem = f"{plain}-{hashlib.sha256(about.run_id.encode()).hexdigest()[:8]}"

    def path(self, epoch: int, lineage: bytes) -> Path:
        """Where the checkpoint of this state is, or would be."""
        return self.directory / f"{self._stem}-{epoch:010d}-{lineage[:4].hex()}{SUFFIX}"

    def paths(self) -> list[Path]:
        """Newest epoch first."""
        found = (path for path in self.directory.glob(f"{self._stem}-*{SUFFIX}"))
        return sorted(found, key=lambda path: path.name, reverse=True)

    # ------------------------------------------------------------------------------------- reading

    def newest(self) -> Checkpoint | None:
        """The newest that is whole. Raises StateError when it is of another model."""
        for path in self.paths():
            try:
                return self._read(path)
            except (OSError, _BrokenError) as error:
                logger.warning("checkpoint %s cannot be used (%s); an older one is tried", path, error)
        return None

    def _read(self, path: Path) -> Checkpoint:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise _BrokenError("it is no checkpoint of this version")
            (size,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            if not 0 < size <= MAX_HEAD_BYTES:
                raise _BrokenError("its head is broken")
            head = _unpacked(file.read(size))
            try:
                manifest, history = Manifest.from_message(head["manifest"]), from_rows(head["history"])
                theirs = About(head["run"], head["schema"], head["description"], head["software"])
            except (KeyError, TypeError, StateError):
                raise _BrokenError("its head is broken") from None
            self._compare(path, theirs)
            left = os.fstat(file.fileno()).st_size - file.tell()
            try:
                blob = _read_blob(file, manifest, left)
            except blockfile.MalformedFileError as error:
                raise _BrokenError(str(error)) from None
            except MemoryError:
                raise _BrokenError(f"there is no memory for its {size(manifest.total_bytes)}") from None
        try:
            return Checkpoint(path, state.unpack(manifest, blob), history)
        except StateError:
            raise _BrokenError("its state is malformed") from None

    def _compare(self, path: Path, theirs: About) -> None:
        ours = self.about
        if theirs.schema != ours.schema:
            raise StateError(
                f"checkpoint {path} is of another model or optimizer: it has {theirs.description}, this is "
                f"{ours.description}; build what was saved, or name another checkpoint_dir"
            )
        if theirs.software != ours.software:
            logger.warning(
                "checkpoint %s was saved with %s, this is %s: further steps may differ in the last bits",
                path,
                theirs.software,
                ours.software,
            )

    # ------------------------------------------------------------------------------------- writing

    def save(self, manifest: Manifest, blob: U8, history: list[list[Any]]) -> Path | None:
        """Write one, all or nothing, and drop the oldest; None: another peer is at it. Raises OSError."""
        path = self.path(manifest.epoch, manifest.lineage)
        self.directory.mkdir(parents=True, exist_ok=True)  # somebody may have deleted it
        with self._alone() as alone:
            if not alone:
                return None
            for stale in self.directory.glob(f".{self._stem}-*.part"):
                stale.unlink(missing_ok=True)
            if not path.exists():
                self._write(path, manifest, blob, history)
            for old in self.paths()[self._keep :]:
                old.unlink(missing_ok=True)
        return path

    def _write(self, path: Path, manifest: Manifest, blob: U8, history: list[list[Any]]) -> None:
        about = self.about
        head = msgpack.packb(
            {
                "run": about.run_id,
                "schema": about.schema,
                "description": about.description,
                "software": about.software,
                "manifest": manifest.to_message(),
                "history": history,
            }
        )
        part = self.directory / f".{path.stem}.{secrets.token_hex(4)}.part"
        try:
            with open(part, "xb", opener=_private) as file:
                file.write(MAGIC + struct.pack("<Q", len(head)) + head)
                seconds = blockfile.write(file, blob, manifest.chunk_bytes, self.disk)
                began = time.monotonic()
                file.flush()
                os.fsync(file.fileno())
                self.disk.wrote(file.tell(), seconds + time.monotonic() - began)
            part.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        with _opened(self.directory) as directory:
            os.fsync(directory)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Whether no other peer writes here now."""
        with _opened(self.directory) as directory:
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            try:
                yield True
            finally:
                fcntl.flock(directory, fcntl.LOCK_UN)  # also for children that were forked meanwhile


class _BrokenError(Exception):
    """A file is not a whole checkpoint."""


def _read_blob(file: BinaryIO, manifest: Manifest, left: int) -> U8:
    """The state, whose chunks fit their hashes. left: bytes of the file that are to come. Raises
    MalformedFileError, MemoryError.
    """
    size = manifest.chunk_bytes
    lengths = blockfile.read_table(file, manifest.total_bytes, size, left)
    zeros: dict[int, bytes] = {}
    for chunk, span in enumerate(blockfile.spans(manifest.total_bytes, size)):
        if not lengths[chunk]:
            whole = span.stop - span.start
            if whole not in zeros:
                zeros[whole] = state.chunk_hash(memoryview(bytes(whole)))
            if zeros[whole] != manifest.hash_of(chunk):
                raise blockfile.MalformedFileError("its bytes do not fit their hashes")
    blob = np.zeros(manifest.total_bytes, np.uint8)
    for chunk, span in enumerate(blockfile.read(file, lengths, blob, size)):
        if lengths[chunk] and state.chunk_hash(memoryview(blob)[span]) != manifest.hash_of(chunk):
            raise blockfile.MalformedFileError("its bytes do not fit their hashes")
    return blob


def _unpacked(head: bytes) -> Any:
    try:
        return msgpack.unpackb(head)
    except (ValueError, msgpack.UnpackException):
        raise _BrokenError("its head is broken") from None


def _private(path: str, flags: int) -> int:
    """The model is its owner's, whatever the umask."""
    return os.open(path, flags, 0o600)


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
