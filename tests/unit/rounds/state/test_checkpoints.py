from __future__ import annotations

import errno
import fcntl
import io
import logging
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pavg.errors import ConfigurationError, StateError
from p2pavg.rounds.protocol.roles import Generation
from p2pavg.rounds.state import manifest as state
from p2pavg.rounds.state.files import blockfile
from p2pavg.rounds.state.files.checkpoints import MAGIC, About, Checkpoints
from p2pavg.rounds.state.generation_rows import from_rows, to_rows
from p2pavg.rounds.training import Section
from tests.unit.rounds.state.packed import packed

ABOUT = About("my run/1", b"s" * 32, "10 parameters, SGD", "torch 2.13.0")
HISTORY = tuple(Generation(e, bytes([e]) * 32, e, 8, 8 * e + 8, b"l" * 20) for e in range(12))


def save(checkpoints: Checkpoints, epoch: int, fill: int = 1) -> Path | None:
    values = np.full(2_500_000, fill, np.uint8)  # several chunks
    meta_bytes, blob = packed(({"step": epoch}, {"values": Section.of(values)}))
    manifest = state.describe(epoch, bytes([epoch - 1]) * 32, meta_bytes, blob)
    return checkpoints.save(manifest, blob, to_rows(HISTORY, epoch))


def test_a_checkpoint_comes_back_whole(tmp_path: Path) -> None:
    """Epoch, lineage, metadata, bytes and history of the newest checkpoint are what was saved."""
    checkpoints = Checkpoints(tmp_path / "new" / "dir", ABOUT)
    assert checkpoints.newest() is None
    save(checkpoints, 3)
    save(checkpoints, 7, fill=9)
    found = checkpoints.newest()
    assert found is not None
    assert (found.state.epoch, found.state.lineage) == (7, bytes([6]) * 32)
    assert found.state.meta == {"step": 7}
    assert np.array_equal(found.state.buffers["values"], np.full(2_500_000, 9, np.uint8))
    assert found.history == HISTORY[:7]


def test_only_the_last_are_kept(tmp_path: Path) -> None:
    """After ten checkpoints, the newest three are there, and no temporary file; other runs' stay."""
    other = Checkpoints(tmp_path, replace(ABOUT, run_id="other"))
    save(other, 1)
    checkpoints = Checkpoints(tmp_path, ABOUT)
    for epoch in range(1, 11):
        save(checkpoints, epoch)
    assert [path.name.split("-")[-2] for path in checkpoints.paths()] == [f"{e:010d}" for e in (10, 9, 8)]
    assert len(list(tmp_path.iterdir())) == 4
    assert len(other.paths()) == 1


def test_only_their_owner_can_read_them(tmp_path: Path) -> None:
    """A checkpoint holds the model: whatever the umask, its file is 0600."""
    before = os.umask(0)
    try:
        path = save(Checkpoints(tmp_path, ABOUT), 3)
    finally:
        os.umask(before)
    assert path is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_deleted_directory_is_made_again(tmp_path: Path) -> None:
    """Whoever deletes the directory of a run that goes on loses the old checkpoints, not the next ones."""
    checkpoints = Checkpoints(tmp_path / "made", ABOUT)
    checkpoints.directory.rmdir()
    assert save(checkpoints, 3) is not None
    assert len(checkpoints.paths()) == 1


def test_what_compresses_takes_less_room(tmp_path: Path) -> None:
    """Zeros and repetitions cost next to nothing, noise what it is; all of it comes back, and what was spared
    is counted.
    """
    checkpoints, rng = Checkpoints(tmp_path, ABOUT), np.random.default_rng(1)
    parts = [rng.integers(0, 256, 700_000, np.uint8), np.zeros(1_400_000, np.uint8)]
    values = np.concatenate([*parts, np.tile(rng.integers(0, 256, 500, np.uint8), 1000)])
    meta_bytes, blob = packed(({}, {"values": Section.of(values)}))
    manifest = state.describe(3, bytes(32), meta_bytes, blob)
    path = checkpoints.save(manifest, blob, to_rows(HISTORY, 3))
    assert path is not None
    assert path.stat().st_size < 1_000_000 < 700_000 + checkpoints.disk.spared
    assert checkpoints.disk.bytes_per_second > 0
    found = checkpoints.newest()
    assert found is not None
    assert np.array_equal(found.state.buffers["values"], values)


def test_a_fast_disk_gets_bytes_as_they_are(tmp_path: Path) -> None:
    """Where the disk was faster than packing the last time, only zeros are left out."""
    checkpoints = Checkpoints(tmp_path, ABOUT)
    checkpoints.disk.bytes_per_second = 1e15
    values = np.concatenate([np.tile(np.arange(200, dtype=np.uint8), 5000), np.zeros(1 << 20, np.uint8)])
    meta_bytes, blob = packed(({}, {"values": Section.of(values)}))
    checkpoints.save(state.describe(3, bytes(32), meta_bytes, blob), blob, to_rows(HISTORY, 3))
    assert 900_000 < checkpoints.disk.spared < 1.1 * (1 << 20)


