"""The user's code, packed for other machines."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from p2pavg.errors import ConfigurationError
from p2pavg.printable import size

LEFT_OUT = {".git", ".venv", "venv", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
SECRETS = {".credentials", ".secret"}  # of files that stay here
EMITTED = {".docker", ".sky"}  # of folders that `launch --to` writes
MOST_BYTES = 1 << 30  # of all files, which are held in memory, and go to each machine


def packed(directory: Path | None, script: Path, without: Path | None = None) -> bytes:
    """A compressed tar of a directory, without what belongs to this machine, secrets and the folder
    `without`, or of the script alone. Raises ConfigurationError for what cannot be read, or is too large.
    """
    made = io.BytesIO()
    taken = 0

    def wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        nonlocal taken
        path = Path(entry.name)
        emitted = any(Path(part).suffix in EMITTED for part in path.parts)
        if emitted or LEFT_OUT & set(path.parts) or path.suffix in SECRETS:
            return None
        if directory and without is not None and (directory / path).resolve() == without.resolve():
            return None
        taken += entry.size
        if taken > MOST_BYTES:
            raise ConfigurationError(
                f"{directory} holds more than {size(MOST_BYTES)}: name a folder with the code alone as "
                "directory, and let setup commands fetch the data"
            )
        return entry

    try:
        with tarfile.open(fileobj=made, mode="w:gz") as tar:
            if directory is None:
                tar.add(script, script.name)
            else:
                tar.add(directory, ".", filter=wanted)
    except OSError as error:
        raise ConfigurationError(f"{error.filename} cannot be read ({error.strerror})") from None
    return made.getvalue()
