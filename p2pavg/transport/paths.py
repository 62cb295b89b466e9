"""What earlier runs measured of the paths to other hosts: kept in a file, by pair of hosts, with its age.

So a first round is not blind: its parts are sized, and its streams counted, by what the path carried last
time. Only far paths are kept: near ones cost a first round nothing.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger("p2pavg.transport")

LEAST_RTT_S = 0.01  # seconds: the facts of a path with a shorter round trip are not kept
OLDEST_S = 30 * 86400.0
MOST = 1024  # paths in the file
_PATIENCE_S = 0.5  # for other processes that write
_SAME_PATH = 1.25  # ratio of the round trips then and now; more, and it is another path


@dataclass(frozen=True, slots=True)
class PathFacts:
    """One path, as one of its two hosts saw it."""

    rtt_s: float  # without load
    brings_bps: float  # bit/s that came while more waited; 0.0: not measured
    streams: int  # data streams that carried as much as any number; 0: not known
    at: float  # time.time() when it was measured


class Paths:
    """The paths of this machine."""

    def __init__(self, file: str | os.PathLike[str] | None) -> None:
        """file: JSON, read now and written by `save`; None: nothing is kept."""
        self._file = None if file is None else Path(file)
        self._known = self._read()
        self._learned: dict[str, PathFacts] = {}

    def known(self, here: str, there: str, rtt_s: float) -> PathFacts | None:
        """What is known of the path between two addresses, if it still is the same one."""
        facts = self._known.get(_name(here, there))
        if facts is None or here == there or time.time() - facts.at > OLDEST_S:
            return None
        return facts if facts.rtt_s / _SAME_PATH <= rtt_s <= facts.rtt_s * _SAME_PATH else None

    def learn(self, here: str, there: str, facts: PathFacts) -> None:
        """Something was measured of a path."""
        far = here != there and facts.rtt_s >= LEAST_RTT_S  # a busy machine is slow to answer itself
        if self._file is not None and far and (facts.brings_bps > 0 or facts.streams):
            self._known[_name(here, there)] = self._learned[_name(here, there)] = facts

    def save(self) -> None:
        """Write what was learned, beside what other processes of this machine wrote meanwhile."""
        if self._file is None or not self._learned:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with _alone(self._file.parent):
                self._write(self._file)
        except OSError as error:
            logger.debug("what was measured of paths cannot be kept in %s: %s", self._file, error)

    def _write(self, file: Path) -> None:
        kept = {**self._read(), **self._learned}
        newest = sorted(kept, key=lambda name: kept[name].at)[-MOST:]
        beside = file.with_name(f"{file.name}.{os.getpid()}")
        try:
            beside.write_text(json.dumps({name: asdict(kept[name]) for name in newest}), encoding="utf-8")
            beside.replace(file)
            self._learned = {}
        finally:
            with suppress(OSError):
                beside.unlink()

    def _read(self) -> dict[str, PathFacts]:
        if self._file is None:
            return {}
        try:
            table = json.loads(self._file.read_text(encoding="utf-8"))
            return {str(name): _facts(row) for name, row in table.items()}
        except FileNotFoundError:
            return {}
        except (
            OSError,
            ValueError,
            TypeError,
            AttributeError,
            KeyError,
            OverflowError,
            RecursionError,
        ) as error:
            logger.debug("%s does not tell of paths: %s", self._file, error)
            return {}


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While no other process reads a file there, and writes it with what was learned. One that was stopped in
    between is not waited for, and nobody where the file system has no locks.
    """
    opened = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.002)
                continue
            except OSError as error:
                logger.debug("%s cannot be locked: %s", folder, error)
            break
        yield
    finally:
        os.close(opened)


def _facts(row: Mapping[str, Any]) -> PathFacts:
    return PathFacts(float(row["rtt_s"]), float(row["brings_bps"]), int(row["streams"]), float(row["at"]))


def _name(here: str, there: str) -> str:
    return f"{here} {there}"


def usual_file() -> str | None:
    """The file that `P2PAVG_PATHS` names, none when that is empty, else one in the user's cache folder."""
    named = os.environ.get("P2PAVG_PATHS")
    if named is not None:
        return named or None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "p2pavg", "paths.json")