@pytest.mark.parametrize(
    ("total", "lengths", "why"),
    [
        (1 << 38, [], "cut off"),
        (3000, [1000, 1000, 999], "too long"),
        (3000, [1001, 1000, 999], "impossible sizes"),
        (3000, [1000, 1000, 3], "impossible sizes"),
        (2000, [1000, 10], "does not unpack"),
    ],
    ids=["huge", "short", "larger", "bomb", "noise"],
)
def test_nothing_is_allocated_for_what_a_file_claims(total: int, lengths: list[int], why: str) -> None:
    """A table that does not fit into the file, or that no chunks of this size have, is refused; so is a block
    that holds something else.
    """
    raw = np.array(lengths, "<u4").tobytes() + b"\xff" * (2990 if why == "too long" else sum(lengths))
    file = io.BytesIO(raw)
    with pytest.raises(blockfile.MalformedFileError, match=why):
        for _ in blockfile.read(
            file, blockfile.read_table(file, total, 1000, len(raw)), np.zeros(total, np.uint8), 1000
        ):
            pass


def test_zeros_that_do_not_fit_their_hash_are_no_state(tmp_path: Path) -> None:
    """A file that leaves a chunk out as zeros is believed only if its hash is that of zeros."""
    checkpoints, values = Checkpoints(tmp_path, ABOUT), np.zeros(40_000, np.uint8)
    meta_bytes, blob = packed(({}, {"values": Section.of(values)}))
    manifest = state.describe(3, bytes(32), meta_bytes, blob)
    blob[-1] = 1
    lying = replace(state.describe(3, bytes(32), meta_bytes, blob), lineage=manifest.lineage)
    blob[-1] = 0
    checkpoints.save(lying, blob, to_rows(HISTORY, 3))
    assert checkpoints.newest() is None


def damage_head(raw: bytes) -> bytes:
    return raw[: len(MAGIC) + 20] + b"\xff" * 8 + raw[len(MAGIC) + 28 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-1],
        lambda raw: raw[:10],
        lambda raw: b"",
        lambda raw: raw + b"x",
        lambda raw: raw[:-1] + b"\xff",
        lambda raw: raw[: len(MAGIC)] + b"\xff" * 8 + raw[len(MAGIC) + 8 :],
        damage_head,
    ],
)
def test_a_broken_file_is_passed_over(tmp_path: Path, damage: Any, caplog: Any) -> None:
    """A cut or damaged file is named in the log, and the one before it is used."""
    checkpoints = Checkpoints(tmp_path, ABOUT)
    save(checkpoints, 3)
    path = save(checkpoints, 7)
    assert path is not None
    path.write_bytes(damage(path.read_bytes()))
    found = checkpoints.newest()
    assert found is not None
    assert found.state.epoch == 3
    assert str(path) in caplog.text


def test_another_model_is_refused_and_another_torch_is_named(tmp_path: Path, caplog: Any) -> None:
    """The error names both models; another version of torch only gives a warning."""
    save(Checkpoints(tmp_path, ABOUT), 3)
    other = Checkpoints(tmp_path, replace(ABOUT, schema=b"o" * 32, description="99 parameters, Adam"))
    with pytest.raises(StateError, match="10 parameters, SGD, this is 99 parameters, Adam"):
        other.newest()
    assert Checkpoints(tmp_path, replace(ABOUT, software="torch 2.14.0")).newest() is not None
    assert "saved with torch 2.13.0, this is torch 2.14.0" in caplog.text


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    """When a file cannot be written to its end, OSError is raised and nothing of it stays."""
    checkpoints = Checkpoints(tmp_path, ABOUT)
    save(checkpoints, 3)
    before = sorted(tmp_path.iterdir())

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(checkpoints, 7)
    assert sorted(tmp_path.iterdir()) == before


def test_peers_that_share_a_directory_take_turns(tmp_path: Path) -> None:
    """While one peer writes, another writes nothing there; afterwards it finds the epoch saved."""
    checkpoints = Checkpoints(tmp_path, ABOUT)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert save(checkpoints, 3) is None
    assert not list(tmp_path.iterdir())
    os.close(descriptor)
    first = save(checkpoints, 3, fill=1)
    assert first is not None
    written = first.stat().st_mtime_ns
    assert save(checkpoints, 3, fill=1) == first
    assert first.stat().st_mtime_ns == written


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """A file in the place of checkpoint_dir: one sentence, no traceback from below."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError, match="checkpoint_dir"):
        Checkpoints(tmp_path / "file" / "dir", ABOUT)


@pytest.mark.parametrize(
    "rows", [None, 3, [[1]], [[1, "x", 2, 3, 4, b""]], [3], "ab", {}, [[-1, b"", 2, 3, 4, b""]]]
)
def test_a_malformed_history_is_refused(rows: Any) -> None:
    """Whatever a file or a donor says: StateError and nothing else."""
    with pytest.raises(StateError):
        from_rows(rows)


def test_a_stale_part_is_cleared_away(tmp_path: Path) -> None:
    """What a killed writer left behind goes with the next checkpoint."""
    checkpoints = Checkpoints(tmp_path, ABOUT)
    path = save(checkpoints, 3)
    assert path is not None
    stale = tmp_path / f".{path.stem}.0123abcd.part"
    stale.write_bytes(b"half")
    save(checkpoints, 4)
    assert not stale.exists()


@pytest.fixture(autouse=True)
def _warnings(caplog: Any) -> None:
    caplog.set_level(logging.WARNING, "p2pavg")
