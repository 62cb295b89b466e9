"""bench input: what is measured, and what is said of it."""

from __future__ import annotations

import json
import random
import shutil
import sys
import tarfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2pavg.bench import __main__ as bench
from p2pavg.bench.input import feeding, loops, stored, verdict, whole
from p2pavg.bench.input.compression import available
from p2pavg.bench.input.measure import Split
from p2pavg.bench.input.source import RawSample, Source
from p2pavg.bench.input.steps import packed, unpacked
from p2pavg.bench.input.verdict import MachineLimits
from p2pavg.errors import ConfigurationError

NAMES = ["decode", "resize", "crop"]


def split(
    offline: int,
    sps: float,
    kb: float = 100.0,
    steps: tuple[float, ...] = (),
    codec: str = "none",
    handing: float = 0.0,
) -> Split:
    steps = steps or (0.001,) * (3 - offline)
    once = 60.0 * offline, 1e9 * offline
    fed = 2 * sps
    return Split(offline, codec, sps, sps, sps, fed, fed, fed, sps, kb, *once, steps, 0.0001, handing)


def test_figures_of_a_busy_machine_are_doubted() -> None:
    """A verdict says so when the rates of a split that it names differ by more than a factor of two."""
    calm = split(0, 100)
    wild = replace(calm, workers_low=100.0, workers_high=201.0)
    assert verdict.doubt([calm, calm]) == ""
    assert "measure again on a quiet machine" in verdict.doubt([calm, wild])


def test_the_roofline_is_the_slower_of_workers_and_storage() -> None:
    """min(workers / time, storage / size); what fits into memory is read once."""
    fast = split(1, 1000, kb=500)
    assert verdict.rate(fast, 10, MachineLimits()) == 2000
    assert verdict.rate(fast, 10, MachineLimits(disk_mbps=100)) == 200
    assert verdict.rate(fast, 10, MachineLimits(disk_mbps=100, memory_gb=0.01)) == 2000
    assert verdict.binds(fast, NAMES, 10, MachineLimits(disk_mbps=100)) == "storage"


def test_the_published_order_of_a_vision_pipeline() -> None:
    """Where storage decides, resized offline beats everything and nothing offline (PRESTO's CV table)."""
    # Samples/s and GB for the same 1.3 million images, as published; storage of 910 MB/s on 8 threads.
    count, limits = 1_281_167, MachineLimits(disk_mbps=910)
    table = [
        split(0, 107 / 2, 146e6 / count),
        split(1, 1789 / 2, 494e6 / count),
        split(2, 1e6, 1535e6 / count),
    ]
    rates = [verdict.rate(each, count, limits) for each in table]
    assert rates[1] > rates[2] > rates[0]
    assert verdict.binds(table[2], NAMES, count, limits) == "storage"
    assert verdict.best(table, count, limits) is table[1]


def test_the_slowest_step_binds() -> None:
    """Which online step takes longest is named by number and name."""
    assert verdict.binds(split(1, 500, steps=(0.001, 0.004)), NAMES, 10, MachineLimits()) == "step 3 (crop)"


def test_handing_batches_over_binds_where_it_takes_longest() -> None:
    """Cheap steps feed less than they compute: the way from a worker to the trainer costs more."""
    assert verdict.binds(split(1, 500, handing=0.002), NAMES, 10, MachineLimits()) == (
        "handing batches to the trainer"
    )
    assert verdict.binds(split(1, 500, handing=0.0005), NAMES, 10, MachineLimits()) == "step 2 (resize)"


@pytest.mark.parametrize(
    ("need", "said"),
    [(50, "it keeps up, and it keeps up with 2 such trainers, not with 3"), (100, "that is borderline"),
     (200, "it does not keep up")],
)  # fmt: skip
def test_the_verdict_on_a_loader_as_it_is(need: float, said: str) -> None:
    """What it feeds, with its interval, and whether a trainer needs more."""
    words = verdict.as_it_is(90, 100, 110, need)
    assert words == f"as it is, it feeds 100 samples/s (90 to 110); you need {need}/s for a trainer: {said}"


