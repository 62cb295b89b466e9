from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from p2pavg import codecs
from p2pavg.allreduce.encoded import EncodedResult, Layout
from p2pavg.plan.part import Part
from p2pavg.rounds.loop.backlog import Backlog
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


def test_without_a_disk_it_stays_in_memory(tmp_path: Path, caplog: Any) -> None:
    """No directory to write to: the result is kept all the same, and the log says so."""
    backlog = Backlog(0, tmp_path / "missing")
    given, _ = average(0)
    assert backlog.add(given) is given
    assert "no place on disk" in caplog.text
