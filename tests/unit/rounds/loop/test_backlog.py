from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from p2pavg import codecs
from p2pavg.allreduce.encoded import EncodedResult, Layout
from p2pavg.plan.part import Part
from p2pavg.rounds.loop.backlog import Backlog
from p2pavg.rounds.state.files.spool import LOOK_BYTES, PAGE_BYTES, Spool
from p2pavg.rounds.training import Average

NUMEL = 10_000


def average(epoch: int) -> tuple[Average, np.ndarray]:
    """An average, and what it decodes to."""
    codec = codecs.get("none")
    layout = Layout((Part(0, 0, NUMEL),), 4096, codec)
    vector = np.random.default_rng(epoch).standard_normal(NUMEL).astype(np.float32)
    data = np.empty(layout.nbytes, np.uint8)
    at = 0
    for start, count in layout.chunks():
        size = codec.encoded_size(count)
        codec.encode(vector[start : start + count], data[at : at + size], 1.0)
        at += size
    return Average(epoch, 8, 2, True, EncodedResult(layout, data), b""), vector


def test_what_exceeds_the_memory_waits_on_disk(tmp_path: Path) -> None:
    """Two results fit into memory, the third waits in a file without a name; all decode to their values."""
    backlog = Backlog(2 * 4 * NUMEL, tmp_path)
    kept = []
    for epoch in range(3):
        given, vector = average(epoch)
        kept.append((backlog.add(given), vector))
    assert [isinstance(one.result.data, np.memmap) for one, _ in kept] == [False, False, True]
    assert not list(tmp_path.iterdir())
    out = np.empty(NUMEL, np.float32)
    for one, vector in kept:
        one.result.decode_into(out)
        assert np.array_equal(out, vector)
    backlog.remove(kept[0][0])
    assert not isinstance(backlog.add(average(4)[0]).result.data, np.memmap)


def test_pages_of_zeros_take_no_disk(tmp_path: Path) -> None:
    """Bytes of any length come back as they were, and their zeros are holes in the file; `spared`
    counts them.
    """
    rng = np.random.default_rng(0)
    for size in (1, PAGE_BYTES, 3 * PAGE_BYTES + 5, LOOK_BYTES + 2 * PAGE_BYTES + 1):
        spool, data = Spool(tmp_path), np.zeros(size, np.uint8)
        data[: size // 8] = rng.integers(1, 255, size // 8, np.uint8)
        data[size - size // 9 :] = 7
        kept = spool.put(data)
        assert np.array_equal(kept, data)
        zeros = size - size // 8 - size // 9
        assert zeros - 3 * PAGE_BYTES < spool.spared <= zeros


def test_without_a_disk_it_stays_in_memory(tmp_path: Path, caplog: Any) -> None:
    """No directory to write to: the result is kept all the same, and the log says so."""
    backlog = Backlog(0, tmp_path / "missing")
    given, _ = average(0)
    assert backlog.add(given) is given
    assert "no place on disk" in caplog.text