def test_a_loop_does_not_come_again_while_the_cache_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many copies of the samples take turns as the cache holds twice, and no more than the dataset has."""
    monkeypatch.setattr(stored, "cache_bytes", lambda: 1000)
    samples = [RawSample(str(number), bytes(100)) for number in range(4)]
    way = available()[0]
    for count, turns in ((4, 1), (12, 3), (100_000, 5)):
        source = Source(["x.tar"], count, 100 * count)
        held = stored.store(tmp_path, source, samples, None, way)
        assert len(held.loops) == turns
        assert [sample.data for sample in held.loop(turns + 1)] == [bytes(100)] * 4
    assert stored.cache_bytes() > 0


def test_less_work_beforehand_wins_a_tie() -> None:
    """A split that is hardly faster is not worth its offline work."""
    assert verdict.best([split(0, 1000), split(1, 1020)], 10, MachineLimits()).offline == 0


@pytest.mark.parametrize(
    ("need", "said"),
    [
        (100, "leave all online, and it keeps up with 2 such trainers, not with 3"),
        (205, "all online is borderline"),
        (500, "do that, and it keeps up with 4 such trainers, not with 5"),
        (2000, "that is borderline"),
        (5000, "no split keeps up"),
    ],
)
def test_the_verdict_answers_the_question(need: float, said: str) -> None:
    """One sentence: what binds, what would help at what cost, and whether that is needed."""
    words = verdict.verdict([split(0, 100), split(1, 1000)], NAMES, 10, MachineLimits(), need)
    assert words.startswith(
        "step 1 (decode) binds at 200 samples/s; decode offline with none (1.0 GB, 60.0 s once)"
    )
    assert said in words


def test_values_come_back() -> None:
    """Bytes and any other value survive packing."""
    for value in (b"", b"\1x", [1, "a"], {"k": 2.5}):
        assert unpacked(packed(value)) == value
    for array in (
        np.arange(6, dtype=np.uint16).reshape(2, 3)[:, ::2],
        np.zeros((0, 4)),
        np.ones(1, np.float32),
    ):
        back = unpacked(packed({"x": array}))["x"]
        assert back.dtype == array.dtype
        assert np.array_equal(back, array)
    assert torch.equal(unpacked(packed([torch.arange(3)]))[0], torch.arange(3))
    with pytest.raises(ConfigurationError, match="a step gives a set"):
        packed({1, 2})


MODULE = """
import random, zlib
def inflate(data): return zlib.decompress(data)
def count(text): return sum(text)
def jitter(n): return n + random.random()
jitter.online = True
steps = [inflate, count, jitter]
def shaky(text): return random.random()
shaking = [inflate, shaky]
turns = iter([True] * 7 + [False] + [True] * 100)
def flip(text): return text[::-1] if next(turns) else text
def double(text): return text + text
seldom = [inflate, double, flip]
def fail(text): raise ValueError("no")
failing = [inflate, fail]
import torch
from torch.utils.data import DataLoader, TensorDataset
numbers = TensorDataset(torch.arange(40))
loader = DataLoader(numbers, batch_size=8, num_workers=0)
class Stream:
    def __iter__(self): return iter(range(100))
stream = Stream()
empty = []
blobs = [zlib.compress(bytes([n]) * 500) for n in range(30)]
once = iter(blobs)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "madeup.py").write_text(MODULE)
    rng = random.Random(0)
    with tarfile.open(tmp_path / "data.tar", "w") as archive:
        for number in range(20):
            file = tmp_path / "sample"
            file.write_bytes(zlib.compress(rng.randbytes(2000)))
            archive.add(file, f"{number}.z")
    monkeypatch.chdir(tmp_path)
    for module in (loops, feeding, whole):
        monkeypatch.setattr(module, "LEAST_S", 0.0)
    monkeypatch.setitem(sys.modules, "madeup", None)
    del sys.modules["madeup"]
    return tmp_path


