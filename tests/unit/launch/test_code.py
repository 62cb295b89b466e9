"""The user's code, as other machines get it."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from p2pavg.errors import ConfigurationError
from p2pavg.launch import code


def names(made: bytes) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(made)) as tar:
        return {entry.name for entry in tar if entry.isfile()}


def test_what_belongs_to_this_machine_stays_here(tmp_path: Path) -> None:
    """Repositories, environments, secrets and what launch itself wrote are not carried."""
    script = tmp_path / "train.py"
    for path in (
        "train.py",
        "src/model.py",
        ".git/config",
        "venv/bin/python",
        "src/__pycache__/x.pyc",
        "run.credentials",
        "a.secret",
        "swarm.docker/compose.yaml",
        "out/big",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x")
    assert names(code.packed(tmp_path, script, tmp_path / "out")) == {"./train.py", "./src/model.py"}
    assert names(code.packed(None, script)) == {"train.py"}


def test_a_folder_with_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be held in memory, and sent to each machine: the sentence says what to do instead."""
    monkeypatch.setattr(code, "MOST_BYTES", 1000)
    (tmp_path / "data.bin").write_bytes(b"0" * 1001)
    with pytest.raises(ConfigurationError, match="holds more than 1 kB: name a folder with the code alone"):
        code.packed(tmp_path, tmp_path / "train.py")


def test_code_that_cannot_be_read(tmp_path: Path) -> None:
    """The sentence names the file."""
    with pytest.raises(ConfigurationError, match=r"train\.py cannot be read \(No such file or directory\)"):
        code.packed(None, tmp_path / "train.py")
