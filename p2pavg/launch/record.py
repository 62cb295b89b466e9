"""What is kept of a launched swarm on the machine that launched it, for later steps."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from p2pavg.credentials import Authority
from p2pavg.errors import ConfigurationError

FOLDER = Path("~/.config/p2pavg/launched")


@dataclass(slots=True)
class Record:
    """One run. The authority's line is a secret: the file is readable to its owner alone."""

    run: str
    script: str
    arguments: list[str]
    bootstrap: str  # HOST:PORT; empty: none was started so far
    authority: str | None  # None: an open run
    watcher: str | None  # credentials of a member that only looks on
    peers: dict[str, str] = field(default_factory=dict)  # machine -> peer id, hex; empty in an open run

    def owner(self) -> Authority | None:
        """Who makes credentials; None: an open run."""
        return None if self.authority is None else Authority.load(self.authority)

    @classmethod
    def path(cls, run: str) -> Path:
        """Where the record of a run is."""
        return FOLDER.expanduser() / f"{run}.json"

    @classmethod
    def load(cls, run: str) -> Record:
        """Raises ConfigurationError when the run was not launched from here."""
        try:
            fields: Mapping[str, object] = json.loads(cls.path(run).read_text())
            return cls(**fields)  # type: ignore[arg-type]
        except (OSError, ValueError, TypeError):
            raise ConfigurationError(
                f"run {run!r} was not launched from here: there is no record of it in {cls.path(run)}"
            ) from None

    @classmethod
    @contextmanager
    def locked(cls, run: str) -> Iterator[None]:
        """While this lasts, no other process of this user starts peers of the run. Raises ConfigurationError
        where one does.
        """
        path = cls.path(run).with_suffix(".lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = path.open("w")
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be written ({error.strerror})") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigurationError(
                    f"another 'p2pavg launch' starts peers of run {run!r} right now; wait until it has ended"
                ) from None
            yield

    def save(self) -> None:
        """Write it. Raises ConfigurationError when that cannot be."""
        path = self.path(self.run)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            made = path.with_suffix(".new")
            with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump(asdict(self), file, indent=1)
            made.replace(path)
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be written ({error.strerror})") from None