def test_all_splits_are_measured_and_the_best_is_written(folder: Path) -> None:
    """Every split up to the random step with every codec; shards hold each sample once, after the steps."""
    arguments = [
        "input",
        "madeup:steps",
        "--data",
        "*.tar",
        "--workers",
        "2",
        "--json",
        "out.json",
        "--write",
        "shards",
    ]
    assert bench.main(arguments) == 0
    result: dict[str, Any] = json.loads((folder / "out.json").read_text())
    assert result["samples"] == 20
    assert {row["offline"] for row in result["splits"]} == {0, 1, 2}
    assert len({(row["offline"], row["codec"]) for row in result["splits"]}) == len(result["splits"])
    if result["best"]["split"] != "all online":
        with tarfile.open(folder / "shards" / "shard-00000.tar") as archive:
            assert len(archive.getnames()) == 20


@pytest.mark.parametrize("thing", ["numbers", "loader", "stream"])
def test_datasets_and_loaders_are_timed_as_they_are(folder: Path, thing: str) -> None:
    """A torch Dataset, a DataLoader and any iterable have one split, themselves."""
    arguments = ["input", f"madeup:{thing}", "--workers", "1", "--need", "0.001", "--json", "out.json"]
    assert bench.main(arguments) == 0
    result = json.loads((folder / "out.json").read_text())
    assert [row["split"] for row in result["splits"]] == ["as it is"]
    assert result["splits"][0]["sps"] > 0
    assert "it keeps up" in result["verdict"]


def test_samples_may_be_an_iterable_of_bytes(folder: Path) -> None:
    """--data MODULE:NAME: no file is needed."""
    arguments = ["input", "madeup:steps", "--data", "madeup:blobs", "--workers", "1", "--json", "out.json"]
    assert bench.main(arguments) == 0
    assert json.loads((folder / "out.json").read_text())["samples"] == 30


def test_too_little_disk_is_told_before_anything_is_written(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--write looks at the room on the disk first: one line, and no folder."""
    monkeypatch.setattr(verdict, "best", lambda splits, *_: splits[-1])
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(100, 100, 0))
    assert bench.main(["input", "madeup:steps", "--data", "*.tar", "--workers", "1", "--write", "new"]) == 1
    error = capfd.readouterr().err
    assert "0.00 GB left: choose another disk with --write" in error
    assert error.count("\n") == 1
    assert not (folder / "new").exists()


def test_no_room_for_the_samples_of_a_loop_is_one_sentence(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder for temporary files is full: where, and what to do."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stored, "pack", full)
    assert bench.main(["input", "madeup:steps", "--data", "*.tar", "--workers", "1"]) == 1
    assert "(No space left on device): make room there, or set TMPDIR" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["madeup:shaking", "--data", "*.tar"], "step 2 (shaky) gives two results for one sample"),
        (["madeup:seldom", "--data", "*.tar"], "step 3 (flip) gives two results for one sample"),
        (["madeup:failing", "--data", "*.tar"], "step 2 (fail) raised ValueError on data.tar:"),
        (["madeup:steps", "--data", "nothing*"], "no file matches"),
        (["madeup:none", "--data", "*.tar"], "cannot import the steps"),
        (["madeup", "--data", "*.tar"], "is no MODULE:NAME"),
        (["madeup:steps"], "name them with --data"),
        (["madeup:loader", "--data", "*.tar"], "--data and --write have no meaning"),
        (["madeup:steps", "--data", "madeup:once"], "gives bytes each time it is iterated"),
        (["madeup:steps", "--data", "madeup:numbers"], "gives bytes each time it is iterated"),
        (["madeup:steps", "--data", "*.tar", "--write", "no/where"], "does not exist"),
    ],
)
def test_a_wrong_pipeline_gets_one_sentence(
    folder: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    """What cannot be measured ends with exit code 1 and a line that names it."""
    assert bench.main(["input", *arguments, "--workers", "1"]) == 1
    error = capfd.readouterr().err
    assert said in error
    assert error.count("\n") == 1
